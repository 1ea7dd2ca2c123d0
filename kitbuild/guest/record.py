"""Phase 7: what the run leaves behind. Every file is replaced atomically; the terminal gets short lines only."""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import time
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kitbuild.errors import RunError

if TYPE_CHECKING:
    from pathlib import Path

METRIC_FLOATS = ("loss", "grad_norm", "learning_rate", "seconds")


def write_json(path: Path, value: object) -> None:
    """Write, sync, rename: a reader sees the old file or the new one."""
    write_bytes(path, (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, default=str) + "\n").encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Likewise for bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def trace() -> None:
    """The traceback into the log; a full disk, which may be the very error, makes no second one of it."""
    with suppress(OSError):
        traceback.print_exc()


class Terminal:
    """The user's stderr, kept apart: what libraries print goes to a log."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._last = 0.0

    def capture(self, log: Path) -> None:
        """Send stdout and stderr of this process, its libraries and children to `log`."""
        log.parent.mkdir(parents=True, exist_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        if self._descriptor is None:
            self._descriptor = os.dup(2)
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(target, 1)
        os.dup2(target, 2)
        os.close(target)

    def release(self) -> None:
        """The logs are whole: what is printed from here on is about no run."""
        sys.stdout.flush()
        sys.stderr.flush()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        os.close(nowhere)

    def say(self, text: str, *, every_seconds: float = 0.0) -> None:
        """One line for the user."""
        now = time.monotonic()
        if every_seconds and now - self._last < every_seconds:
            return
        self._last = now
        try:
            os.write(2 if self._descriptor is None else self._descriptor, f"kit: {text}\n".encode())
        except OSError:  # The reader went away; the run goes on.
            return


class Status:
    """status.json: where the run is, for whoever watches."""

    def __init__(self, out: Path) -> None:
        self._path = out / "status.json"
        self._written = 0.0

    def write(self, phase: str, message: str = "", **fields: object) -> None:
        """Replace it; not synced, since it is of no use after a crash."""
        empty = dict.fromkeys(("step", "steps", "loss", "tokens_per_second", "seconds_left"))
        value = {"phase": phase, "message": message, **empty, **fields, "time": time.time()}
        temporary = self._path.with_name(".status.json")
        try:
            temporary.write_text(json.dumps(value))
            temporary.replace(self._path)
        except OSError:  # A full disk is told by what matters, not by this.
            return
        self._written = time.monotonic()

    def due(self, seconds: float = 0.5) -> bool:
        """Whether the last write is old enough."""
        return time.monotonic() - self._written >= seconds


class Metrics:
    """metrics.jsonl: one line per optimizer step, floats exact."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[dict[str, Any]] = []

    def resume(self, step: int, source: Path) -> None:
        """Take what was recorded up to a checkpoint's step from the copy beside it: ours may be cut off or go on."""
        self.lines = [line for line in read_metrics(source) if line["step"] <= step]
        if [line["step"] for line in self.lines] != list(range(1, step + 1)):
            raise RunError(f"{source} does not hold steps 1 to {step}", hint="start a new run")
        self._rewrite()

    def copy(self, path: Path) -> None:
        """All lines so far, beside a checkpoint."""
        write_bytes(path, self._bytes())

    def start(self) -> None:
        """An empty file."""
        self.lines = []
        self._rewrite()

    def append(self, line: dict[str, Any]) -> None:
        """Add a step; flushed, so that a watcher sees it."""
        exact = {key: float(value).hex() if key in METRIC_FLOATS else value for key, value in line.items()}
        self.lines.append(exact)
        with self.path.open("a") as file:
            file.write(json.dumps(exact) + "\n")

    def _rewrite(self) -> None:
        write_bytes(self.path, self._bytes())

    def _bytes(self) -> bytes:
        return "".join(json.dumps(line) + "\n" for line in self.lines).encode()


def ranks(losses: list[list[float]], batches: list[bytes], size: int) -> list[dict[str, str]]:
    """What each rank put into a step: its micro-batches' losses, summed, and a digest over their digests.

    `batches` are a rank's records of `size` bytes, a digest first; for whoever asks which rank went astray.
    """
    digests = [b"".join(held[at : at + 32] for at in range(0, len(held), size)) for held in batches]
    return [
        {"loss": math.fsum(values).hex(), "batch_sha256": hashlib.sha256(held).hexdigest()}
        for values, held in zip(losses, digests, strict=True)
    ]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines; what a crash cut off or garbled, and what follows it, is left out."""
    lines = []
    for text in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:
            break
        if not text.endswith(b"\n") or not isinstance(line, dict) or not isinstance(line.get("step"), int):
            break
        lines.append(line)
    return lines
