"""Before phase 1: the run directory is ours alone, and what is in it is the run that we were asked for.

A refusal writes nothing there: it is about somebody else's run.
"""

from __future__ import annotations

import fcntl
import json
import os
from typing import TYPE_CHECKING, Any

from kitbuild.errors import RunError
from kitbuild.guest import checkpoints
from kitbuild.guest.identity import identity_sha256

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kitbuild.guest.config import Config

ENDED = ("manifest.json", "exit.json", "archive.json")
HELD = (*ENDED, "metrics.jsonl", "checkpoints")
SHOWN = 5
# What a changed value brings with it: told only where nothing else differs.
FOLLOWS = ("defaults", "content_sha256", "launch")


def take(config: Config) -> int | None:
    """Refuse, or have the directory to ourselves until the descriptor is closed. None: a file system without locks."""
    out = config.places.out
    check(config)
    (out / "logs").mkdir(parents=True, exist_ok=True)
    held = _lock(out)
    try:
        check(config)  # Whoever had it may have ended just now.
        for name in ENDED:  # The end of an earlier try is not the end of this one.
            (out / name).unlink(missing_ok=True)
    except BaseException:
        if held is not None:
            os.close(held)
        raise
    return held


def _lock(out: Path) -> int | None:
    """The guest's log, locked for as long as this process or a worker of it lives."""
    descriptor = os.open(out / "logs" / "guest.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise RunError(
            f"a run in {out} is still going on", hint="wait for its end, or have it save and stop: docker stop"
        ) from error
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def done(config: Config) -> bool:
    """Whether a run that a scheduler starts again, whatever became of it (KIT_RESUME=auto), has nothing left to do."""
    return config.resume and not config.resume_only and _finished(config.places.out)


def _finished(out: Path) -> bool:
    return _read(out / "exit.json").get("exit_code") == 0 and bool(_read(out / "manifest.json").get("complete"))


def check(config: Config) -> None:
    """A new run needs an empty directory, a resumed one its own lock and something left to do."""
    out = config.places.out
    if not config.resume:
        if any(_holds(out / name) for name in HELD):
            raise RunError(f"{out} holds a run already", hint="use an empty directory that this user can write")
        return
    if _finished(out):
        raise RunError(f"the run in {out} is finished: there is nothing to go on with", hint="start a new run")
    old = _read(out / "lock.json")
    if "recipe" in old and identity_sha256(old) != identity_sha256(config.raw):
        raise RunError(
            f"the run in {out} was started from another lock: {', '.join(differences(old, dict(config.raw)))}",
            hint="resume with the run's own lock, which is in it, or start a new run",
        )


def _holds(path: Path) -> bool:
    """A folder of checkpoints that is mounted for all nodes is there before the run is, and empty."""
    return any(path.glob("[!.]*")) if path.is_dir() else path.exists()


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The first few values that two locks have otherwise."""
    found = list(_differences(old, new, ""))
    causes = [text for text in found if not text.startswith(FOLLOWS)] or found
    return causes[:SHOWN] + ([f"{len(causes) - SHOWN} more"] if len(causes) > SHOWN else [])


def _differences(old: Any, new: Any, place: str) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            if not place and key in ("recipe_sha256", "name"):
                continue
            yield from _differences(old.get(key), new.get(key), f"{place}.{key}" if place else key)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (left, right) in enumerate(zip(old, new, strict=True)):
            yield from _differences(left, right, f"{place}[{index}]")
    elif old != new:
        yield f"{place} is {_short(new)}, the run has {_short(old)}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else text[:37] + "…"  # noqa: PLR2004 - fits a line


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def mark(config: Config) -> dict[str, Any]:
    """What a checkpoint is of; with virtual ranks any number of processes goes on from it."""
    many = config.virtual_ranks
    world = f"1 to {many}" if many else config.launch.world_size
    return {"world_size": world, "content_sha256": identity_sha256(config.raw)}


def find(config: Config) -> tuple[checkpoints.Checkpoint | None, tuple[str, ...]]:
    """The checkpoint to go on from, with what to tell the user; none for a new run."""
    if not config.resume:
        return None, ()
    found, told = checkpoints.last_whole(config.places.checkpoints)
    if found is None and config.resume_only:
        why = f" ({'; '.join(told)})" if told else ""
        raise RunError(
            f"there is no whole checkpoint to resume from{why}", hint="start it again, in a new run directory"
        )
    wanted = mark(config)
    wrong = [] if found is None else [name for name in wanted if found.mark.get(name) != wanted[name]]
    if found is not None and wrong:
        text = "; ".join(f"{name} {found.mark.get(name)}, the lock {wanted[name]}" for name in wrong)
        raise RunError(f"{found.folder.name} has {text}", hint="resume with the run's own lock")
    return found, told


def same_device(config: Config, found: checkpoints.Checkpoint, here: dict[str, Any]) -> None:
    """Strict promises equal bits on one device model: half a run on another would break that, and nobody would see."""
    there = found.mark["device"]
    wrong = [
        f"{name} is {_short(here[name])}, the run has {_short(there.get(name))}"
        for name in here
        if here[name] != there.get(name)
    ]
    if wrong and config.strict:
        raise RunError(
            f"{found.folder.name} was written elsewhere: {', '.join(wrong)}",
            hint="resume where it was started, or start a new run; determinism: record goes on anywhere",
        )
