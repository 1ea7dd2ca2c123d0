"""`kitbuild run --resume`: whether a run can go on, told before anything slow. The guest checks all of it again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kitbuild import archive as archives
from kitbuild.errors import RunError, UsageError
from kitbuild.lock.changes import changes
from kitbuild.lock.files import parse_lock
from kitbuild.run.follow import followed, going_on, has_checkpoint, read_json

if TYPE_CHECKING:
    from pathlib import Path

    from kitbuild.lock.changes import Change
    from kitbuild.lock.models import Lock

SHOWN = 5
FOLLOWS = ("arguments in force", "launch", "lock")
"""Parts in which a change of the recipe is seen once more."""


def resumed(run_dir: Path, lock: Lock, *, here: bool = True) -> Path:
    """The run's directory, where it is of this lock, not over, not going on, and has a checkpoint.

    `here`: the guest wrote into it; else its newest checkpoint may still be in a container elsewhere.
    """
    place = run_dir.absolute()
    try:
        old = parse_lock((place / "lock.json").read_bytes(), name=str(place / "lock.json"))
    except OSError as error:
        raise UsageError(
            f"{run_dir} is not a run that can be resumed: {error.strerror}",
            hint="the directory of a run that was stopped, as `kitbuild run` named it; `kitbuild archive list` lists runs",
        ) from error
    found = _different(old, lock)
    if found:
        raise UsageError(
            f"{run_dir} was started from another lock: {_told(found)}",
            hint="restore that recipe and lock (they are in the run directory), or start a new run",
        )
    if read_json(place / "exit.json").get("exit_code") == 0:  # the guest would write over what it recorded
        raise UsageError(f"{run_dir} is finished: there is nothing to go on with", hint="start a new run")
    with followed(place):
        if going_on(place):
            raise RunError(
                f"the run {run_dir} is still going on",
                hint=f"wait for its end, or have it save and stop; in a container: docker stop {place.name}",
            )
    if here and not has_checkpoint(place):
        raise UsageError(
            f"{run_dir} holds no checkpoint to go on from",
            hint="start a new run; a packed archive leaves checkpoints out",
        )
    return archives.claim_run_dir(place, resume=True)


def _different(old: Lock, new: Lock) -> tuple[Change, ...]:
    """What a resume would change."""
    if old.identity_sha256 == new.identity_sha256:
        return ()
    return tuple(change for change in changes(old, new) if (change.part, change.name) != ("lock", "name"))


def _told(found: tuple[Change, ...]) -> str:
    causes = tuple(item for item in found if item.part not in FOLLOWS) or found
    more = f", and {len(causes) - SHOWN} more" if len(causes) > SHOWN else ""
    return ", ".join(f"{item.part} {item}" for item in causes[:SHOWN]) + more
