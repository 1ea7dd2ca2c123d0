"""Step 6, the charts of the page: drawn here as SVG, and handed to the page's script as numbers to look into.

A plot is stretched to its place; its labels stand beside it as text, so they keep their size on a phone.
"""

from __future__ import annotations

import html
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kitbuild.compare.values import counted, ulps

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kitbuild.archive.models import Metrics
    from kitbuild.archive.read import Archive
    from kitbuild.compare.bands import Bands

Points = tuple["float | None", ...]
MOST_POINTS = 4000
NEAR = 20
GIB = 1 << 30
SIZE = 1000
PADDING = 0.06
GREATEST = 1e300
ROWS, COLUMNS = 5, 6
_NICE = (1, 2, 5, 10)


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One chart: lines over the steps; `kinds` are the style's names of the lines."""

    key: str
    title: str
    unit: str
    names: tuple[str, ...]
    kinds: tuple[str, ...]
    series: tuple[Points, ...]
    ulps: tuple[str | None, ...] = ()
    band: tuple[Points, Points] | None = None
    zero: bool = False
    floor: bool = False
    empty: str = "no values"

    @property
    def values(self) -> list[float]:
        """All that is drawn."""
        drawn = (*self.series, *(self.band or ()))
        return [value for points in drawn for value in points if value is not None]

    def as_json(self) -> dict[str, Any]:
        """What the script needs of it."""
        band = {"low": self.band[0], "high": self.band[1]} if self.band else None
        return {
            "series": self.series, "names": self.names, "kinds": self.kinds, "ulps": self.ulps or None, "band": band,
            "zero": self.zero, "floor": self.floor,
        }  # fmt: skip


def sampled_steps(left: Archive, right: Archive, first: int | None) -> tuple[int, ...]:
    """All steps of the longer run; of a very long one evenly many, with all around the first difference."""
    count = max(len(left.metrics), len(right.metrics))
    stride = max(1, math.ceil(count / MOST_POINTS))
    near = range(max(1, first - NEAR), min(count, first + NEAR) + 1) if first else ()
    return tuple(sorted({*range(1, count + 1, stride), *near, *([count] if count else [])}))


def charts(left: Archive, right: Archive, steps: Sequence[int], bands: Bands | None) -> tuple[Chart, ...]:
    """Loss and its difference, gradient norm, step time, tokens a second, memory."""
    sides = [_lines(archive, steps) for archive in (left, right)]
    both: dict[str, Any] = {"names": ("left", "right"), "kinds": ("l", "r")}
    pairs = [*zip(*sides, strict=True)]

    def of(field: str) -> tuple[Points, ...]:
        return tuple(tuple(_number(getattr(line, field)) if line else None for line in side) for side in sides)

    loss, norm = of("loss"), of("grad_norm")
    gap = tuple(
        _drawable(two - one) if one is not None and two is not None else None for one, two in zip(*loss, strict=True)
    )
    return (
        Chart(key="loss", title="Loss", unit="", series=loss, ulps=_ulps(pairs, "loss"), band=_band(bands, "loss", steps), **both),
        Chart(
            key="gap", title="Difference of loss", unit="right − left", series=(gap,) if any(gap) else (), names=("",), kinds=("d",),
            ulps=_ulps(pairs, "loss"), zero=True, empty=_equal(gap), band=_around(_band(bands, "loss", steps), loss[0]),
        ),
        Chart(key="norm", title="Gradient norm", unit="", series=norm, ulps=_ulps(pairs, "grad_norm"), band=_band(bands, "grad_norm", steps), **both),
        Chart(key="seconds", title="Step time", unit="seconds", series=of("seconds"), floor=True, zero=True, **both),
        Chart(key="rate", title="Tokens per second", unit="", series=tuple(tuple(map(_rate, side)) for side in sides), floor=True, zero=True, **both),
        Chart(
            key="memory", title="Peak memory", unit="GiB", floor=True, zero=True, **both,
            series=tuple(tuple(_gib(line) for line in side) for side in sides),
        ),
    )  # fmt: skip


def drawn(chart: Chart, steps: Sequence[int], first: int | None) -> str:
    """A figure."""
    unit = f" <small>{html.escape(chart.unit)}</small>" if chart.unit else ""
    head = f"<figcaption><b>{html.escape(chart.title)}{unit}</b><output></output></figcaption>"
    values = chart.values
    if not values:
        return f'<figure>{head}<div class="empty">{html.escape(chart.empty)}</div></figure>'
    span = (steps[0], max(steps[-1], steps[0] + 1))
    low, high = _range(values, zero=chart.zero, floor=chart.floor)
    lines = [*_grid(chart, low, high)]
    if chart.band:
        lines.append(("b", _area(chart.band, steps, span, low, high)))
    lines += [
        (kind, _path(points, steps, span, low, high)) for kind, points in zip(chart.kinds, chart.series, strict=True)
    ]
    inside = first is not None and span[0] <= first <= span[1]
    if inside:
        lines.append(("f", f"M{SIZE * _place(first or 0, span):.2f} 0V{SIZE}"))
    paths = "".join(f'<path class="{kind}" d="{d}"/>' for kind, d in lines)
    return (
        f'<figure data-chart="{chart.key}">{head}<div class="plot"><svg viewBox="0 0 {SIZE} {SIZE}" '
        f'preserveAspectRatio="none" role="img" aria-label="{html.escape(chart.title)}">{paths}</svg>'
        + "".join(_labels(low, high, span))
        + (_first_label(first or 0, span) if inside else "")
        + "</div></figure>"
    )


def ticks(low: float, high: float, count: int) -> tuple[list[float], float]:
    """Round numbers between, and their distance."""
    raw = (high - low) / count
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(nice * size for nice in _NICE if nice * size >= raw * 0.999)
    return [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)], step


def _lines(archive: Archive, steps: Sequence[int]) -> list[Metrics | None]:
    return [archive.metrics[step - 1] if step <= len(archive.metrics) else None for step in steps]


def _number(text: str) -> float | None:
    return _drawable(float.fromhex(text))


def _drawable(value: float) -> float | None:
    """What can be drawn: no sum or product of it overflows."""
    return value if abs(value) < GREATEST else None


def _rate(line: Metrics | None) -> float | None:
    seconds = _number(line.seconds) if line else None
    return _drawable(line.tokens / seconds) if line and seconds and seconds > 0 else None


def _gib(line: Metrics | None) -> float | None:
    return line.peak_memory_bytes / GIB if line and line.peak_memory_bytes is not None else None


def _ulps(pairs: Sequence[tuple[Metrics | None, Metrics | None]], field: str) -> tuple[str | None, ...]:
    found: list[str | None] = []
    for one, two in pairs:
        distance = ulps(getattr(one, field), getattr(two, field)) if one and two else None
        found.append(None if distance is None else counted(distance) if distance else "equal")
    return tuple(found)


def _equal(gap: Points) -> str:
    common = sum(value is not None for value in gap)
    return f"equal in all {common} steps" if common else "no values"


def _band(bands: Bands | None, field: str, steps: Sequence[int]) -> tuple[Points, Points] | None:
    band = next((item for item in bands.bands if item.field == field), None) if bands else None
    if band is None or not any(band.width):
        return None
    places = [step - 1 for step in steps if step <= len(band.width)]
    return (
        tuple(min(run[place] for run in band.runs) - band.width[place] for place in places),
        tuple(max(run[place] for run in band.runs) + band.width[place] for place in places),
    )


def _around(band: tuple[Points, Points] | None, left: Points) -> tuple[Points, Points] | None:
    """A band as seen from the left run."""
    if band is None:
        return None
    sides = [
        tuple(
            value - own if value is not None and own is not None else None
            for value, own in zip(side, left, strict=False)
        )
        for side in band
    ]
    return sides[0], sides[1]


def _range(values: Sequence[float], *, zero: bool, floor: bool) -> tuple[float, float]:
    low, high = min(values), max(values)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    pad = (high - low) * PADDING or abs(high) * 0.05 or 1.0
    low -= 0 if floor and low == 0 else pad
    high += pad
    return (low, high) if math.isfinite(high - low) and high > low else (-1.0, 1.0)


def _grid(chart: Chart, low: float, high: float) -> Iterator[tuple[str, str]]:
    for value in ticks(low, high, ROWS)[0]:
        yield ("z" if value == 0 and chart.zero else "g"), f"M0 {SIZE * (high - value) / (high - low):.2f}H{SIZE}"


def _place(step: float, span: tuple[int, int]) -> float:
    return (step - span[0]) / (span[1] - span[0])


def _path(points: Points, steps: Sequence[int], span: tuple[int, int], low: float, high: float) -> str:
    pen, parts = "M", []
    for step, value in zip(steps, points, strict=False):
        if value is None:
            pen = "M"
            continue
        parts.append(f"{pen}{SIZE * _place(step, span):.2f} {SIZE * (high - value) / (high - low):.2f}")
        pen = "L"
    return "".join(parts) + ("h0.1" if len(parts) == 1 else "")


def _area(band: tuple[Points, Points], steps: Sequence[int], span: tuple[int, int], low: float, high: float) -> str:
    under, over = band
    back = [*zip(steps, under, strict=False)][::-1]
    rest = "".join(
        f"L{SIZE * _place(step, span):.2f} {SIZE * (high - (value or 0.0)) / (high - low):.2f}" for step, value in back
    )
    return f"{_path(over, steps, span, low, high)}{rest}Z"


def _labels(low: float, high: float, span: tuple[int, int]) -> Iterator[str]:
    rows, step = ticks(low, high, ROWS)
    for value in rows:
        at = 100 * (value - low) / (high - low)
        yield f'<i class="y" style="bottom:{at:.2f}%">{_tick(value, step, max(abs(low), abs(high)))}</i>'
    for value in ticks(*span, COLUMNS)[0]:
        if value.is_integer():
            yield f'<i class="x" style="left:{100 * _place(value, span):.2f}%">{value:.0f}</i>'


def _tick(value: float, step: float, largest: float) -> str:
    if largest < 1e-3 or largest >= 1e6:  # noqa: PLR2004 - where plain digits would be long
        return "0" if value == 0 else f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+")
    return f"{value:.{min(8, max(0, -math.floor(math.log10(step) + 1e-9)))}f}"


def _first_label(first: int, span: tuple[int, int]) -> str:
    at = _place(first, span)
    flip = " flip" if at > 0.6 else ""  # noqa: PLR2004 - so that it stays inside
    return f'<i class="first-step{flip}" style="left:{100 * at:.2f}%">step {first}</i>'
