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
    if recipe.determinism.cpu_portable:
        yield from _portable(recipe)


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
