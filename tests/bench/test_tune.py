"""The search, on a device that is played: what it tries, what it takes, what it says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kitbuild.bench.cells import own
from kitbuild.bench.rows import Row, failed
from kitbuild.bench.tune import Tuning, changes
from kitbuild.recipe import read
from tests.recipe.test_memory import QWEN3_8B
from tests.recipe.test_memory import recipe as large

if TYPE_CHECKING:
    from kitbuild.bench.cells import Cell
    from kitbuild.recipe import Recipe

TINY = read(Path(__file__).resolve().parents[2] / "recipes/tiny-cpu.yaml").recipe


def row(cell: Cell, speed: float, **changed: Any) -> Row:
    given: dict[str, Any] = {
        "state": "ok", "step_seconds": 1 / speed, "fastest": 1 / speed, "slowest": 1 / speed,
        "tokens_per_second": speed, "deterministic": True,
    }  # fmt: skip
    return Row(**cell.as_json(), cell=cell.name, **(given | changed))


class Device:
    """Speed by what a cell is; remembers what it was asked."""

    def __init__(self, **odd: str) -> None:
        self.odd, self.asked = odd, list[str]()

    def __call__(self, cell: Cell) -> Row:
        self.asked.append(cell.name)
        speed = 100.0 * {"sdpa": 1, "eager": 0.5, "flash_attention_4": 1.1}[cell.attention]
        speed *= 1.3 if cell.liger == "all" else 1
        speed *= 0.8 if cell.checkpointing else 1
        speed *= 1 + cell.micro / 100
        return self._odd(cell, speed)

    def _odd(self, cell: Cell, speed: float) -> Row:
        match self.odd.get(cell.attention) or self.odd.get(f"micro{cell.micro}"):
            case "memory":
                return failed(cell, state="out of memory", detail="x")
            case "bits":
                return row(cell, speed, deterministic=False)
            case "refused":
                return failed(cell, state="refused", detail="x")
            case _:
                return row(cell, speed)


def search(recipe: Recipe, device: Device, **given: Any) -> tuple[Cell, Tuning]:
    options: dict[str, Any] = {
        "attention": ("sdpa", "eager", "flash_attention_4"),
        "liger": ("off", "all"),
        "config": None,
    }
    tuning = Tuning(recipe=recipe, measure=device, **(options | given))
    return tuning.search(), tuning


def test_takes_the_fastest() -> None:
    """Of attention and Liger, then of checkpointing and micro batch, then packed; each choice has its line."""
    best, tuning = search(TINY, Device())
    assert (best.attention, best.liger, best.checkpointing, best.micro) == ("flash_attention_4", "all", False, 16)
    assert [line.partition(":")[0] for line in tuning.reasons] == [
        "attention and Liger",
        "checkpointing and micro batch",
        "packing",
    ]
    assert changes(TINY, best) == {
        "kernels.attention": "flash_attention_4", "batch.micro": 16,
        "liger": {"rope": True, "swiglu": True, "geglu": False, "rms_norm": True, "layer_norm": False,
                  "cross_entropy": False, "fused_linear_cross_entropy": True},
    }  # fmt: skip


@pytest.mark.parametrize("odd", ["memory", "bits", "refused"])
def test_takes_only_what_counts(odd: str) -> None:
    """Out of memory, other bits under strict, refused: however fast, not taken."""
    best, _ = search(TINY, Device(flash_attention_4=odd, micro16=odd))
    assert (best.attention, best.micro) == ("sdpa", 8)


def test_no_cell_is_measured_twice() -> None:
    """Each costs minutes."""
    device = Device()
    search(TINY, device)
    assert len(device.asked) == len(set(device.asked))


def test_what_does_not_fit_is_not_tried() -> None:
    """By the estimate, on a device of 70 GiB; said so."""
    device = Device()
    recipe = large(4096, train={"gradient_checkpointing": True})
    best, tuning = search(recipe, device, config=QWEN3_8B, memory=70 << 30, attention=("sdpa",))
    assert not any("micro8" in name and "checkpointed" not in name for name in device.asked)
    assert any("not tried, it needs about" in line for line in tuning.reasons)
    assert best.checkpointing


def test_nothing_to_change() -> None:
    """Where the recipe is the fastest, nothing changes and that is said."""
    best, tuning = search(TINY, Device(micro16="memory"), attention=("sdpa", "eager"), liger=("off",))
    assert best == own(TINY)
    assert changes(TINY, best) == {}
    assert all("nothing of" in line for line in tuning.reasons)
