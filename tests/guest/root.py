"""A tree as the image has it (KIT_ROOT), with a tiny model, made from the models of the lock and of the recipe."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kitbuild.lock import launcher
from kitbuild.lock.arguments import LEAVE, SETTINGS
from kitbuild.lock.models import (
    Argument,
    Defaults,
    Lock,
    LockedBase,
    LockedDataset,
    LockedFile,
    LockedKernel,
    LockedModel,
    LockedTree,
    Maker,
    PackageSet,
)
from kitbuild.recipe.models import Recipe
from tests.hub import content, kernel_repos

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

ATTENTION_COMMIT, LAYERS_COMMIT = "a" * 40, "b" * 40
ZERO = "0" * 64
RECIPE = b"kitbuild: 1\n"
TEMPLATE = (
    b"{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    b"{%- if message.role == 'assistant' %}{% generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}"
    b"{%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}{{- '\\n' }}{%- endfor %}"
    b"{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
ATTENTION = "kernels-community/flash-attn2"
FUNCTIONS = {"missing_varlen": ("flash_attn_func",)}
"""What a kernel offers that lacks something."""
LAYERS = "kernels-community/liger-kernels"


@dataclass(frozen=True, kw_only=True)
class Root:
    path: Path
    out: Path
    cache: Path

    @property
    def environ(self) -> dict[str, str]:
        return {
            "KIT_ROOT": str(self.path),
            "KIT_OUT": str(self.out),
            "KIT_CACHE": str(self.cache),
            "KIT_ENGINE": "local",
        }


def recipe(**changes: Any) -> dict[str, Any]:
    """The tiny recipe as a mapping; keys are replaced whole."""
    base: dict[str, Any] = {
        "kitbuild": 1,
        "name": "tiny",
        "seed": 7,
        "model": {"config": content.qwen3_config(tied=True), "tokenizer": {"path": "tokenizer"}, "dtype": "float32"},
        "dataset": {"path": "data/chats.jsonl"},
        "image": {"cuda": "cpu"},
        "batch": {"global": 4, "micro": 2},
        "train": {"max_length": 128, "learning_rate": 1e-3, "max_steps": 4},
        "kernels": {"attention": f"{ATTENTION}@v4", "layers": {"RMSNorm": f"{LAYERS}@v3:LigerRMSNorm"}},
    }
    return base | changes


def locked(files: Mapping[str, bytes]) -> tuple[LockedFile, ...]:
    return tuple(
        LockedFile(path=path, size=len(data), sha256=hashlib.sha256(data).hexdigest())
        for path, data in sorted(files.items())
    )


def kernel(role: str, repo: str, commit: str, files: Mapping[str, bytes], layers: dict[str, str]) -> LockedKernel:
    return LockedKernel(
        role=role,
        repo=repo, revision="v1", commit=commit, member=None, layers=layers, variant="torch-cpu", rejected=(), kernel_version=1,
        files=locked(files), metadata_sha256=ZERO, metadata_digest=None, dependencies=(), publisher=repo.partition("/")[0],
        trusted=True, signature="absent",
    )  # fmt: skip


def lock_of(
    given: Recipe, inputs: Mapping[str, Mapping[str, bytes]], kernels: tuple[LockedKernel, ...], defaults: Defaults
) -> Lock:
    def tree(name: str) -> LockedTree:
        return LockedTree(path=name, files=locked(inputs[name]))

    def dataset(name: str, weight: float | None = None) -> LockedDataset:
        return LockedDataset(
            tree=tree(name), format="json", config=None, split="train", data_files=tuple(inputs[name]), weight=weight
        )

    digest = "sha256:" + ZERO
    base = LockedBase(
        name="cpu", manifest_digest=digest, config_digest=digest, diff_ids=(), dockerfile_sha256=None, upstream=None, python="3.11",
        interpreter="/usr/bin/python3.11", glibc="2.36", architecture="amd64", cuda=None, packages=(),
    )  # fmt: skip
    names = sorted(name for name in inputs if name.startswith("data/"))
    return Lock(
        version=1, name=given.name, recipe_sha256=hashlib.sha256(RECIPE).hexdigest(), kitbuild=Maker(version="0.1.0", guest_sha256=ZERO, layout=1),
        target=given.image.target, package_set=PackageSet(target="cpu", sha256=ZERO), base=base, wheels=(),
        model=LockedModel(
            weights=tree("model") if "model" in inputs else None, config=given.model.config,
            tokenizer=tree("tokenizer") if "tokenizer" in inputs else None, chat_template=locked({"chat_template.jinja": TEMPLATE})[0] if given.model.chat_template else None,
        ),
        datasets=tuple(dataset(name, item.weight) for name, item in zip(names, given.dataset, strict=True)),
        evaluate=dataset("evaluate") if given.evaluate else None,
        kernels=kernels, defaults=defaults, launch=launcher.launch(given), recipe=given.model_dump(mode="json", by_alias=True, exclude={"name"}), advisories=(),
    )  # fmt: skip


def content_json(files: Mapping[str, str], links: Mapping[str, str]) -> bytes:
    """As the image has it."""
    return json.dumps({"version": 1, "files": files, "links": links}, indent=0, sort_keys=True).encode() + b"\n"


def relist(root: Path, *names: str, links: Mapping[str, str] | None = None) -> None:
    """Make content.json say what is there, for some files."""
    place = root / "kit/content.json"
    held = json.loads(place.read_bytes())
    held["files"] |= {f"/{name}": hashlib.sha256((root / name).read_bytes()).hexdigest() for name in names}
    place.write_bytes(content_json(held["files"], held["links"] | dict(links or {})))


def build(
    folder: Path,
    *,
    attention: str = "flash_attn",
    layers: str = "liger_layers",
    defaults: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Root:
    """Write the whole tree; `attention` and `layers` are the sources of the kernels."""
    given = Recipe.model_validate(
        {key: tuple(value) if isinstance(value, list) else value for key, value in recipe(**changes).items()}
    )
    inputs: dict[str, Mapping[str, bytes]] = {
        f"data/{index}": {"chats.jsonl": content.chat_rows(40 * index, 24)} for index in range(len(given.dataset))
    }
    if given.model.config is None:
        inputs["model"] = content.qwen3_files(seed=3, tied=True)
    else:
        inputs["tokenizer"] = content.tokenizer_files()
    if given.evaluate:
        inputs["evaluate"] = {"chats.jsonl": content.chat_rows(1000, 8)}
    repos: dict[str, tuple[str, dict[str, bytes]]] = {}
    kernels: list[LockedKernel] = []
    if given.kernels.attention_reference:
        files = kernel_repos.variant_files(
            "flash-attn2", "torch-cpu", kernel_repos.attention(attention, *FUNCTIONS.get(attention, ())), version=4
        )
        repos[ATTENTION] = (ATTENTION_COMMIT, files)
        kernels.append(kernel("attention", ATTENTION, ATTENTION_COMMIT, files, {}))
    if given.kernels.layers:
        whole = kernel_repos.liger_kernels(3, layers)
        files = {path: data for path, data in whole.items() if path.startswith("build/torch-cpu/")}
        repos[LAYERS] = (LAYERS_COMMIT, files)
        kernels.append(
            kernel("layers", LAYERS, LAYERS_COMMIT, files, dict.fromkeys(given.kernels.layers, "LigerRMSNorm"))
        )
    decided = {name: setting.value(given) for name, setting in SETTINGS.items()}
    values = {name: Argument(value=value, origin="kitbuild") for name, value in decided.items() if value is not LEAVE}
    values |= {name: Argument(value=value, origin="recipe") for name, value in given.train.items()}
    declared = {"trl.SFTConfig": dict(defaults)} if defaults else {}
    lock = lock_of(given, inputs, tuple(kernels), Defaults(declared=declared, arguments=values, device_dependent=()))
    held = {f"inputs/{name}/{path}": data for name, tree in inputs.items() for path, data in tree.items()}
    if given.model.chat_template:
        held["inputs/chat_template.jinja"] = TEMPLATE
    image = {
        "kit/lock.json": lock.to_bytes(),
        "kit/recipe.yaml": RECIPE,
        "opt/kit/lib/fake.py": b"# one file of the venv\n",
    }
    for repo, (commit, files) in repos.items():
        top = f"kit/kernels/kernels--{repo.replace('/', '--')}"
        image |= {f"{top}/snapshots/{commit}/{path}": data for path, data in files.items()}
    listing = {f"/{path}": hashlib.sha256(data).hexdigest() for path, data in image.items()}
    image["kit/content.json"] = content_json(listing, {})
    root = Root(path=folder / "root", out=folder / "out", cache=folder / "cache")
    for path, data in {**held, **image}.items():
        (root.path / path).parent.mkdir(parents=True, exist_ok=True)
        (root.path / path).write_bytes(data)
    root.out.mkdir()
    root.cache.mkdir()
    return root
