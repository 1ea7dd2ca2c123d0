"""Counting of what runs, on a model that is patched as Liger patches: run by test_usage with the training Python."""

from __future__ import annotations

import json
import sys
import types
from collections import Counter
from typing import Any

import torch

from kitbuild.errors import RunError
from kitbuild.guest import usage

found: dict[str, Any] = {}


def of_liger(module: str) -> Any:
    """A function that says it is of one of Liger's modules."""

    def function(value: Any) -> Any:
        return value + 1

    function.__module__ = f"liger_kernel.transformers.{module}"
    return function


def model() -> Any:
    """Two layers and a function in the model's own module, all patched."""
    modeling = types.ModuleType("modeling_made")
    sys.modules["modeling_made"] = modeling
    modeling.apply_rotary_pos_emb = of_liger("rope")  # type: ignore[attr-defined]

    class Norm(torch.nn.Module):  # type: ignore[misc]
        def forward(self, value: Any) -> Any:
            return value

    class Made(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.plain = Norm(), Norm()

        def forward(self, value: Any) -> Any:
            return modeling.apply_rotary_pos_emb(self.plain(self.norm(value)))

    Made.__module__ = "modeling_made"
    made = Made()
    norm = of_liger("rms_norm")
    made.norm.forward = types.MethodType(lambda _self, value: norm(value), made.norm)  # type: ignore[method-assign]
    made.norm.forward.__func__.__module__ = norm.__module__
    return made


def refused(options: dict[str, bool]) -> str:
    """What is said of a recipe with these options."""
    try:
        usage.count_liger(model(), options, Counter())
    except RunError as error:
        return error.message
    return ""


calls: Counter[str] = Counter()
made = model()
found["patched"] = usage.count_liger(made, {"rope": True, "rms_norm": True, "swiglu": False}, calls)
for _ in range(3):
    made(torch.ones(2))
found["calls"] = usage.liger_calls(calls)
found["missing"] = refused({"rope": True, "rms_norm": True, "swiglu": True})
found["unasked"] = refused({"rope": True, "rms_norm": False})

compiled: Counter[str] = Counter()
function = usage.counted(lambda value: value.sin(), "kernel", compiled)


class Compiled(torch.nn.Module):  # type: ignore[misc]
    def forward(self, value: Any) -> Any:
        return function(value) + 1


step = torch.compile(Compiled(), backend="eager")
for _ in range(12):
    step(torch.ones(2))
graphs = torch._dynamo.utils.counters
found["compiled"] = {
    "calls": compiled["kernel"],
    "graphs": graphs["stats"]["unique_graphs"],
    "breaks": len(graphs["graph_break"]),
}
print(json.dumps(found))
