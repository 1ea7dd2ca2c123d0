"""Step 6, numbers: how far apart two values are. Pure."""

from __future__ import annotations

import math
import struct

from kitbuild.archive.models import exact_float

FLOAT_FIELDS = ("loss", "grad_norm", "learning_rate")
OUTCOMES = ("loss", "grad_norm")
READABLE = 10**8


def relative_difference(left: str, right: str) -> float:
    """|left - right| over the larger magnitude; 0 for equal bits, infinity where one is not finite."""
    if left == right:
        return 0.0
    a, b = exact_float(left), exact_float(right)
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    scale = max(abs(a), abs(b))
    if not scale:
        return 0.0
    gap = abs(a - b)
    return gap / scale if math.isfinite(gap) else abs(a / scale - b / scale)


def ulps(left: str, right: str) -> int | None:
    """How many representable numbers apart; None where one is not finite.

    Losses and gradient norms come from fp32, so where both values are exactly fp32 the count is in fp32, else in fp64.
    """
    a, b = exact_float(left), exact_float(right)
    if not (math.isfinite(a) and math.isfinite(b)):
        return None
    single = is_single(a) and is_single(b)
    return abs(_ordinal(a, single=single) - _ordinal(b, single=single))


def counted(distance: int) -> str:
    """`1 ulp`, `1,234 ulps`, `7.9e+15 ulps`."""
    return f"{spelt(distance)} ulp{'' if distance == 1 else 's'}"


def spelt(distance: int) -> str:
    """A count that a person can read."""
    return f"{distance:,}" if distance < READABLE else f"{distance:.1e}"


def is_single(value: float) -> bool:
    """Whether fp32 holds exactly this number."""
    try:
        return bool(struct.unpack("<f", struct.pack("<f", value))[0] == value)
    except OverflowError:
        return False


def _ordinal(value: float, *, single: bool) -> int:
    """The place of a finite float among all floats of its size; both zeros are at 0."""
    packed = struct.pack("<f" if single else "<d", abs(value))
    magnitude = int.from_bytes(packed, "little")
    return -magnitude if value < 0 else magnitude
