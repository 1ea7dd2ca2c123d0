"""Step 6: rank what differs by how well it explains the first difference. Pure.

Where a batch differs at or before the first difference, the data came in differently, and what chooses data is asked
first. Where all batches up to there are equal, what computes is asked first and the data last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kitbuild.compare.differences import cause, differences
from kitbuild.compare.kernels import departures
from kitbuild.compare.models import Cause

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kitbuild.archive.read import Archive
    from kitbuild.compare.models import FirstDifference

# A person's choice before what follows from it, what computes before where it computed.
_COMPUTE = ("model", "kernel", "kernel_use", "argument", "determinism", "launch", "recipe", "package", "threads")
_MACHINE = (
    "variable",
    "device",
    "driver",
    "build",
    "base",
    "default",
    "derived",
    "kitbuild",
    "image",
    "engine",
    "environment",
)
_LAST = ("evaluate", "hardening", "capacity")
_DATA_DIFFERS = ("seed", "dataset", "data_order", *_COMPUTE, *_MACHINE, *_LAST)
_DATA_EQUAL = ("seed", *_COMPUTE, *_MACHINE, "data_order", "dataset", *_LAST)


def ranked(left: Archive, right: Archive, first: FirstDifference | None) -> tuple[Cause, ...]:
    """All differences of the manifests and of the data order, likeliest cause first."""
    found = [*differences(left.manifest, right.manifest), *_data_order(left, right), *_departed(left, right)]
    order = _DATA_DIFFERS if _data_differs(left, right, first) else _DATA_EQUAL
    return tuple(sorted(found, key=lambda item: order.index(item.kind)))


def first_other_batch(left: Archive, right: Archive) -> int | None:
    """The first step that saw other data."""
    pairs = zip(left.metrics, right.metrics, strict=False)
    return next(
        (place for place, (one, two) in enumerate(pairs, start=1) if one.batch_sha256 != two.batch_sha256), None
    )


def _data_differs(left: Archive, right: Archive, first: FirstDifference | None) -> bool:
    step = first_other_batch(left, right)
    return step is not None and (first is None or first.step is None or step <= first.step)


def _data_order(left: Archive, right: Archive) -> Iterator[Cause]:
    step = first_other_batch(left, right)
    if step is None:
        return
    one, two = (archive.metrics[step - 1].batch_sha256 for archive in (left, right))
    text = f"other data from step {step} on"
    yield Cause(kind="data_order", name="batch_sha256", left=one, right=two, text=text)


def _departed(left: Archive, right: Archive) -> Iterator[Cause]:
    """What ran otherwise than locked, on one side."""
    ours, theirs = ({item.name: item for item in departures(archive)} for archive in (left, right))
    for name in sorted({*ours, *theirs}):
        one, two = ours.get(name), theirs.get(name)
        if (one and one.ran) != (two and two.ran):
            states = [item.ran if item else "as locked" for item in (one, two)]
            yield cause("kernel_use", name, states[0], states[1], f"use of {name}")
