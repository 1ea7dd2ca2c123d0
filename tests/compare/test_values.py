"""Units in the last place and tolerances."""

from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitbuild.compare import Tolerance, ulps
from kitbuild.compare.tolerance import HINT
from kitbuild.compare.values import relative_difference
from kitbuild.errors import UsageError

singles = st.floats(width=32, allow_nan=False, allow_infinity=False)
doubles = st.floats(allow_nan=False, allow_infinity=False)


def after(value: float, *, up: bool = True) -> float:
    """The next fp32 value."""
    bits = struct.unpack("<i", struct.pack("<f", value))[0]
    return float(struct.unpack("<f", struct.pack("<i", bits + (1 if up else -1)))[0])


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (3.0, 3.0, 0),
        (3.0, after(3.0), 1),
        (1.0, after(1.0, up=False), 1),
        (0.0, -0.0, 0),
        (after(0.0), -after(0.0), 2),
        (0.1, math.nextafter(0.1, 1), 1),
        (1.0, 1.0 + 2**-52, 1),
        (1e300, math.nextafter(1e300, 0), 1),
        (math.inf, 1.0, None),
        (math.nan, 1.0, None),
    ],
)
def test_ulps_are_counted_in_the_type_that_made_the_value(left: float, right: float, expected: int | None) -> None:
    """In fp32 where both values are fp32, in fp64 otherwise, not at all where one is not finite."""
    assert ulps(left.hex(), right.hex()) == expected


@given(singles, singles)
def test_ulps_are_symmetric_and_zero_only_for_equal_values(left: float, right: float) -> None:
    """A distance: symmetric, and zero exactly for equal numbers."""
    distance = ulps(left.hex(), right.hex())
    assert distance == ulps(right.hex(), left.hex())
    assert (distance == 0) == (left == right)


@given(singles, singles, singles)
def test_ulps_add_up_along_the_line(one: float, two: float, three: float) -> None:
    """From low to high over a value between them is the sum."""
    low, middle, high = sorted((one, two, three))
    total = ulps(low.hex(), high.hex())
    parts = (ulps(low.hex(), middle.hex()), ulps(middle.hex(), high.hex()))
    assert total == sum(part for part in parts if part is not None)


@given(doubles)
def test_the_next_double_is_one_ulp_away(value: float) -> None:
    """Wherever the two are not both fp32 the count is in fp64."""
    other = math.nextafter(value, math.inf)
    if math.isfinite(other) and other not in {0.0, 2.0**-1074} and value != 0.0:
        assert ulps(value.hex(), other.hex()) == 1


@given(doubles, doubles)
def test_relative_difference_is_bounded(left: float, right: float) -> None:
    """Between 0 and 2, whatever the magnitudes, without overflow."""
    assert 0 <= relative_difference(left.hex(), right.hex()) <= 2


def test_what_is_not_finite_is_never_near() -> None:
    """NaN equals NaN by its text, and is infinitely far from a number."""
    assert relative_difference("nan", "nan") == 0
    assert relative_difference("nan", (1.0).hex()) == math.inf
    assert relative_difference("inf", (1e308).hex()) == math.inf


def test_a_tolerance_is_stated_by_field() -> None:
    """Several in one text or in several; a bare number is for all three; relative unless it says absolute."""
    assert str(Tolerance.parse("loss=1e-3")) == "loss within 0.001"
    assert str(Tolerance.parse("loss=1e-3, grad_norm=1e-2")) == "grad_norm within 0.01, loss within 0.001"
    assert Tolerance.parse(["loss=1e-3", "grad_norm=1e-2"]) == Tolerance.parse("loss=1e-3,grad_norm=1e-2")
    assert str(Tolerance.parse("1e-3")) == "grad_norm within 0.001, learning_rate within 0.001, loss within 0.001"
    assert Tolerance.parse("loss=rel:1e-3") == Tolerance.parse("loss=1e-3")
    assert str(Tolerance.parse("loss=abs:5")) == "loss within 5 absolute"


@pytest.mark.parametrize(
    ("text", "left", "right", "allowed"),
    [
        ("loss=abs:0.5", 1000.0, 1000.5, True),
        ("loss=abs:0.5", 1000.0, 1000.6, False),
        ("loss=abs:0.5", 0.0, -0.5, True),
        ("loss=abs:0.5", 1.0, math.nan, False),
        ("loss=abs:0.5", math.nan, math.nan, True),
        ("loss=0.5", 1000.0, 1000.6, True),
        ("loss=0.5", 0.0, -0.5, False),
    ],
)
def test_a_bound_is_relative_or_absolute(text: str, left: float, right: float, *, allowed: bool) -> None:
    """Relative to the larger magnitude, or as it stands."""
    assert Tolerance.parse(text).allows("loss", 1, left.hex(), right.hex()) == allowed
    assert not Tolerance.parse(text).allows("grad_norm", 1, left.hex(), left.hex())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--tolerance : '' is not a number"),
        ("x", "--tolerance x: 'x' is not a number"),
        ("loss=", "--tolerance loss=: '' is not a number"),
        ("loss=abc", "--tolerance loss=abc: 'abc' is not a number"),
        ("loss=0", "--tolerance loss=0: 0 is not between 0 and 1"),
        ("loss=-1e-3", "--tolerance loss=-1e-3: -1e-3 is not between 0 and 1"),
        ("loss=2", "--tolerance loss=2: 2 is not between 0 and 1"),
        ("loss=nan", "--tolerance loss=nan: nan is not between 0 and 1"),
        ("los=1e-3", "--tolerance los=1e-3: 'los' is not one of loss, grad_norm, learning_rate"),
        ("loss=1e-3,loss=1e-2", "--tolerance loss=1e-2: loss is given twice"),
        ("loss=abs:0", "--tolerance loss=abs:0: 0 is not above 0"),
        ("loss=abs:inf", "--tolerance loss=abs:inf: inf is not above 0"),
        ("loss=abs:x", "--tolerance loss=abs:x: 'x' is not a number"),
        ("loss=about:1e-3", "--tolerance loss=about:1e-3: 'about' is not rel or abs"),
        ("learning_rate=1e-3", "--tolerance learning_rate=1e-3: it states neither loss nor grad_norm"),
    ],
)
def test_a_wrong_tolerance_says_what_is_wrong(text: str, message: str) -> None:
    """Exit 2, with the form to write."""
    with pytest.raises(UsageError) as caught:
        Tolerance.parse(text)
    assert caught.value.message == message
    assert caught.value.hint == HINT
