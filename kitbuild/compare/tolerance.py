"""Step 6, a tolerance that the user states: bounds by quantity, relative or absolute. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from kitbuild.archive.models import exact_float
from kitbuild.compare.values import FLOAT_FIELDS, OUTCOMES, relative_difference
from kitbuild.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kitbuild.archive.models import Metrics

HINT = "write --tolerance loss=1e-3, loss=abs:0.01, loss=1e-3,grad_norm=1e-2, 1e-3, repeats, or repeats:RUN,RUN"


class Allowance(Protocol):
    """What a comparison holds two runs to, when they are not identical."""

    def holds(self, field: str) -> bool:
        """Whether it says anything of a quantity."""
        ...

    def allows(self, field: str, step: int, left: str, right: str) -> bool:
        """Whether the right value may stand at this step."""
        ...

    def told(self, pairs: Sequence[tuple[Metrics, Metrics]]) -> str:
        """What was held, and how near it came."""
        ...


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The largest difference allowed of one quantity."""

    field: str
    kind: Literal["rel", "abs"]
    value: float

    def difference(self, left: str, right: str) -> float:
        """As this bound measures it."""
        if self.kind == "rel" or left == right:
            return relative_difference(left, right)
        return abs(exact_float(left) - exact_float(right))

    def __str__(self) -> str:
        return f"{self.field} within {self.value:g}" + (" absolute" if self.kind == "abs" else "")


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Bounds by quantity.

    A stated quantity is held to its bound. Outcomes that are not stated (a gradient norm, weights) are not held and
    the verdict says so; inputs (batches, an unstated learning rate) must be equal.
    """

    bounds: tuple[Bound, ...]

    @classmethod
    def parse(cls, texts: str | Iterable[str]) -> Tolerance:
        """`loss=1e-3,grad_norm=abs:0.01`, or a bare `1e-3` for all three; exit 2 says what is wrong."""
        parts = [part.strip() for text in ([texts] if isinstance(texts, str) else texts) for part in text.split(",")]
        bounds: dict[str, Bound] = {}
        for part in parts:
            name, equals, number = part.rpartition("=")
            for field in (name.strip(),) if equals else FLOAT_FIELDS:
                if field not in FLOAT_FIELDS:
                    raise _refused(part, f"{field!r} is not one of {', '.join(FLOAT_FIELDS)}")
                if field in bounds:
                    raise _refused(part, f"{field} is given twice")
                bounds[field] = _bound(part, field, number.strip())
        if not any(field in bounds for field in OUTCOMES):
            raise _refused(",".join(parts), "it states neither loss nor grad_norm")
        return cls(bounds=tuple(bounds[field] for field in sorted(bounds)))

    def holds(self, field: str) -> bool:
        """Whether a bound is stated."""
        return self._of(field) is not None

    def allows(self, field: str, step: int, left: str, right: str) -> bool:  # noqa: ARG002 - one bound for all steps
        """Within its bound."""
        bound = self._of(field)
        return bound is not None and bound.difference(left, right) <= bound.value

    def told(self, pairs: Sequence[tuple[Metrics, Metrics]]) -> str:
        """Each bound, and the largest difference."""
        return ", ".join(f"{bound} (at most {_largest(bound, pairs):.2g})" for bound in self.bounds)

    def _of(self, field: str) -> Bound | None:
        return next((bound for bound in self.bounds if bound.field == field), None)

    def __str__(self) -> str:
        return ", ".join(map(str, self.bounds))


def _largest(bound: Bound, pairs: Sequence[tuple[Metrics, Metrics]]) -> float:
    return max((bound.difference(getattr(a, bound.field), getattr(b, bound.field)) for a, b in pairs), default=0.0)


def _bound(part: str, field: str, text: str) -> Bound:
    kind, colon, number = text.rpartition(":")
    if colon and kind not in {"rel", "abs"}:
        raise _refused(part, f"{kind!r} is not rel or abs")
    try:
        value = float(number)
    except ValueError:
        raise _refused(part, f"{number!r} is not a number") from None
    if kind == "abs" and not (value > 0 and math.isfinite(value)):
        raise _refused(part, f"{number} is not above 0")
    if kind != "abs" and not 0 < value < 1:
        raise _refused(part, f"{number} is not between 0 and 1")
    return Bound(field=field, kind="abs" if kind == "abs" else "rel", value=value)


def _refused(part: str, reason: str) -> UsageError:
    return UsageError(f"--tolerance {part}: {reason}", hint=HINT)
