"""What Accelerate, DeepSpeed and FSDP are told, from the recipe alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kitbuild.lock import launcher
from kitbuild.recipe.models import Recipe

if TYPE_CHECKING:
    from collections.abc import Iterator

BASE: dict[str, Any] = {
    "kitbuild": 1,
    "name": "small",
    "model": {"repo": "org/model"},
    "dataset": {"repo": "org/chats"},
    "image": {"cuda": "12.9"},
    "batch": {"global": 32, "micro": 4},
}


def recipe(**changes: Any) -> Recipe:
    return Recipe.model_validate({**BASE, **changes})


def zero(stage: int, **options: Any) -> dict[str, Any]:
    launch = {"processes_per_node": 4, "strategy": "deepspeed", "zero_stage": stage, "deepspeed": options or None}
    found = launcher.deepspeed(recipe(launch=launch))
    assert found is not None
    return found


def values(held: Any) -> Iterator[Any]:
    if isinstance(held, dict):
        for value in held.values():
            yield from values(value)
    else:
        yield held


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_nothing_is_left_to_the_libraries(stage: int) -> None:
    """No value is "auto", and the three batch sizes agree."""
    found = zero(stage)
    assert "auto" not in list(values(found))
    batch = (found["train_micro_batch_size_per_gpu"], found["gradient_accumulation_steps"], found["train_batch_size"])
    assert batch == (4, 2, 32)
    assert found["zero_optimization"]["stage"] == stage
    assert found["zero_optimization"]["overlap_comm"] is False
    assert ("stage3_gather_16bit_weights_on_model_save" in found["zero_optimization"]) is (stage == 3)


def test_options_are_passed_on() -> None:
    """Offload, bucket sizes and the threshold go where DeepSpeed reads them."""
    found = zero(
        3,
        offload_optimizer=True,
        offload_parameters=True,
        reduce_bucket_size=1,
        allgather_bucket_size=2,
        prefetch_bucket_size=3,
        persistence_threshold=0,
    )["zero_optimization"]
    assert found["offload_optimizer"] == found["offload_param"] == {"device": "cpu", "pin_memory": True}
    names = (
        "reduce_bucket_size",
        "allgather_bucket_size",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
    )
    assert [found[name] for name in names] == [1, 2, 3, 0]


def test_clipping_follows_the_recipe() -> None:
    """DeepSpeed clips at train.max_grad_norm."""
    given = recipe(launch={"strategy": "deepspeed"}, train={"max_grad_norm": 0.5})
    assert (launcher.deepspeed(given) or {})["gradient_clipping"] == 0.5


def test_fsdp() -> None:
    """FSDP2 with full weights saved; the layer classes only where the recipe names them."""
    plain = launcher.fsdp(recipe(launch={"strategy": "fsdp"})) or {}
    assert (plain["version"], plain["state_dict_type"], plain["reshard_after_forward"]) == (2, "FULL_STATE_DICT", True)
    assert "transformer_layer_cls_to_wrap" not in plain
    given = {"layers": ("Layer",), "offload": True, "reshard_after_forward": False}
    other = launcher.fsdp(recipe(launch={"strategy": "fsdp", "fsdp": given})) or {}
    assert other["transformer_layer_cls_to_wrap"] == ["Layer"]
    assert (other["cpu_offload"], other["reshard_after_forward"]) == (True, False)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"image": {"cuda": "cpu"}}, {"ACCELERATE_USE_CPU": "true"}),
        ({"image": {"cuda": "cpu"}, "launch": {"strategy": "deepspeed"}}, {"DS_ACCELERATOR": "cpu"}),
        ({"launch": {"strategy": "deepspeed"}}, {"DS_ACCELERATOR": "cuda"}),
    ],
)
def test_environment(changes: dict[str, Any], expected: dict[str, str]) -> None:
    """ACCELERATE_USE_CPU is never set beside DeepSpeed: Accelerate would silently leave DeepSpeed out."""
    always = {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_DYNAMO_BACKEND": "no"}
    assert {**always, **expected} == launcher.environment(recipe(**changes))


def test_the_lock_holds_it() -> None:
    """The lock's launch section has the world, the batch and each library's configuration."""
    found = launcher.launch(recipe(launch={"nodes": 2, "processes_per_node": 2, "strategy": "deepspeed"}))
    assert (found["world_size"], found["accumulation"], found["backend"], found["zero_stage"]) == (4, 2, "nccl", 2)
    assert found["batch"] == {"global": 32, "micro": 4}
    assert (found["deepspeed"]["zero_optimization"]["stage"], found["fsdp"]) == (2, None)
