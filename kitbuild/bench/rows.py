"""What a cell showed: from its archive to a row, and rows as a table and CSV. Pure."""

from __future__ import annotations

import csv
import io
import statistics
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from kitbuild.recipe.memory import GIB, Shape

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kitbuild.archive.read import Archive
    from kitbuild.bench.cells import Cell

WARM = 3  # steps before which nothing is timed: compilation, autotuning, the allocator


@dataclass(frozen=True, kw_only=True)
class Row:
    """One cell's result. `state` is `ok`, `out of memory`, `refused` or `failed`; with the last three `detail` says why.

    Seconds are of an optimizer step; tokens are those that are no padding. `mfu` is the share of the matrix product
    rate that the same process reached right after training. `deterministic` is by two fresh processes.
    """

    cell: str
    attention: str
    liger: str
    max_length: int
    checkpointing: bool
    packing: bool
    micro: int
    state: str
    detail: str | None = None
    step_seconds: float | None = None
    fastest: float | None = None
    slowest: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    ready_seconds: float | None = None
    deterministic: bool | None = None

    def as_json(self) -> dict[str, Any]:
        """Its fields."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


def measured(cell: Cell, runs: Sequence[Archive]) -> Row:
    """The row of one cell from its runs, the first of which is timed."""
    first = runs[0]
    settled = [float.fromhex(line.seconds) for line in first.metrics[WARM:]] or [
        float.fromhex(line.seconds) for line in first.metrics[-1:]
    ]
    count = sum(line.tokens for line in first.metrics[-len(settled) :])
    told, seconds = first.manifest.results.measured or {}, first.manifest.results.seconds
    speed = count / sum(settled)
    config = first.manifest.lock.model.config or told.get("config") or {}
    ceiling = told.get("matmul_flops_per_second")
    world = first.manifest.lock.launch["world_size"]
    return Row(
        **cell.as_json(),
        cell=cell.name,
        state="ok",
        step_seconds=statistics.median(settled),
        fastest=min(settled),
        slowest=max(settled),
        tokens_per_second=speed,
        mfu=_mfu(config, speed, cell.max_length, ceiling * world if ceiling else None),
        peak_allocated_bytes=told.get("peak_allocated_bytes"),
        peak_reserved_bytes=told.get("peak_reserved_bytes"),
        ready_seconds=float(seconds["first_step"] or 0) if "first_step" in seconds else None,
        deterministic=_same(runs) if len(runs) > 1 else None,
    )


def failed(cell: Cell, *, state: str, detail: str) -> Row:
    """The row of a cell that has no figures."""
    return Row(**cell.as_json(), cell=cell.name, state=state, detail=detail)


def _same(runs: Sequence[Archive]) -> bool:
    values = [[(line.loss, line.grad_norm, line.batch_sha256) for line in run.metrics] for run in runs]
    return all(item == values[0] for item in values[1:])


def flops_per_token(config: Mapping[str, Any], length: int) -> float | None:
    """Of forward and backward without recomputation: 6 per weight that multiplies, and causal attention's share."""
    shape = Shape.read(config)
    if shape is None:
        return None
    weights = shape.layers * shape.layer_parameters + shape.vocab * shape.hidden
    return 6 * weights + 6 * shape.layers * shape.queries * length


def _mfu(config: Mapping[str, Any], speed: float, length: int, ceiling: float | None) -> float | None:
    work = flops_per_token(config, length)
    return speed * work / ceiling if work and ceiling else None


def as_csv(rows: Iterable[Row]) -> str:
    """One line a cell."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [item.name for item in fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(row.as_json() for row in rows)
    return text.getvalue()


def table(rows: Sequence[Row]) -> tuple[str, ...]:
    """Lines for a terminal: a column that is the same in all cells is said once."""
    if not rows:
        return ("no cells",)
    axes = ("attention", "liger", "max_length", "checkpointing", "packing", "micro")
    shown = [name for name in axes if len({getattr(row, name) for row in rows}) > 1] or ["attention"]
    head = [*shown, "step", "tokens/s", "MFU", "peak GiB", "repeats"]
    body = [[_word(getattr(row, name)) for name in shown] + _figures(row) for row in rows]
    widths = [max(len(line[index]) for line in [head, *body]) for index in range(len(head))]
    lines = [
        "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip()
        for line in [head, *body]
    ]
    same = ", ".join(f"{name} {_word(getattr(rows[0], name))}" for name in axes if name not in shown)
    return (*([f"all cells: {same}"] if same else []), *lines)


def _word(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _figures(row: Row) -> list[str]:
    if row.state != "ok" or row.step_seconds is None or row.tokens_per_second is None:
        return [row.state, "", "", "", row.detail or ""]
    spread = max((row.slowest or 0) - row.step_seconds, row.step_seconds - (row.fastest or 0))
    return [
        f"{row.step_seconds:.3f} s ±{spread / row.step_seconds:.0%}",
        f"{row.tokens_per_second:,.0f}",
        "" if row.mfu is None else f"{row.mfu:.3f}",
        "" if row.peak_allocated_bytes is None else f"{row.peak_allocated_bytes / GIB:.1f}",
        "" if row.deterministic is None else "same bits" if row.deterministic else "differ",
    ]
