"""The fastest way to train a recipe's own global batch, axis by axis. Pure: the caller measures.

Attention and Liger first, at the recipe's own batch; then recomputation and micro batch together, for they pay for
each other in memory; then packing. What the estimate says does not fit is not tried.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kitbuild.bench.cells import BUILT_IN, own, recipe_for
from kitbuild.recipe.memory import GIB, estimate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from kitbuild.bench.cells import Cell
    from kitbuild.bench.rows import Row
    from kitbuild.recipe.models import Recipe

MARGIN = 1.1  # the estimate is right within a tenth
WORTH = 0.995  # a change that gains less than half a per cent is not worth it


@dataclass(kw_only=True)
class Tuning:
    """One search. `measure` runs a cell; `memory` is the device's in bytes, None where it is not known."""

    recipe: Recipe
    measure: Callable[[Cell], Row]
    attention: tuple[str, ...]
    liger: tuple[str, ...]
    config: Mapping[str, Any] | None
    memory: int | None = None
    rows: list[Row] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    def search(self) -> Cell:
        """The best cell; `reasons` has one line for each choice, `rows` what was measured."""
        first = own(self.recipe)
        best = self._best(first, [], "")
        best = self._best(
            best,
            [replace(first, attention=one, liger=two) for one in self.attention for two in self.liger],
            "attention and Liger",
        )
        best = self._best(
            best,
            [
                replace(best, checkpointing=recomputed, micro=micro)
                for recomputed in (False, True)
                for micro in self._micros()
            ],
            "checkpointing and micro batch",
        )
        if not best.packing and best.attention not in BUILT_IN:
            best = self._best(best, [replace(best, packing=True)], "packing")
        return best

    def _micros(self) -> list[int]:
        share = self.recipe.batch.global_ // self.recipe.launch.world_size
        return [size for size in range(share, 0, -1) if share % size == 0]

    def _best(self, best: Cell, others: Iterable[Cell], what: str) -> Cell:
        known = {row.cell: row for row in self.rows}
        rows = {}
        for cell in dict.fromkeys([best, *others]):
            if cell.name not in known and (cell == best or self._fits(cell)):
                self.rows.append(self.measure(cell))
                known[cell.name] = self.rows[-1]
            if cell.name in known and self._counts(known[cell.name]):
                rows[cell] = known[cell.name].tokens_per_second or 0.0
        if not rows:
            return best
        fastest = max(rows, key=lambda cell: rows[cell])
        if fastest == best or (best in rows and rows[best] >= WORTH * rows[fastest]):
            if what:
                self.reasons.append(f"{what}: nothing of {len(rows)} tried is faster than {best.name}")
            return best
        gain = (
            f"{rows[fastest] / rows[best]:.2f}× as fast as {best.name}" if best in rows else f"{best.name} does not run"
        )
        self.reasons.append(f"{what}: {fastest.name}, {gain}")
        return fastest

    def _counts(self, row: Row) -> bool:
        strict = self.recipe.determinism.mode == "strict"
        return row.state == "ok" and not (strict and row.deterministic is False)

    def _fits(self, cell: Cell) -> bool:
        if self.config is None or self.memory is None:
            return True
        needed = estimate(recipe_for(self.recipe, cell, steps=1)[0], self.config)
        if needed is None or needed.peak * 1.0 <= self.memory * MARGIN:
            return True
        self.reasons.append(f"{cell.name}: not tried, it needs about {needed.peak / GIB:.0f} GiB")
        return False


def changes(recipe: Recipe, cell: Cell) -> dict[str, Any]:
    """What to write into the recipe, by dotted key; nothing where it is there already."""
    mine = own(recipe)
    found: dict[str, Any] = {}
    if cell.attention != mine.attention:
        found["kernels.attention"] = cell.attention
    if cell.liger != mine.liger:
        found["liger"] = recipe_for(recipe, cell, steps=1)[0].model_dump(mode="json")["liger"] or False
    if cell.micro != mine.micro:
        found["batch.micro"] = cell.micro
    if cell.checkpointing != mine.checkpointing:
        found["train.gradient_checkpointing"] = cell.checkpointing
    if cell.packing != mine.packing:
        found["train.packing"] = cell.packing
    return found
