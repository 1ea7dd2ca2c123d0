"""Step 6, numbers: distance in units in the last place, and what a tolerance allows. Pure."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kitbuild.archive.models import exact_float
from kitbuild.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

FLOAT_FIELDS = ("loss", "grad_norm", "learning_rate")
OUTCOMES = ("loss", "grad_norm")


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Largest relative difference allowed, by field.

    A stated field is held to its bound. Outcomes that are not stated (a gradient norm, weights) are not held and the
    verdict says so; inputs (batches, an unstated learning rate) must be equal.
    """

    relative: tuple[tuple[str, float], ...]

    @classmethod
    def parse(cls, texts: str | Iterable[str]) -> Tolerance:
        """`loss=1e-3,grad_norm=1e-2`, or a bare `1e-3` for all three; exit 2 says what is wrong."""
        parts = [part.strip() for text in ([texts] if isinstance(texts, str) else texts) for part in text.split(",")]
        bounds: dict[str, float] = {}
        for part in parts:
            name, equals, number = part.rpartition("=")
            fields = (name.strip(),) if equals else FLOAT_FIELDS
            for field in fields:
                if field not in FLOAT_FIELDS:
                    raise _refused(part, f"{field!r} is not one of {', '.join(FLOAT_FIELDS)}")
                if field in bounds:
                    raise _refused(part, f"{field} is given twice")
                bounds[field] = _bound(part, number.strip())
        if not any(field in bounds for field in OUTCOMES):
            raise _refused(",".join(parts), "it states neither loss nor grad_norm")
        return cls(relative=tuple(sorted(bounds.items())))

    def of(self, field: str) -> float | None:
        """The bound of a field, or None where none is stated."""
        return dict(self.relative).get(field)

    def __str__(self) -> str:
        return ", ".join(f"{field} within {bound:g}" for field, bound in self.relative)


def relative_difference(left: str, right: str) -> float:
    """|left - right| over the larger magnitude; 0 for equal bits, infinity where one is not finite."""
    if left == right:
        return 0.0
    a, b = exact_float(left), exact_float(right)
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    scale = max(abs(a), abs(b))
    return abs(a / scale - b / scale) if scale else 0.0


def ulps(left: str, right: str) -> int | None:
    """How many representable numbers apart; None where one is not finite.

    Losses and gradient norms come from fp32, so where both values are exactly fp32 the count is in fp32, else in fp64.
    """
    a, b = exact_float(left), exact_float(right)
    if not (math.isfinite(a) and math.isfinite(b)):
        return None
    single = _is_single(a) and _is_single(b)
    return abs(_ordinal(a, single=single) - _ordinal(b, single=single))


def _is_single(value: float) -> bool:
    try:
        return bool(struct.unpack("<f", struct.pack("<f", value))[0] == value)
    except OverflowError:
        return False


def _ordinal(value: float, *, single: bool) -> int:
    """The place of a finite float among all floats of its size; both zeros are at 0."""
    packed = struct.pack("<f" if single else "<d", abs(value))
    magnitude = int.from_bytes(packed, "little")
    return -magnitude if value < 0 else magnitude


def _bound(part: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise _refused(part, f"{text!r} is not a number") from None
    if not 0 < value < 1:
        raise _refused(part, f"{text} is not between 0 and 1")
    return value


def _refused(part: str, reason: str) -> UsageError:
    return UsageError(
        f"--tolerance {part}: {reason}", hint="write --tolerance loss=1e-3, or loss=1e-3,grad_norm=1e-2, or 1e-3"
    )
