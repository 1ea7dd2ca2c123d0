"""Stand-ins for what is too large for a test: the packages of the tested sets as wheels of a few lines.

Names, versions, tags and dependencies are the real ones as far as a resolver looks at them; of the code there is
only what a lock reads: the fields that the trainers' configuration classes declare.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from kitbuild.base.targets import load_target
from tests.image.kit import record_row

if TYPE_CHECKING:
    from tests.lock.package_index import PackageIndex

LINUX = "cp311-cp311-manylinux_2_28_x86_64"
OTHERS = ("cp312-cp312-manylinux_2_28_x86_64", "cp311-cp311-manylinux_2_28_aarch64", "cp311-cp311-win_amd64")
ANY = "py3-none-any"
TORCH = {
    "2.8.0+cu129": ("triton==3.4.0", "nvidia-cuda-runtime-cu12==12.9.79"),
    "2.8.0": ("triton==3.4.0", "nvidia-cuda-runtime-cu12==12.8.90"),
    "2.10.0": ("triton==3.6.0", "nvidia-cuda-runtime-cu12==12.8.90"),
    "2.11.0": ("triton==3.6.0", "nvidia-cuda-runtime==13.0.48"),
}
REQUIRES = {
    "accelerate": ("torch>=2.0", "huggingface-hub>=0.21"),
    "liger-kernel": ("torch>=2.1.2", "triton>=2.3.1"),
    "peft": ("torch>=1.13", "transformers", "accelerate>=0.21"),
    "transformers": ("huggingface-hub>=1.31,<3", "tokenizers>=0.23.1,<0.24"),
    "trl": ("accelerate>=1.4", "datasets>=4.7", "transformers>=4.56.2"),
}
NATIVE = ("tokenizers",)


def publish_packages(index: PackageIndex, *, targets: tuple[str, ...] = ("cuda128", "cuda129")) -> None:
    """Every package that the tested sets name, what they need, and builds that fit another system."""
    for target in map(load_target, targets):
        for name, version in {**target.packages, **target.extras.get("deepspeed", {})}.items():
            if name != "torch":
                publish(index, name.replace("_", "-"), version)
    publish(index, "trl", "1.15.0")
    for version, requires in TORCH.items():
        for tag in (LINUX, *OTHERS):
            publish(index, "torch", version, tag=tag, requires=requires)
        for requirement in requires:
            name, _, exact = requirement.partition("==")
            publish(index, name, exact, tag=LINUX if name == "triton" else "py3-none-manylinux_2_27_x86_64")


def publish(
    index: PackageIndex, name: str, version: str, *, tag: str | None = None, requires: tuple[str, ...] | None = None
) -> None:
    """One wheel, its code made for its name."""
    tag = tag or (LINUX if name in NATIVE else ANY)
    needs = REQUIRES.get(name, ()) if requires is None else requires
    module = name.replace("-", "_")
    data = wheel(module, version, tag=tag, requires=needs, sources=sources(name, version, tag))
    index.publish(name, f"{module}-{version}-{tag}.whl", data)


def wheel(module: str, version: str, *, tag: str, requires: tuple[str, ...], sources: dict[str, str]) -> bytes:
    """A wheel that can be installed: METADATA, WHEEL, RECORD."""
    info = f"{module}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {module.replace('_', '-')}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    about = f"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: {str(tag == ANY).lower()}\nTag: {tag}\n"
    members = {**sources, f"{info}/METADATA": metadata, f"{info}/WHEEL": about}
    rows = "".join(record_row(path, text.encode()) for path, text in members.items())
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for path, text in {**members, f"{info}/RECORD": f"{rows}{info}/RECORD,,\n"}.items():
            archive.writestr(zipfile.ZipInfo(path), text)
    return stream.getvalue()


def sources(name: str, version: str, tag: str) -> dict[str, str]:
    """The modules of a package."""
    module = name.replace("-", "_")
    found = {f"{module}/__init__.py": f'__version__ = "{version}"\nBUILD = "{tag}"\n'}
    if name == "transformers":
        fields = {key: row for key, row in _table("train").items() if key not in _SFT_ONLY}
        found["transformers/training_args.py"] = _dataclass("TrainingArguments", fields)
        found["transformers/__init__.py"] += "from .training_args import TrainingArguments\n"
    if name == "trl":
        fields = {key: row for key, row in _table("train").items() if key in _SFT_ONLY}
        text = "from transformers import TrainingArguments\n\n\n" + _dataclass(
            "SFTConfig", fields, base="TrainingArguments"
        )
        found |= {"trl/trainer/__init__.py": "", "trl/trainer/sft_config.py": text}
    if name == "peft":
        folders = ("peft/tuners/__init__.py", "peft/tuners/lora/__init__.py")
        found |= {**dict.fromkeys(folders, ""), "peft/tuners/lora/config.py": _dataclass("LoraConfig", _table("lora"))}
    if name in {"torch", "triton"}:
        found[f"{module}/lib.so"] = hashlib.sha256(f"{name} {version} {tag}".encode()).hexdigest() * 64
    return found


_SFT_ONLY = frozenset(
    {"assistant_only_loss", "completion_only_loss", "dataset_num_proc", "loss_type", "max_length", "packing"}
)


def _table(section: str) -> dict[str, dict[str, Any]]:
    table: dict[str, Any] = json.loads((files("kitbuild.recipe") / "train_keys.json").read_text())
    rows: dict[str, dict[str, Any]] = table[section]
    return rows


def _dataclass(name: str, fields: dict[str, dict[str, Any]], *, base: str = "") -> str:
    """A dataclass of these fields with their defaults."""
    lines = ["from dataclasses import dataclass, field", "from typing import Any", "", "", "@dataclass"]
    lines += [f"class {name}({base}):" if base else f"class {name}:"]
    for key, row in sorted(fields.items()):
        default = row["default"]
        empty = isinstance(default, dict | list)
        lines.append(
            f"    {key}: Any = " + (f"field(default_factory={type(default).__name__})" if empty else repr(default))
        )
    return "\n".join(lines) + "\n"
