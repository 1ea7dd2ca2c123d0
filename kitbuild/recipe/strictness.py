"""Step 1: what cannot give the same bits twice under `determinism: strict`, each by name, with what to write instead.

The guest refuses the same before it trains (`kitbuild.guest.settings.REFUSED`), for locks that came otherwise.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kitbuild.recipe.findings import Finding, Findings

if TYPE_CHECKING:
    from kitbuild.recipe.models import Recipe

RECORD = "or determinism: record"
# bitsandbytes and torchao: https://github.com/huggingface/transformers/blob/main/src/transformers/trainer_optimizer.py
QUANTISED = re.compile(r"bnb|[48]bit|32bit|^paged_|^lion|^ademamix")


def strict(recipe: Recipe) -> Findings:
    """What cannot give the same bits twice."""
    if recipe.determinism.mode != "strict":
        for key in ("virtual_ranks", "cpu_portable"):
            if getattr(recipe.determinism, key):
                yield Finding(("determinism", key), f"{key} goes with mode: strict only", "write mode: strict")
        return
    train = recipe.train
    if train.get("dataloader_in_order") is False:
        yield Finding(
            ("train", "dataloader_in_order"),
            "strict: batches would come in the order in which workers finish",
            "remove it",
        )
    mode = train.get("torch_compile_mode")
    if isinstance(mode, str) and mode.startswith("max-autotune"):
        yield Finding(
            ("train", "torch_compile_mode"), f"strict: {mode} chooses kernels by timing them", "write default"
        )
    optimizer = train.get("optim")
    if isinstance(optimizer, str) and QUANTISED.search(optimizer):
        yield Finding(
            ("train", "optim"),
            f"strict: {optimizer} has quantised states or kernels without a deterministic mode",
            f"write adamw_torch_fused, {RECORD}",
        )
    if recipe.keeps_buckets:
        yield from _buckets(recipe)
    if recipe.determinism.cpu_portable:
        yield from _portable(recipe)


def _buckets(recipe: Recipe) -> Findings:
    """Where DDP made its buckets anew after the first step, a resumed run would add gradients up in another order."""
    why = "strict: on {} processes a resumed run would round otherwise, for DDP would make its buckets anew"
    told, train = why.format(recipe.launch.world_size), recipe.train
    if train.get("ddp_find_unused_parameters") is False:
        yield Finding(("train", "ddp_find_unused_parameters"), told, f"remove it, {RECORD}")
    if train.get("ddp_static_graph"):
        yield Finding(("train", "ddp_static_graph"), told, f"remove it, {RECORD}")
    given = train.get("gradient_checkpointing_kwargs")
    if isinstance(given, dict) and given.get("use_reentrant"):
        text = "strict: DDP keeps its buckets only where activations are not recomputed by a second backward pass"
        yield Finding(("train", "gradient_checkpointing_kwargs"), text, f"write use_reentrant: false, {RECORD}")


def _portable(recipe: Recipe) -> Findings:
    """Code that is compiled on the machine is that machine's."""
    native, advice = (
        "compiles for the processor that it finds",
        "or remove cpu_portable: the same bits on one CPU model",
    )
    for key in ("torch_compile", "torch_compile_backend", "torch_compile_mode"):
        if recipe.train.get(key):
            yield Finding(("train", key), f"cpu_portable: torch.compile {native}", f"remove it, {advice}")
    if recipe.kernels.attention == "flex_attention":
        yield Finding(("kernels", "attention"), f"cpu_portable: flex_attention {native}", f"write sdpa, {advice}")
    if recipe.launch.strategy == "deepspeed":
        yield Finding(("launch", "strategy"), f"cpu_portable: deepspeed {native}", f"write ddp, {advice}")
