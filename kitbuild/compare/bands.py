"""Step 6, a band for each step from repeats of the archive's own run: how far do equal runs stray? Pure.

The repeats are runs of the same recipe on the same batches that round differently: under `determinism: record`, with
another number of threads, with another attention. No number is stated by anyone:

gap(t)    the widest gap between two of the runs (the archive and its repeats) at step t
reach(t)  the largest gap so far, since rounding only spreads; before the runs first part, the gap where they do
factor    1, or more where one of the runs itself lies outside the band of the others: then what brings it inside
band(t)   a value is inside where its nearest run is no farther than factor x reach(t)

So a run passes where it is no odder among the repeats than they are among one another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from kitbuild.archive.models import exact_float
from kitbuild.compare.values import OUTCOMES
from kitbuild.errors import Problem, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kitbuild.archive.models import Metrics
    from kitbuild.archive.read import Archive

FEWEST = 3
Curve = tuple[float, ...]
_INPUTS = ("batch_sha256", "learning_rate")
_HOW = (
    "repeats are runs of the same recipe that round differently: `determinism: record`, or other threads or attention"
)


@dataclass(frozen=True, kw_only=True)
class Band:
    """One quantity: the runs' values, and how far a value may be from the nearest at each step."""

    field: str
    runs: tuple[Curve, ...]
    width: Curve
    factor: float

    def used(self, place: int, value: float) -> float:
        """How much of the band a value at a step needs: above 1 is outside."""
        if not math.isfinite(value):
            return math.inf
        distance = min(abs(run[place] - value) for run in self.runs)
        if not distance:
            return 0.0
        return distance / self.width[place] if self.width[place] else math.inf


@dataclass(frozen=True, kw_only=True)
class Bands:
    """A band for each outcome of a step."""

    bands: tuple[Band, ...]

    @classmethod
    def of(cls, archive: Archive, repeats: Sequence[Archive]) -> Bands:
        """From an archive and its repeats; exit 2 names every one that is no repeat of it."""
        problems = [*_problems(archive, repeats)]
        if problems:
            raise UsageError(f"no band: {problems[0].message}", problems=problems, hint=_HOW)
        found = [_band(field, [_curve(run, field) for run in (archive, *repeats)]) for field in OUTCOMES]
        if not any(band.width and band.width[-1] for band in found):
            raise UsageError(
                "no band: the repeats are equal bit for bit, so they do not show how far runs stray", hint=_HOW
            )
        return cls(bands=tuple(found))

    def holds(self, field: str) -> bool:
        """Loss and gradient norm."""
        return field in OUTCOMES

    def allows(self, field: str, step: int, left: str, right: str) -> bool:  # noqa: ARG002 - the archive is in the band
        """Inside the band of this step."""
        band = next(band for band in self.bands if band.field == field)
        return band.used(step - 1, exact_float(right)) <= 1

    def told(self, pairs: Sequence[tuple[Metrics, Metrics]]) -> str:
        """How much of each band was needed, and where most."""
        return f"inside the band of {len(self.bands[0].runs)} runs: " + ", ".join(_most(b, pairs) for b in self.bands)

    def __str__(self) -> str:
        return f"the band of {len(self.bands[0].runs)} runs"


def _most(band: Band, pairs: Sequence[tuple[Metrics, Metrics]]) -> str:
    used = [band.used(place, exact_float(getattr(b, band.field))) for place, (_, b) in enumerate(pairs)]
    worst = max(range(len(used)), key=used.__getitem__)
    widened = f", widened {band.factor:.2g} times to hold each of them" if band.factor > 1 else ""
    return f"{band.field} needs at most {used[worst]:.0%} of it (step {worst + 1}{widened})"


def _band(field: str, curves: Sequence[Curve]) -> Band:
    """Leaving each run out in turn shows how far one of them may be from the others."""
    factor = 1.0
    for number, curve in enumerate(curves):
        others = [*curves[:number], *curves[number + 1 :]]
        reach = _reach(others)
        if any(reach):
            alone = Band(field=field, runs=tuple(others), width=reach, factor=1.0)
            factor = max(factor, *(alone.used(place, value) for place, value in enumerate(curve)))
    return Band(field=field, runs=tuple(curves), width=tuple(factor * width for width in _reach(curves)), factor=factor)


def _reach(curves: Sequence[Curve]) -> Curve:
    """The largest gap so far; at the start, the first that there is."""
    gaps = [max(values) - min(values) for values in zip(*curves, strict=True)]
    first = next((gap for gap in gaps if gap), 0.0)
    return tuple(accumulate(gaps, max, initial=first))[1:]


def _curve(archive: Archive, field: str) -> Curve:
    return tuple(exact_float(getattr(line, field)) for line in archive.metrics)


def _problems(archive: Archive, repeats: Sequence[Archive]) -> Iterator[Problem]:
    if len(repeats) + 1 < FEWEST:
        yield Problem(message=f"{len(repeats)} repeat(s) besides the archive itself, and two are the fewest")
    for run in (archive, *repeats):
        reason = _not_usable(run) or _not_a_repeat(archive, run)
        if reason is not None:
            yield Problem(message=f"{run.path.name} {reason}", file=str(run.path))


def _not_usable(run: Archive) -> str | None:
    if not run.finished:
        return "is unfinished"
    if run.problems:
        return f"does not verify: {run.problems[0]}"
    if not all(math.isfinite(value) for field in OUTCOMES for value in _curve(run, field)):
        return "has a loss or a gradient norm that is no number"
    return None


def _not_a_repeat(archive: Archive, run: Archive) -> str | None:
    if len(run.metrics) != len(archive.metrics):
        return f"has {len(run.metrics)} steps, {archive.path.name} has {len(archive.metrics)}"
    for field in _INPUTS:
        for one, two in zip(archive.metrics, run.metrics, strict=True):
            if getattr(one, field) != getattr(two, field):
                what = "other data" if field == "batch_sha256" else "another learning rate"
                return f"has {what} at step {one.step}: it is no repeat of {archive.path.name}"
    return None
