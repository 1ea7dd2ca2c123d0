"""Step 6: the verdict about two archives. Pure, and about values, not about locks.

IDENTICAL         equal batches, losses, gradient norms, learning rates and weights; locked kernels used in both
WITHIN_TOLERANCE  not identical, and within what was stated
DIFFERENT         any of those values differs, whatever the cause
NOT_COMPARABLE    unfinished, does not verify, other steps, other tensors
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kitbuild.compare.causes import ranked
from kitbuild.compare.divergence import STEP_FIELDS, divergence
from kitbuild.compare.kernels import departures
from kitbuild.compare.models import FirstDifference, Verdict
from kitbuild.compare.values import FLOAT_FIELDS, OUTCOMES, ulps

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kitbuild.archive.models import Metrics
    from kitbuild.archive.read import Archive
    from kitbuild.compare.models import Cause
    from kitbuild.compare.tolerance import Allowance


def compare(left: Archive, right: Archive, tolerance: Allowance | None = None) -> Verdict:
    """Compare two archives. Read them with `weights=True` where `model/` must be checked too."""
    reasons = tuple(_reasons(left, right))
    notes = tuple(_notes(left, right))
    if reasons:
        causes = ranked(left, right, None) if left.finished and right.finished else ()
        parted = divergence(left, right, None) if left.finished and right.finished else None
        return Verdict(
            verdict="NOT_COMPARABLE", detail=reasons[0], reasons=reasons, causes=causes, notes=notes, divergence=parted
        )
    first = first_difference(left, right)
    causes = ranked(left, right, first)
    if first is None:
        listed = tuple(f"differs: {item.text}" for item in causes)
        return Verdict(verdict="IDENTICAL", detail=_size(left), notes=(*notes, *listed))
    if tolerance is not None:
        beyond = _first_beyond(left, right, tolerance)
        if beyond is None:
            detail = f"{_size(left)}; {_held(left, right, tolerance)}"
            return Verdict(
                verdict="WITHIN_TOLERANCE", detail=detail, first_difference=first, causes=causes, notes=notes,
                divergence=divergence(left, right, first.step),
            )  # fmt: skip
        first = beyond
        causes = ranked(left, right, first)
        notes = (*notes, *_promise(left, right, causes, tolerance), f"beyond the tolerance ({tolerance})")
    else:
        notes = (*notes, *_promise(left, right, causes, None))
    return Verdict(
        verdict="DIFFERENT", detail=f"first {first}", first_difference=first, causes=causes, notes=notes,
        divergence=divergence(left, right, first.step),
    )  # fmt: skip


def first_difference(left: Archive, right: Archive) -> FirstDifference | None:
    """The first value that is not equal: by step, then weights, then use of the locked kernels."""
    for one, two in zip(left.metrics, right.metrics, strict=True):
        for field in STEP_FIELDS:
            a, b = getattr(one, field), getattr(two, field)
            if a != b:
                return _at_step(left, right, one, two, field)
    return _weights_difference(left, right) or _kernel_difference(left, right)


def _at_step(left: Archive, right: Archive, one: Metrics, two: Metrics, field: str) -> FirstDifference:
    a, b = getattr(one, field), getattr(two, field)
    sizes = [_world_size(archive) for archive in (left, right)]
    return FirstDifference(
        step=one.step, field=field, left=a, right=b, ulps=ulps(a, b) if field in FLOAT_FIELDS else None,
        rank=0 if sizes == [1, 1] else _rank(one, two, field), several=sizes != [1, 1],
    )  # fmt: skip


def _rank(one: Metrics, two: Metrics, field: str) -> int | None:
    """The first rank whose own part differs."""
    if len(one.ranks) != len(two.ranks) or field not in {"loss", "batch_sha256"}:
        return None
    pairs = enumerate(zip(one.ranks, two.ranks, strict=True))
    return next((rank for rank, (a, b) in pairs if getattr(a, field) != getattr(b, field)), None)


def _world_size(archive: Archive) -> object:
    return archive.manifest.launch.get("world_size")


def _weights_difference(left: Archive, right: Archive) -> FirstDifference | None:
    ours, theirs = left.manifest.weights, right.manifest.weights
    for name in ours:
        if ours[name].sha256 != theirs[name].sha256:
            return FirstDifference(
                step=None, field="weights", left=ours[name].sha256, right=theirs[name].sha256, name=name
            )
    return None


def _kernel_difference(left: Archive, right: Archive) -> FirstDifference | None:
    """What ran otherwise than locked, on one side: the numbers may agree, and it is not the locked run."""
    ours, theirs = ({item.name: item for item in departures(archive)} for archive in (left, right))
    for name in sorted({*ours, *theirs}):
        found = ours.get(name) or theirs[name]
        states = [side[name].ran if name in side else "as locked" for side in (ours, theirs)]
        return FirstDifference(step=None, field="kernels", left=states[0], right=states[1], name=name, rank=found.rank)
    return None


def _reasons(left: Archive, right: Archive) -> Iterator[str]:
    """Why they cannot be compared."""
    for archive in (left, right):
        if not archive.finished:
            yield f"{archive.path.name} is unfinished: {_end(archive)}"
        elif archive.problems:
            more = f" (and {len(archive.problems) - 1} more)" if len(archive.problems) > 1 else ""
            yield f"{archive.path.name} does not verify: {archive.problems[0]}{more}"
    if not (left.finished and right.finished):
        return
    if len(left.metrics) != len(right.metrics):
        yield f"{len(left.metrics)} steps vs {len(right.metrics)} steps"
    yield from _tensor_reasons(left, right)
    ours, theirs = ({item.name: item for item in departures(archive)} for archive in (left, right))
    for name in sorted({*ours} & {*theirs}):
        both = f"{ours[name]}" if str(ours[name]) == str(theirs[name]) else f"{ours[name]}; {theirs[name]}"
        yield f"neither run is the locked one: {both}"


def _tensor_reasons(left: Archive, right: Archive) -> Iterator[str]:
    ours, theirs = left.manifest.weights, right.manifest.weights
    if other := sorted({*ours} ^ {*theirs}):
        yield f"{len(ours)} vs {len(theirs)} weight tensors, {len(other)} without a counterpart: {other[0]}"
    for name in sorted({*ours} & {*theirs}):
        a, b = ours[name], theirs[name]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            yield f"weight {name} is {a.dtype} {list(a.shape)} vs {b.dtype} {list(b.shape)}"
            return


def _notes(left: Archive, right: Archive) -> Iterator[str]:
    for archive in (left, right):
        manifest = archive.manifest
        if archive.manifest_found and not manifest.environment.locked:
            yield f"{archive.path.name}: the environment was recorded, not locked"
        if archive.truncated:
            yield f"{archive.path.name}: the last line of metrics is cut off"
        if _mode(archive) == "record":
            yield f"{archive.path.name}: determinism is `record`, equal bits are not promised"
    if left.path.resolve() == right.path.resolve():
        yield "both sides are the same archive"


def _promise(left: Archive, right: Archive, causes: tuple[Cause, ...], tolerance: Allowance | None) -> Iterator[str]:
    """What a difference means for what was promised."""
    kinds = {cause.kind for cause in causes}
    if tolerance is None and kinds & {"device", "threads"}:
        yield "equal bits are not promised on another device model or with other threads; --tolerance holds a run to a band"
    kept = all(_mode(archive) == "strict" and archive.manifest.environment.locked for archive in (left, right))
    if kept and not kinds - {"data_order"} and left.path.resolve() != right.path.resolve():
        yield "equal bits were promised here: test the memory of both machines, then report it"


def _mode(archive: Archive) -> object:
    value = archive.manifest.lock.recipe.get("determinism")
    return value.get("mode") if isinstance(value, dict) else value


def _end(archive: Archive) -> str:
    steps = f"{len(archive.metrics)} steps are recorded"
    if archive.exit is None:
        return f"it has no exit.json, {steps}"
    if archive.exit.exit_code == 0:
        return f"its manifest is not complete, {steps}"
    message = f" ({archive.exit.message})" if archive.exit.message else ""
    return f"exit code {archive.exit.exit_code}{message}, {steps}"


def _size(archive: Archive) -> str:
    steps, tensors = len(archive.metrics), len(archive.manifest.weights)
    return f"{steps} step{'' if steps == 1 else 's'}, {tensors} weight tensor{'' if tensors == 1 else 's'}"


def _first_beyond(left: Archive, right: Archive, tolerance: Allowance) -> FirstDifference | None:
    """The first value outside the tolerance: inputs must be equal unless stated, outcomes are held where stated."""
    for one, two in zip(left.metrics, right.metrics, strict=True):
        for field in STEP_FIELDS:
            a, b = getattr(one, field), getattr(two, field)
            held = tolerance.holds(field)
            if a == b or (not held and field in OUTCOMES):
                continue
            if not held or not tolerance.allows(field, one.step, a, b):
                return _at_step(left, right, one, two, field)
    return _kernel_difference(left, right)


def _held(left: Archive, right: Archive, tolerance: Allowance) -> str:
    """What was held to what, how near it came, and what was not held."""
    pairs = list(zip(left.metrics, right.metrics, strict=True))
    free = [
        field for field in OUTCOMES
        if not tolerance.holds(field) and any(getattr(a, field) != getattr(b, field) for a, b in pairs)
    ]  # fmt: skip
    free += ["weights"] if _weights_difference(left, right) else []
    return tolerance.told(pairs) + (f"; not held: {', '.join(free)}" if free else "")
