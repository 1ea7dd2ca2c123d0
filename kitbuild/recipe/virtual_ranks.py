"""Step 1: what goes with `determinism.virtual_ranks`, and what cannot: each by name, with what to write instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kitbuild.recipe.findings import Finding, Findings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from kitbuild.recipe.models import Recipe
    from kitbuild.recipe.strict_yaml import Path

HERE: Path = ("determinism", "virtual_ranks")
ONE_NUMBER = "or remove virtual_ranks: the same bits on one number of processes"
_NO_WRAPPER = "virtual_ranks trains without DistributedDataParallel: it would do nothing"
_COMPILED = "compiled code follows the shapes that a process met before, so the number of processes"


def _layerwise(value: Any) -> bool:
    return isinstance(value, str) and (value.endswith("_layerwise") or value in ("lomo", "adalomo"))


# Key of `train`, the values that are refused, why, and what to do.
REFUSED: Mapping[str, tuple[Callable[[Any], bool], str, str]] = {
    "train_sampling_strategy": (
        lambda value: value in ("group_by_length", "batch_rebalance"),
        "rows would be dealt by the number of processes; virtual_ranks needs the same rows on any number",
        "write random",
    ),
    "torch_compile": (bool, f"virtual_ranks: {_COMPILED}", f"remove it, {ONE_NUMBER}"),
    "torch_compile_backend": (bool, f"virtual_ranks: {_COMPILED}", f"remove it, {ONE_NUMBER}"),
    "torch_compile_mode": (bool, f"virtual_ranks: {_COMPILED}", f"remove it, {ONE_NUMBER}"),
    "optim": (
        _layerwise,
        "this optimizer steps during the backward pass; virtual_ranks merges the gradients after it",
        "write adamw_torch_fused",
    ),
    "ddp_bucket_cap_mb": (bool, _NO_WRAPPER, "remove it"),
    "ddp_find_unused_parameters": (bool, _NO_WRAPPER, "remove it"),
    "ddp_broadcast_buffers": (bool, _NO_WRAPPER, "remove it"),
    "ddp_static_graph": (bool, _NO_WRAPPER, "remove it"),
}


def virtual_ranks(recipe: Recipe) -> Findings:
    """virtual_ranks is global / micro, with ddp on a power of two of processes, and with nothing that follows their number."""
    ranks = recipe.determinism.virtual_ranks
    if ranks is None or recipe.determinism.mode != "strict":
        return
    yield from _launch(recipe, ranks)
    yield from _batch(recipe, ranks)
    if recipe.kernels.attention == "flex_attention":
        yield Finding(
            ("kernels", "attention"), f"virtual_ranks: {_COMPILED}", f"write sdpa or a flash kernel, {ONE_NUMBER}"
        )
    for key, (refused, why, advice) in REFUSED.items():
        if key in recipe.train and refused(recipe.train[key]):
            yield Finding(("train", key), why, advice)


def _launch(recipe: Recipe, ranks: int) -> Findings:
    strategy, world = recipe.launch.strategy, recipe.launch.world_size
    if strategy != "ddp":
        yield Finding(
            HERE,
            f"virtual_ranks goes with ddp; {strategy} adds gradients up in an order of its own",
            f"write launch.strategy: ddp, {ONE_NUMBER}",
        )
    if world > ranks or world & (world - 1):
        lower = min(ranks, 1 << (world.bit_length() - 1))
        yield Finding(HERE, f"{world} processes are not a power of two up to {ranks}", f"launch {lower}, say")


def _batch(recipe: Recipe, ranks: int) -> Findings:
    batch = recipe.batch
    if batch.global_ == batch.micro * ranks:
        return
    told = f"batch.global {batch.global_} is not micro {batch.micro} times {ranks} ranks"
    fitting = batch.global_ // batch.micro
    fits = batch.global_ % batch.micro == 0 and not fitting & (fitting - 1)
    hint = f"write virtual_ranks: {fitting}" if fits else f"write batch.global: {batch.micro * ranks}"
    yield Finding(HERE, f"{told}: each rank has one micro-batch", hint)
