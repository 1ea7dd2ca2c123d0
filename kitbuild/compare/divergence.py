"""Step 6: how two runs part, in words and in a short table around the first step that differs. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kitbuild.archive.models import exact_float
from kitbuild.compare.values import FLOAT_FIELDS, counted, is_single, relative_difference, spelt, ulps

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kitbuild.archive.models import Metrics
    from kitbuild.archive.read import Archive

# In the order in which a step makes them: data in, loss, gradients, update.
STEP_FIELDS = ("batch_sha256", "loss", "grad_norm", "learning_rate")
AROUND = 2
SHOWN_TENSORS = 3


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One quantity over all steps (for `weights`: over all tensors): how often it differs, from where on, how far.

    `max_ulps` is None where a value is not finite or the quantity is no number.
    """

    field: str
    differs: int
    of: int
    first_step: int | None = None
    max_ulps: int | None = None
    max_relative: float | None = None
    worst_step: int | None = None
    names: tuple[str, ...] = ()

    def text(self) -> str:
        """One line without the name."""
        what = "tensor" if self.field == "weights" else "step"
        if not self.differs:
            return f"equal in all {self.of} {what}s" if self.of != 1 else f"equal in its one {what}"
        line = f"differs in {self.differs} of {self.of} {what}{'' if self.of == 1 else 's'}"
        if self.field == "weights":
            more = len(self.names) - SHOWN_TENSORS
            return f"{line}: {', '.join(self.names[:SHOWN_TENSORS])}" + (f" and {more} more" if more > 0 else "")
        line += f", from step {self.first_step} on" if self.differs > 1 else f", step {self.first_step}"
        if self.field == "batch_sha256":
            return line
        far = "by a value that is no number" if self.max_ulps is None else f"by at most {counted(self.max_ulps)}"
        relative = "" if self.max_ulps is None else f" ({self.max_relative:.2g} relative, at step {self.worst_step})"
        return f"{line}, {far}{relative}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One step of both runs, side by side; floats exact."""

    step: int
    equal_batch: bool
    loss: tuple[str, str]
    grad_norm: tuple[str, str]
    learning_rate: tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """All quantities, and the steps around the first difference."""

    quantities: tuple[Quantity, ...] = ()
    around: tuple[Row, ...] = ()
    at: int | None = None

    def as_json(self) -> dict[str, Any]:
        """`quantities` by name, and `around`."""
        return {
            "quantities": {item.field: {k: v for k, v in asdict(item).items() if k != "field"} for item in self.quantities},
            "around": [asdict(row) for row in self.around],
        }  # fmt: skip

    def lines(self) -> Iterator[str]:
        """For the screen."""
        names = {"batch_sha256": "batches"}
        width = max((len(names.get(item.field, item.field)) for item in self.quantities), default=0)
        for item in self.quantities:
            yield f"  {names.get(item.field, item.field):<{width}}  {item.text()}"
        if self.around:
            yield from table(self.around, self.at)


def divergence(left: Archive, right: Archive, step: int | None) -> Divergence:
    """Over the steps that both have; `step` is the first difference's."""
    pairs = [*zip(left.metrics, right.metrics, strict=False)]
    quantities = [quantity(field, pairs) for field in STEP_FIELDS]
    names = sorted({*left.manifest.weights} & {*right.manifest.weights})
    other = tuple(n for n in names if left.manifest.weights[n].sha256 != right.manifest.weights[n].sha256)
    if names:
        quantities.append(Quantity(field="weights", differs=len(other), of=len(names), names=other))
    near = [pair for pair in pairs if step is not None and abs(pair[0].step - step) <= AROUND]
    return Divergence(quantities=tuple(quantities), around=tuple(_row(a, b) for a, b in near), at=step)


def quantity(field: str, pairs: Sequence[tuple[Metrics, Metrics]]) -> Quantity:
    """One field of the steps."""
    values = [(one.step, getattr(one, field), getattr(two, field)) for one, two in pairs]
    other = [(step, a, b) for step, a, b in values if a != b]
    if not other or field not in FLOAT_FIELDS:
        return Quantity(field=field, differs=len(other), of=len(values), first_step=other[0][0] if other else None)
    distances = [ulps(a, b) for _, a, b in other]
    relatives = [relative_difference(a, b) for _, a, b in other]
    worst = max(range(len(other)), key=relatives.__getitem__)
    known = [distance for distance in distances if distance is not None]
    return Quantity(
        field=field, differs=len(other), of=len(values), first_step=other[0][0],
        max_ulps=max(known) if len(known) == len(distances) else None,
        max_relative=relatives[worst] if len(known) == len(distances) else None, worst_step=other[worst][0],
    )  # fmt: skip


def _row(one: Metrics, two: Metrics) -> Row:
    return Row(
        step=one.step, equal_batch=one.batch_sha256 == two.batch_sha256, loss=(one.loss, two.loss),
        grad_norm=(one.grad_norm, two.grad_norm), learning_rate=(one.learning_rate, two.learning_rate),
    )  # fmt: skip


def table(rows: Sequence[Row], at: int | None) -> Iterator[str]:
    """Aligned columns; `>` marks the first difference, `=` stands for an equal value."""
    with_rate = any(row.learning_rate[0] != row.learning_rate[1] for row in rows)
    head = ["", "step", "batch", "loss left", "right", "ulps", "grad norm left", "right", "ulps"]
    head += ["learning rate left", "right"] if with_rate else []
    cells = [head]
    for row in rows:
        line = [">" if row.step == at else "", str(row.step), "=" if row.equal_batch else "other"]
        line += [*_pair(row.loss), *_pair(row.grad_norm)]
        cells.append(line + (_pair(row.learning_rate)[:2] if with_rate else []))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        yield "  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip()


def _pair(values: tuple[str, str]) -> list[str]:
    left, right = values
    if left == right:
        return [decimal(left), "=", "0"]
    distance = ulps(left, right)
    return [decimal(left), decimal(right), "-" if distance is None else spelt(distance)]


def decimal(value: str) -> str:
    """As many digits as tell it apart from its neighbours: at most nine where it is an fp32 number."""
    number = exact_float(value)
    return f"{number:.9g}" if is_single(number) else repr(number)
