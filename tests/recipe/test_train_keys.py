"""The table of trainers' keys, what kitbuild owns of it, and the documents made from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from kitbuild.errors import ResolveError
from kitbuild.recipe import reference_markdown, schema
from kitbuild.recipe.owned import LORA_OWNED, TRAIN_OWNED
from kitbuild.recipe.train_keys import LORA, TRAIN, table
from kitbuild.recipe.trainers import TABLE, dump, trainer_table

ROOT = Path(__file__).parents[2]
# Names of other versions, refused with the same words.
OTHER_VERSIONS = {
    "evaluation_strategy",
    "fsdp_min_num_params",
    "fsdp_transformer_layer_cls_to_wrap",
    "logging_dir",
    "no_cuda",
    "push_to_hub_token",
}
SOURCES = {
    "transformers/training_args.py": """
from dataclasses import dataclass, field
from enum import Enum
class Names(ExplicitEnum):
    ADAM = "adam"
@dataclass
class TrainingArguments:
    _PRIVATE = ["x"]
    optim: Names | str = field(default=default_optim)
    rate: float = field(default=5e-5)
    places: None | str | list[str] = None
""",
    "trl/trainer/sft_config.py": """
from dataclasses import dataclass, field
from transformers.training_args import TrainingArguments
@dataclass
class SFTConfig(TrainingArguments):
    rate: float = field(default=2e-5)
    flag: str | None | Literal[False] = None
    extra: dict[str, Any] | str | None = None
""",
    "peft/tuners/lora/config.py": """
from dataclasses import dataclass, field
from typing import Optional, Union
@dataclass
class LoraConfig:
    modules: Optional[Union[list[str], str]] = field(default=None)
    bias: Literal["none", "all"] = field(default="none")
    other: EvaConfig = field(default_factory=dict)
""",
}
EXPECTED: dict[str, Any] = {
    "packages": {"transformers": "5.0", "trl": "1.0", "peft": "0.1"},
    "train": {
        "optim": {"kinds": ["str"], "default": "adamw_torch_fused", "choices": ["adam"]},
        "rate": {"kinds": ["float"], "default": 2e-5},
        "places": {"kinds": ["list", "null", "str"], "default": None},
        "flag": {"kinds": ["bool", "null", "str"], "default": None},
        "extra": {"kinds": ["dict", "null", "str"], "default": None},
    },
    "lora": {
        "modules": {"kinds": ["list", "null", "str"], "default": None},
        "bias": {"kinds": ["str"], "default": "none", "choices": ["none", "all"]},
        "other": {"kinds": ["dict"], "default": {}},
    },
}


def members() -> dict[str, str]:
    metadata = {f"{name}-{version}.dist-info/METADATA": "" for name, version in EXPECTED["packages"].items()}
    return {**SOURCES, **metadata}


def test_table_from_wheels(tmp_path: Path) -> None:
    """Kinds, choices and defaults are read from wheels, the subclass's default over the base's."""
    wheels = []
    for name in EXPECTED["packages"]:
        wheels.append(tmp_path / f"{name}.whl")
        with zipfile.ZipFile(wheels[-1], "w") as wheel:
            for member, text in members().items():
                if member.startswith((f"{name}/", f"{name}-")):
                    wheel.writestr(member, text)
    assert trainer_table(wheels) == EXPECTED


def test_table_from_site_packages(tmp_path: Path) -> None:
    """An installed environment gives the same table."""
    for member, text in members().items():
        (tmp_path / member).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / member).write_text(text, encoding="utf-8")
    assert trainer_table([tmp_path]) == EXPECTED


def test_no_trainers(tmp_path: Path) -> None:
    """Where a trainer is missing, the error names it."""
    with pytest.raises(ResolveError, match=r"^no source of transformers, trl, peft$"):
        trainer_table([tmp_path])


@pytest.mark.train
def test_table_is_that_of_the_tested_set() -> None:
    """The committed table equals what the tested set's source declares (KITBUILD_TRAIN_PYTHON is its interpreter)."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    command = [os.environ["KITBUILD_TRAIN_PYTHON"], "-c", code]
    folder = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert dump(trainer_table([Path(folder)])) == TABLE.read_text(encoding="utf-8")


def test_table_is_canonical() -> None:
    """The committed table is written as the generator writes it."""
    text = TABLE.read_text(encoding="utf-8")
    assert dump(json.loads(text)) == text


def test_table_versions() -> None:
    """The table is that of the versions that every target installs."""
    import tomllib  # noqa: PLC0415

    for target in ("cpu", "cuda128", "cuda129"):
        path = ROOT / "images" / target / "packages.toml"
        packages = tomllib.loads(path.read_text(encoding="utf-8"))["packages"]
        assert dict(table().packages) == {name: packages[name] for name in table().packages}, target


def test_owned_keys_exist() -> None:
    """Each refused key is declared by the tested set, or by another version of it."""
    assert set(TRAIN_OWNED) - set(table().train) == OTHER_VERSIONS
    assert set() == set(LORA_OWNED) - set(table().lora)


def test_what_locking_decides_is_refused() -> None:
    """Each argument that locking gives a value of its own is refused in `train`, unless a recipe may change it."""
    from kitbuild.lock.arguments import SETTINGS  # noqa: PLC0415 - a later step; only this fact joins the two

    decided = {name for name, setting in SETTINGS.items() if not setting.yields}
    assert decided <= set(TRAIN_OWNED)
    assert not {name for name, setting in SETTINGS.items() if setting.yields} & set(TRAIN_OWNED)


def test_renamed_keys_are_not_keys() -> None:
    """A key with a successor is no key of the tested set, and a successor is one of it or of the recipe."""
    for section, declared in ((TRAIN, table().train), (LORA, table().lora)):
        assert set() == set(section.renamed) & set(declared)
        assert set(section.ranges) <= set(declared)


def test_reference_is_current() -> None:
    """docs/recipe.md is what the models and tables say (`python -m kitbuild.recipe` writes it)."""
    assert reference_markdown() == (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8")


def test_reference_names_every_key() -> None:
    """Each key of the trainers is in the reference, taken or refused."""
    text = reference_markdown()
    assert [key for key in {**table().train, **table().lora} if f"| `{key}` |" not in text] == []


def test_schema_is_closed() -> None:
    """The schema for editors refuses unknown keys, also in `train`, and takes the short forms."""
    made = schema()
    assert made["additionalProperties"] is False
    assert made["properties"]["train"]["additionalProperties"] is False
    assert "output_dir" not in made["properties"]["train"]["properties"]
    assert {"const": False} in made["properties"]["liger"]["anyOf"]
    assert {"enum": ["strict", "record"]} in made["properties"]["determinism"]["anyOf"]
    json.dumps(made)


def test_generators_run_as_modules(tmp_path: Path) -> None:
    """The table's generator says what is missing instead of writing half a table."""
    command = [sys.executable, "-m", "kitbuild.recipe.trainers", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, "no source of transformers, trl, peft" in done.stderr) == (1, True)
    assert dump(json.loads(TABLE.read_text(encoding="utf-8"))) == TABLE.read_text(encoding="utf-8")
