"""Step 6: rank what differs by how well it explains the first difference. Pure.

Where a batch differs at or before the first difference, the data came in differently, and what chooses data is asked
first. Where all batches up to there are equal, what computes is asked first and the data last. Beyond that the place
of the first difference speaks: the update's settings cannot change what comes before the first update, a learning rate
is the schedule's, and a run that parts right after it was resumed parts because of that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kitbuild.compare.differences import differences
from kitbuild.compare.items import cause
from kitbuild.compare.kernels import departures
from kitbuild.compare.models import Cause

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kitbuild.archive.read import Archive
    from kitbuild.compare.models import FirstDifference

# A person's choice before what follows from it, what computes before where it computed.
_COMPUTE = ("model", "kernel", "kernel_use", "argument", "determinism", "launch", "recipe", "package", "threads")
_MACHINE = ("variable", "setting", "device", "driver", "resume", "build", "base", "default", "derived")
_LAST = ("kitbuild", "image", "engine", "environment", "evaluate", "beside", "hardening", "capacity")
_DATA_DIFFERS = ("seed", "dataset", "data_order", *_COMPUTE, *_MACHINE, *_LAST)
_DATA_EQUAL = ("seed", *_COMPUTE, *_MACHINE, "data_order", "dataset", *_LAST)

_SCHEDULE = ("learning_rate", "lr_", "warmup_", "max_steps", "num_train_epochs", "cooldown_")
_UPDATE = (*_SCHEDULE, "optim", "adam_", "weight_decay", "max_grad_norm")
_FIRST, _AS_LISTED, _CANNOT = 0, 1, 2


def ranked(left: Archive, right: Archive, first: FirstDifference | None) -> tuple[Cause, ...]:
    """All differences of the manifests and of the data order, likeliest cause first."""
    found = [*differences(left.manifest, right.manifest), *_data_order(left, right), *_departed(left, right)]
    order = _DATA_DIFFERS if _data_differs(left, right, first) else _DATA_EQUAL
    resumed = {*left.manifest.resumed} ^ {*right.manifest.resumed}
    return tuple(sorted(found, key=lambda item: (_evidence(item, first, resumed), order.index(item.kind))))


def _evidence(item: Cause, first: FirstDifference | None, resumed: set[int]) -> int:
    """What the place of the first difference says of a cause."""
    if first is None or first.step is None:
        return _AS_LISTED
    if item.kind == "resume" and first.step - 1 in resumed:
        return _FIRST
    if item.kind in {"argument", "default"}:
        if first.field == "learning_rate":
            return _FIRST if item.name.startswith(_SCHEDULE) else _AS_LISTED
        if first.step == 1 and item.name.startswith(_UPDATE):
            return _CANNOT
    return _AS_LISTED


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
