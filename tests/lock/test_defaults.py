"""Declared defaults out of locked wheels, and the arguments in force."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kitbuild.errors import RecipeError, ResolveError
from kitbuild.lock.arguments import LEFT_OUT, SETTINGS, resolve_arguments
from kitbuild.lock.changes import changes, lines
from kitbuild.lock.defaults import read_defaults
from kitbuild.lock.models import Argument, Defaults, LockedWheel
from kitbuild.recipe.models import Recipe
from kitbuild.recipe.owned import TRAIN_OWNED
from kitbuild.recipe.train_keys import table
from kitbuild.store import Store
from tests.image.kit import make_lock
from tests.lock.package_index import wheel_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from kitbuild.lock.models import Lock

SFT = """
from dataclasses import dataclass, field
from transformers import TrainingArguments
@dataclass
class SFTConfig(TrainingArguments):
    learning_rate: float = field(default=2e-5)
    max_length: int | None = field(default=1024)
"""
ARGUMENTS = """
from dataclasses import dataclass, field
@dataclass
class TrainingArguments:
    learning_rate: float = 5e-5
    seed: int = 42
    optim: str = field(default=default_optim)
"""
INIT = "from .training_args import TrainingArguments as TrainingArguments\n"
FILES = {
    "trl": {"trl/trainer/sft_config.py": SFT},
    "transformers": {"transformers/__init__.py": INIT, "transformers/training_args.py": ARGUMENTS},
    "peft": {
        "peft/tuners/lora/config.py": "from dataclasses import dataclass\n@dataclass\nclass LoraConfig:\n    r: int = 8\n"
    },
}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open({"KITBUILD_HOME": str(tmp_path)})


def locked(store: Store, name: str, files: dict[str, str]) -> LockedWheel:
    data = wheel_bytes(name, "1.0", files=files)
    return LockedWheel(
        name=name,
        version="1.0",
        file=f"{name}-1.0-py3-none-any.whl",
        size=len(data),
        sha256=store.add_bytes(data),
        index="pypi",
    )


def recipe(**changes: Any) -> Recipe:
    fields: dict[str, Any] = {
        "kitbuild": 1,
        "name": "x",
        "seed": 7,
        "model": {"repo": "a/b"},
        "dataset": ({"path": "x.jsonl"},),
        "image": {"cuda": "cpu"},
        "batch": {"global": 8, "micro": 2},
    }
    return Recipe.model_validate(fields | changes)


def real() -> dict[str, dict[str, Any]]:
    """What the tested set declares."""
    return {
        "trl.SFTConfig": {key: row["default"] for key, row in table().train.items()},
        "peft.LoraConfig": {key: row["default"] for key, row in table().lora.items()},
    }


def ours(arguments: dict[str, Argument]) -> dict[str, Any]:
    return {name: argument.value for name, argument in arguments.items() if argument.origin == "kitbuild"}


def test_defaults_are_read_from_the_wheels(store: Store) -> None:
    """Own fields beat inherited ones across two wheels; what is no literal is its source."""
    wheels = [locked(store, name, files) for name, files in FILES.items()]
    assert read_defaults(wheels, store) == {
        "trl.SFTConfig": {"learning_rate": 2e-05, "seed": 42, "optim": "default_optim", "max_length": 1024},
        "peft.LoraConfig": {"r": 8},
    }


def test_a_default_that_a_library_changed(store: Store) -> None:
    """A newer trainer with another default gives another lock, and its difference names class, field and both values."""

    def lock(wheels: list[LockedWheel]) -> Lock:
        declared = read_defaults(wheels, store)
        arguments, device_dependent = resolve_arguments(recipe(), declared)
        defaults = Defaults(declared=declared, arguments=arguments, device_dependent=device_dependent)
        return make_lock(store, tuple(wheels), defaults=defaults)

    old = [locked(store, name, files) for name, files in FILES.items()]
    source = {"trl/trainer/sft_config.py": SFT.replace("1024", "2048")}
    new = [locked(store, "trl", source), *(wheel for wheel in old if wheel.name != "trl")]
    new = [wheel.model_copy(update={"version": "1.1"}) if wheel.name == "trl" else wheel for wheel in new]
    assert lock(old).content_sha256 != lock(new).content_sha256
    assert lines(changes(lock(old), lock(new))) == [
        "packages:",
        "  trl 1.0 → 1.1",
        "library defaults:",
        "  trl.SFTConfig.max_length 1024 → 2048",
        "arguments in force:",
        "  max_length 1024 (library) → 2048 (library)",
    ]


def test_what_is_not_locked_declares_nothing(store: Store) -> None:
    """Without peft there is no LoraConfig."""
    wheels = [locked(store, name, FILES[name]) for name in ("trl", "transformers")]
    assert list(read_defaults(wheels, store)) == ["trl.SFTConfig"]


@pytest.mark.parametrize("source", ["class Other: pass\n", "def broken(:\n"])
def test_a_wheel_without_the_class_is_exit_4(store: Store, source: str) -> None:
    """A trl that moved its class is named, never read as one without arguments."""
    wheels = [locked(store, "trl", {"trl/trainer/sft_config.py": source}), locked(store, "transformers", {})]
    with pytest.raises(ResolveError, match=r"^trl.SFTConfig cannot be read from trl-1.0-py3-none-any.whl and transf"):
        read_defaults(wheels, store)


def test_a_missing_wheel_is_exit_4(store: Store) -> None:
    """Defaults are read from the store only."""
    wheel = locked(store, "peft", FILES["peft"])
    store.path(wheel.sha256).unlink()
    with pytest.raises(ResolveError, match=r"^peft-1.0-py3-none-any.whl \(sha256 .*\) is not in the store$"):
        read_defaults([wheel], store)


def test_every_argument_has_a_value_and_an_origin() -> None:
    """The recipe's keys, kitbuild's settings, and the library's defaults for the rest; directories are left out."""
    arguments, device_dependent = resolve_arguments(
        recipe(train={"learning_rate": 1e-3, "max_length": 64, "optim": "sgd"}), real()
    )
    assert set(arguments) == set(table().train) - LEFT_OUT
    assert arguments["learning_rate"] == Argument(value=1e-3, origin="recipe")
    assert arguments["optim"] == Argument(value="sgd", origin="recipe")
    assert arguments["weight_decay"] == Argument(value=0.0, origin="library")
    assert device_dependent == ("dataloader_pin_memory", "optim", "torch_compile_backend")
    assert ours(arguments) == {
        "average_tokens_across_devices": True,
        "bf16": True,
        "data_seed": 7,
        "dataloader_pin_memory": False,
        "dataset_num_proc": None,
        "ddp_find_unused_parameters": False,
        "disable_tqdm": True,
        "eval_strategy": "no",
        "fp16": False,
        "gradient_accumulation_steps": 4,
        "ignore_data_skip": False,
        "liger_kernel_config": None,
        "logging_nan_inf_filter": False,
        "logging_steps": 1,
        "logging_strategy": "no",
        "per_device_train_batch_size": 2,
        "report_to": "none",
        "save_only_model": False,
        "save_strategy": "no",
        "seed": 7,
        "tf32": None,
        "trust_remote_code": False,
        "use_cpu": True,
        "use_liger_kernel": False,
    }


@pytest.mark.parametrize(
    ("processes", "determinism", "kept"),
    [
        (1, "strict", False),
        (2, "strict", False),
        (4, "strict", True),
        (4, "record", False),
        (4, {"mode": "strict", "virtual_ranks": 4}, False),
    ],
)
def test_buckets_stay_where_their_order_matters(processes: int, determinism: Any, kept: bool) -> None:  # noqa: FBT001
    """DDP looks for unused parameters, and so keeps its buckets, under strict from three processes on."""
    changes = {"launch": {"processes_per_node": processes}, "batch": {"global": 8, "micro": 2}, "train": {}}
    arguments, _ = resolve_arguments(recipe(**changes, determinism=determinism), real())
    assert arguments["ddp_find_unused_parameters"] == Argument(value=kept, origin="kitbuild")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model": {"repo": "a/b", "dtype": "float32"}}, {"bf16": False, "fp16": False}),
        ({"track": ("trackio",)}, {"report_to": ["trackio"], "logging_strategy": "steps"}),
        ({"train": {"save_steps": 10}}, {"save_strategy": "steps"}),
        ({"image": {"cuda": "12.8"}}, {"use_cpu": False, "dataloader_pin_memory": True}),
        (
            {"image": {"cuda": "12.8"}, "launch": {"processes_per_node": 2}},
            {"ddp_backend": "nccl", "gradient_accumulation_steps": 2},
        ),
        ({"launch": {"processes_per_node": 2}}, {"ddp_backend": "gloo"}),
        ({"launch": {"strategy": "fsdp"}}, {"fsdp": True}),
        ({"launch": {"strategy": "deepspeed"}}, {"max_grad_norm": 1.0, "fsdp": None}),
        ({"launch": {"strategy": "deepspeed"}, "train": {"max_grad_norm": 0.5}}, {"max_grad_norm": None}),
        ({"evaluate": {"dataset": {"path": "e.jsonl"}, "batch": 5}}, {"per_device_eval_batch_size": 5}),
        (
            {"liger": {"rope": True}},
            {
                "use_liger_kernel": True,
                "liger_kernel_config": {
                    "rope": True,
                    "swiglu": False,
                    "geglu": False,
                    "rms_norm": False,
                    "layer_norm": False,
                    "cross_entropy": False,
                    "fused_linear_cross_entropy": False,
                },
            },
        ),
    ],
)
def test_kitbuilds_settings_follow_the_recipe(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    """Each key of the recipe that owns an argument sets it."""
    arguments, _ = resolve_arguments(recipe(**changes), real())
    assert {key: ours(arguments).get(key) for key in expected} == expected


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_is_told_every_number(stage: int) -> None:
    """No `auto` batch size (ZeRO-3 fails with it), no overlapped communication; stage 3 gathers its weights."""
    arguments, _ = resolve_arguments(recipe(launch={"strategy": "deepspeed", "zero_stage": stage}), real())
    found = ours(arguments)["deepspeed"]
    assert (found["train_batch_size"], found["train_micro_batch_size_per_gpu"]) == (8, 2)
    assert found["zero_optimization"]["overlap_comm"] is False
    assert ("stage3_gather_16bit_weights_on_model_save" in found["zero_optimization"]) == (stage == 3)


def test_keys_that_the_locked_trainers_lack_are_refused_at_once() -> None:
    """Another version of a trainer: every unknown key is named, and liger where it is gone."""
    declared: dict[str, dict[str, Any]] = {"trl.SFTConfig": {"learning_rate": 1.0}, "peft.LoraConfig": {"r": 8}}
    with pytest.raises(RecipeError) as caught:
        resolve_arguments(
            recipe(train={"max_length": 3, "learning_rate": 1.0}, lora={"r": 4, "alpha": 2}, liger={"rope": True}),
            declared,
        )
    assert [(problem.key, problem.message) for problem in caught.value.problems] == [
        ("train.max_length", "the locked SFTConfig has no such key"),
        ("liger", "the locked SFTConfig has no use_liger_kernel"),
        ("lora.alpha", "the locked LoraConfig has no such key"),
    ]


def test_what_kitbuild_fixes_no_recipe_may_set() -> None:
    """An argument that does not yield is one that the recipe's reader refuses, and every reason is written."""
    fixed = {name for name, setting in SETTINGS.items() if not setting.yields}
    assert fixed - set(TRAIN_OWNED) == set()
    assert all(setting.reason for setting in SETTINGS.values())
