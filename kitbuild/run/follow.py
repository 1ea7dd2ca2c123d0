"""Step 4: watch a run through the files that the guest writes, whichever engine it runs on."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kitbuild.errors import KitbuildError, Problem, RecipeError, RunError, StoppedError, VerificationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kitbuild.progress import Progress

POLL_SECONDS = 0.2
STOPPED_EXIT_CODE = 10
TERMINATED_EXIT_CODE = 143
ASK_AGAIN_SECONDS = 3.0
"""A guest that has only just started drops the first request: process 1 of a container ignores it until it listens."""
STOPPING = "stopping: a checkpoint is saved at the end of this step (once more ends the run at once)"
LOG, PRINTED = "logs/guest.log", "start.log"


class Process(Protocol):
    """A started guest."""

    def exit_code(self) -> int | None:
        """None while it runs."""

    def stop(self) -> None:
        """Ask it to save a checkpoint and end. Called again where that takes long, which changes nothing."""

    def kill(self) -> None:
        """End it now."""

    def out_of_memory(self) -> bool:
        """Whether the system ended it for memory; asked after it ended."""


@dataclass
class Stop:
    """Set by a signal handler; read at each turn. `following`: there is a guest to pass it on to."""

    requested: bool = False
    since: float = 0.0
    following: bool = False


@contextlib.contextmanager
def followed(run_dir: Path) -> Iterator[int]:
    """Held while a run is followed, by whoever has the descriptor; the system lets go of it however they end."""
    descriptor = os.open(run_dir, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise RunError(f"another kitbuild follows the run {run_dir}", hint="wait for it, or stop it first") from error
    except OSError:  # a file system without locks
        pass
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def going_on(run_dir: Path) -> bool:
    """Whether a guest holds its log there, followed by a kitbuild or not."""
    try:
        with (run_dir / LOG).open("r+b") as log:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def follow(
    process: Process, run_dir: Path, *, progress: Progress, stop: Stop, sleep: Callable[[float], None] = time.sleep
) -> int:
    """Show progress until the guest ends; returns its exit code. A stop request is passed on."""
    stop.following = True
    try:
        return _follow(process, run_dir, progress=progress, stop=stop, sleep=sleep)
    finally:
        stop.following = False


def _follow(process: Process, run_dir: Path, *, progress: Progress, stop: Stop, sleep: Callable[[float], None]) -> int:
    asked: float | None = None
    phase, step = "", 0
    with progress.activity("run", total=None, unit="") as advance:
        while (code := process.exit_code()) is None:
            status = read_json(run_dir / "status.json")
            if status.get("phase", phase) != phase:
                phase = str(status["phase"])
                progress.detail(f"{phase}: {status.get('message') or ''}".rstrip(": "))
            now = int(status.get("step") or 0)
            if now > step:
                advance(now - step)
                step = now
                progress.detail(describe(status))
            if stop.requested and (asked is None or time.monotonic() - asked > ASK_AGAIN_SECONDS):
                if asked is None:
                    progress.note(STOPPING)
                asked = time.monotonic()
                process.stop()
            sleep(POLL_SECONDS)
    return code


def describe(status: dict[str, Any]) -> str:
    """One line: `step 12/20 · loss 1.234 · 5,678 tokens/s · 1:23 left`."""
    parts = [f"step {status.get('step')}/{status.get('steps')}"]
    if isinstance(status.get("loss"), (int, float)):
        parts.append(f"loss {status['loss']:.4f}")
    if status.get("tokens_per_second"):
        parts.append(f"{status['tokens_per_second']:,.0f} tokens/s")
    if status.get("seconds_left") is not None:
        minutes, seconds = divmod(int(status["seconds_left"]), 60)
        parts.append(f"{minutes}:{seconds:02d} left")
    return " · ".join(parts)


def keep_printed(text: bytes, run_dir: Path) -> None:
    """What the guest printed before it could open its own log, if anything."""
    if text and not (run_dir / LOG).exists():
        with contextlib.suppress(OSError):
            (run_dir / PRINTED).write_bytes(text)


def raise_for(code: int, process: Process, run_dir: Path, *, stop: Stop | None = None) -> None:
    """Turn a guest's exit into our error, with the guest's own words where it left any."""
    told = read_json(run_dir / "exit.json")
    if code == 0 and told.get("exit_code") == 0:
        return
    if stop is not None and stop.requested and _nothing_done(code, told):
        raise KeyboardInterrupt
    heard = told.get("exit_code") == code
    go_on = (
        f"go on from the last checkpoint with `kitbuild run RECIPE --resume {run_dir}`"
        if has_checkpoint(run_dir)
        else ""
    )
    where = f"see {run_dir / (PRINTED if (run_dir / PRINTED).exists() else LOG)}"
    if process.out_of_memory():
        step = told.get("steps_done") or steps_recorded(run_dir) or "start"
        hint = f"give the machine more memory and {go_on}" if go_on else "give the machine more memory"
        failed = RunError(
            f"the run was ended by the system: out of memory (at step {step})",
            hint=f"{hint}; or lower batch.micro or train.max_length in a new run",
        )
    elif code == 0:
        failed = RunError(
            "the run ended without a word of how it went: it was not kitbuild's guest that ran", hint=where
        )
    elif not heard:
        text = f"the run was killed or crashed (exit code {code}) before it could say why"
        failed = RunError(text, hint="; ".join(part for part in (where, go_on) if part))
    else:
        raise _as_told(code, told, run_dir, where)
    if not heard:
        say_for_it(run_dir, failed)
    raise failed


def say_for_it(run_dir: Path, error: KitbuildError) -> None:
    """exit.json of a guest that was ended before it could write one, so that the archive says what happened."""
    told = {"schema": "kitbuild.exit/1", "phase": read_json(run_dir / "status.json").get("phase"), "steps": None}
    value = {**error.as_json(), **told, "schema": "kitbuild.exit/1", "steps_done": steps_recorded(run_dir)}
    temporary = run_dir / ".exit.json.host"
    with contextlib.suppress(OSError):
        temporary.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")
        temporary.replace(run_dir / "exit.json")


def steps_recorded(run_dir: Path) -> int:
    """How many whole lines of metrics there are."""
    try:
        return (run_dir / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0


def has_checkpoint(run_dir: Path) -> bool:
    """Whether a checkpoint was written to its end; the guest looks whether it still is as it was."""
    return any(run_dir.glob("checkpoints/checkpoint-*/kit.json"))


def _as_told(code: int, told: dict[str, Any], run_dir: Path, where: str) -> KitbuildError:
    problems = [Problem(**_known(problem)) for problem in told.get("problems") or []]
    kind, hint = _ERRORS.get(code, RunError), told.get("hint") or where
    if kind is VerificationError and any(problem.file for problem in problems):
        hint = "nothing was trained; remove what is damaged with `kitbuild store verify --repair`, and run again"
    return kind(str(told.get("message") or "the run failed"), hint=_located(str(hint), run_dir), problems=problems)


def _located(hint: str, run_dir: Path) -> str:
    """The guest names its logs from the run directory, which only the host knows by its path."""
    found = re.sub(r"(?<![\w/])logs/", lambda _: f"{run_dir}/logs/", hint)
    return found if found == hint else found.replace(" of the run directory", "")


def _nothing_done(code: int, told: dict[str, Any]) -> bool:
    """Whether a guest that was asked to stop did so before its first step, or before it could listen."""
    if code == STOPPED_EXIT_CODE:
        return told.get("exit_code") == code and told.get("steps_done") == 0
    return code == TERMINATED_EXIT_CODE and not told


_ERRORS: dict[int, type[KitbuildError]] = {
    1: KitbuildError,
    2: RecipeError,
    7: VerificationError,
    STOPPED_EXIT_CODE: StoppedError,
}


def _known(problem: dict[str, Any]) -> dict[str, Any]:
    fields = ("message", "hint", "file", "line", "column", "key")
    return {"message": ""} | {key: problem[key] for key in fields if key in problem}


def read_json(path: Path) -> dict[str, Any]:
    """An object from a file that may not be there yet."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
