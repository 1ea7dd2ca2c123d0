"""Phase 6, at a step boundary: checkpoints that are whole or do not count. Standard library only.

The mark `kit.json` is written last, after every other file is on the disk, and lists them with size and digest. What
has no mark, or is not what its mark says, was cut off or damaged: the checkpoint before it is used.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kitbuild.errors import RunError
from kitbuild.guest import record
from kitbuild.guest.config import cores

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from kitbuild.guest.config import Config

MARK = "kit.json"
METRICS = "metrics.jsonl"
PREFIX = "checkpoint-"
FORMAT = 1
READ = {"files": dict, "resumed": list, "device": dict}
"""Of the mark, what a resume reads."""
CHUNK_BYTES = 1 << 26
"""A file is hashed in pieces, on all cores: one core hashes less in a second than a disk takes."""
KEPT = 2
"""Where the recipe does not say: the last one, and the one before in case a disk loses it."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A whole checkpoint."""

    folder: Path
    mark: Mapping[str, Any]

    @property
    def step(self) -> int:
        """The last step that it holds."""
        return int(self.mark["step"])

    @property
    def resumed(self) -> list[int]:
        """The steps after which a run that goes on from here was resumed."""
        return [*self.mark["resumed"], self.step]


def seconds_between(config: Config) -> float | None:
    """How often one is due, where the recipe does not say when checkpoints are written."""
    chosen = {"save_steps", "save_strategy"} & config.train.keys()
    return None if chosen or config.measure else config.checkpoint_seconds


def kept(config: Config) -> int | None:
    """How many whole ones stay; None: all."""
    limit = config.train.get("save_total_limit")
    if limit is not None:
        return int(limit)
    return None if seconds_between(config) is None else KEPT


def calls(rank: int) -> str:
    """Where a rank keeps how often it called its kernels so far."""
    return f"calls-{rank}.json"


def begin(folder: Path) -> None:
    """Nothing of an earlier try stays where one is about to be written."""
    remove(folder)


def seal(folder: Path, facts: Mapping[str, Any], needed: Iterable[str]) -> None:
    """Every file onto the disk, then the mark."""
    missing = [name for name in needed if not (folder / name).is_file()]
    if missing:
        raise RunError(f"{folder.name} lacks {', '.join(missing)}", hint="every node has to see the same run directory")
    files = _files(folder)
    for name in files:
        record.sync(folder / name)
    for place in sorted({(folder / name).parent for name in files}):
        record.sync(place)
    listed = {name: {"size": (folder / name).stat().st_size, "digest": digest(folder / name)} for name in files}
    record.write_json(folder / MARK, {"format": FORMAT, **facts, "files": listed})
    record.sync(folder)
    record.sync(folder.parent)


def remove(folder: Path) -> None:
    """First the mark, so that what is half gone does not count."""
    (folder / MARK).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def prune(checkpoints: Path, *, keep: int | None, newest: Path) -> None:
    """Remove all but the last `keep` up to `newest`, which is whole. One that has no mark counts for nothing."""
    older = [folder for folder in _folders(checkpoints) if _step(folder) < _step(newest)]
    whole = [folder for folder in older if (folder / MARK).is_file()]
    stay = set(older if keep is None else whole[len(whole) - min(keep - 1, len(whole)) :])
    for folder in older:
        if folder not in stay or not (folder / MARK).is_file():
            remove(folder)


def clean(config: Config) -> None:
    """A run that is complete needs those no longer that its recipe did not ask for."""
    if "save_steps" not in config.train and config.train.get("save_strategy", "no") == "no":
        shutil.rmtree(config.places.checkpoints, ignore_errors=True)


def drop_after(found: Checkpoint) -> None:
    """What is newer than the last whole one is not whole."""
    for folder in _folders(found.folder.parent):
        if _step(folder) > found.step:
            remove(folder)


def last_whole(checkpoints: Path) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """The newest whole one, and what is wrong with those that are newer."""
    told: list[str] = []
    for folder in reversed(_folders(checkpoints)):
        mark = read_mark(folder)
        problem = "it was not written to its end" if mark is None else next(problems(folder, mark), None)
        if mark is not None and problem is None:
            return Checkpoint(folder=folder, mark=mark), tuple(told)
        told.append(f"{folder.name} is not whole: {problem}")
    return None, tuple(told)


def whole_at(checkpoints: Path, step: int) -> Checkpoint | None:
    """That of a step to which another node went back; None for the beginning."""
    folder = checkpoints / f"{PREFIX}{step}"
    mark = read_mark(folder)
    problem = "there is none" if mark is None else next(problems(folder, mark), None)
    if step and (mark is None or problem is not None):
        text = f"another node goes on from {folder.name}, which is not whole here: {problem}"
        raise RunError(text, hint="start a new run")
    return Checkpoint(folder=folder, mark=mark) if mark is not None else None


def read_mark(folder: Path) -> dict[str, Any] | None:
    """The mark, where it is one of ours and of this folder."""
    try:
        mark = json.loads((folder / MARK).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    known = isinstance(mark, dict) and mark.get("format") == FORMAT and mark.get("step") == _step(folder)
    return mark if known and _shaped(mark) else None


def _shaped(mark: Mapping[str, Any]) -> bool:
    """Whether all that a resume reads is there: a disk may have lost a byte of the mark too."""
    if not all(isinstance(mark.get(name), kind) for name, kind in READ.items()) or "evaluate_before" not in mark:
        return False
    return all(isinstance(facts, dict) and facts.keys() >= {"size", "digest"} for facts in mark["files"].values())


def problems(folder: Path, mark: Mapping[str, Any]) -> Iterator[str]:
    """What is not as it was marked; sizes of all files before the first digest."""
    for name, facts in mark["files"].items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size is None:
            yield f"{name} is missing"
        elif size != facts["size"]:
            yield f"{name} has {size} bytes of {facts['size']}"
    for name, facts in mark["files"].items():
        if (folder / name).is_file() and digest(folder / name) != facts["digest"]:
            yield f"{name} has other bytes than were written"


def digest(path: Path) -> str:
    """sha256 over the sha256 of each 64 MiB piece."""

    def piece(start: int) -> bytes:
        found = hashlib.sha256()
        with path.open("rb") as file:
            file.seek(start)
            left = CHUNK_BYTES
            while left and (block := file.read(min(left, 1 << 20))):
                found.update(block)
                left -= len(block)
        return found.digest()

    with ThreadPoolExecutor(cores()) as pool:
        return hashlib.sha256(b"".join(pool.map(piece, range(0, path.stat().st_size, CHUNK_BYTES)))).hexdigest()


def _files(folder: Path) -> list[str]:
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in found if name != MARK)


def _folders(checkpoints: Path) -> list[Path]:
    """By step."""
    found = [path for path in checkpoints.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdecimal()]
    return sorted((path for path in found if path.is_dir()), key=_step)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix(PREFIX))
