"""Step 1: the rules about processes and strategies; part of the list in `rules`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kitbuild.recipe.findings import Finding, Findings

if TYPE_CHECKING:
    from collections.abc import Callable

    from kitbuild.recipe.models import Recipe


def batch_divides(recipe: Recipe) -> Findings:
    """Accumulation is a whole number."""
    batch, world = recipe.batch, recipe.launch.world_size
    if batch.global_ % (batch.micro * world):
        yield Finding(
            ("batch", "global"),
            f"{batch.global_} is not a multiple of micro {batch.micro} times {world} process{'es' if world > 1 else ''}",
            f"write {-(-batch.global_ // (batch.micro * world)) * batch.micro * world}, say",
        )


def sharded_dtype(recipe: Recipe) -> Findings:
    """DeepSpeed and FSDP train float32 or bfloat16: float16 would need a loss scaler, which changes the loss."""
    strategy = recipe.launch.strategy
    if strategy != "ddp" and recipe.model.dtype == "float16":
        yield Finding(("model", "dtype"), f"float16 does not go with {strategy}", "write bfloat16 or float32")


def overlapped(recipe: Recipe) -> Findings:
    """Strict refuses deepspeed.overlap_comm: what is reduced together then depends on timing."""
    given = recipe.launch.deepspeed
    if given and given.overlap_comm and recipe.determinism.mode == "strict":
        yield Finding(
            ("launch", "deepspeed", "overlap_comm"),
            "strict: overlapped communication has no fixed order",
            "remove it, or write determinism: record",
        )


def offload(recipe: Recipe) -> Findings:
    """Offload moves what a GPU holds into host memory; on a CPU there is nothing to move."""
    given = recipe.launch.deepspeed
    if recipe.image.cuda != "cpu" or given is None:
        return
    for key in ("offload_optimizer", "offload_parameters"):
        if getattr(given, key):
            yield Finding(("launch", "deepspeed", key), f"{key} needs a GPU; image.cuda is cpu", "remove it")


def checkpointed_twice(recipe: Recipe) -> Findings:
    """FSDP's activation checkpointing goes instead of train.gradient_checkpointing, which TRL has on."""
    given = recipe.launch.fsdp
    if given and given.activation_checkpointing and recipe.train.get("gradient_checkpointing", True):
        yield Finding(
            ("launch", "fsdp", "activation_checkpointing"),
            "activations would be recomputed twice",
            "write train.gradient_checkpointing: false",
        )


LAUNCH_RULES: tuple[tuple[tuple[str, ...], Callable[[Recipe], Findings]], ...] = (
    (("batch", "launch"), batch_divides),
    (("model", "launch"), sharded_dtype),
    (("launch", "determinism"), overlapped),
    (("image", "launch"), offload),
    (("launch", "train"), checkpointed_twice),
)
