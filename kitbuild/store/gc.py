"""Look after a store: hash it again, and drop what nobody asks for. Part of the foundation below the steps."""

from __future__ import annotations

import math
import shutil
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kitbuild.errors import Problem
from kitbuild.store.blobs import sha256_file

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterator
    from pathlib import Path

    from kitbuild.progress import Progress
    from kitbuild.store.blobs import Store

DAY_SECONDS = 86_400.0


@dataclass(frozen=True, kw_only=True)
class Freed:
    """What was removed."""

    blobs: int = 0
    bytes: int = 0
    trees: int = 0


def blobs(store: Store) -> Iterator[Path]:
    """Every blob, in order."""
    yield from sorted((store.root / "blobs" / "sha256").glob("??/*"))


def verify(store: Store, *, progress: Progress, repair: bool = False) -> tuple[Problem, ...]:
    """Hash every blob again. With `repair`, a wrong one is removed, so that `kitbuild fetch` brings it anew."""
    paths = tuple(blobs(store))
    problems: list[Problem] = []
    with progress.activity("Verifying the store", total=float(len(paths)), unit="files") as advance:
        for path in paths:
            sha256, size = sha256_file(path)
            if sha256 != path.name:
                hint = "removed; run `kitbuild fetch`" if repair else "run `kitbuild store verify --repair`"
                problems.append(Problem(message=f"{size} bytes with sha256 {sha256}", file=str(path), hint=hint))
                if repair:
                    _remove_trees(store, partial(_shares, path.stat()))
                    path.unlink()
            advance(1)
    return tuple(problems)


def gc(store: Store, keep: Collection[str], *, min_age_seconds: float = DAY_SECONDS) -> Freed:
    """Remove blobs whose sha256 is not in `keep`, trees made of them, and what kills left in `work/`.

    Nothing younger than `min_age_seconds` goes: another process may have put it there for a lock it is making, or a
    run that began since may have it mounted.
    """
    kept, latest = frozenset(keep), time.time() - min_age_seconds
    count, size = 0, 0
    for path in blobs(store):
        facts = path.stat()
        if path.name in kept or facts.st_mtime > latest:
            continue
        path.unlink()
        count, size = count + 1, size + facts.st_size
    for path in (store.root / "work").iterdir():
        if path.lstat().st_mtime <= latest:
            _remove(path)
    return Freed(blobs=count, bytes=size, trees=_remove_trees(store, _alone, latest=latest))


def drop_folders(store: Store, area: str, keep: Collection[str], *, min_age_seconds: float = DAY_SECONDS) -> Freed:
    """Remove the folders in an area of the store that are not in `keep` and that nobody used since `min_age_seconds`."""
    latest, size, count = time.time() - min_age_seconds, 0, 0
    for path in sorted((store.root / area).glob("[!.]*")):
        if path.name not in keep and path.lstat().st_mtime <= latest:
            size += sum(item.lstat().st_size for item in path.rglob("*") if item.is_file() and not item.is_symlink())
            _remove(path)
            count += 1
    return Freed(bytes=size, trees=count)


def drop_records(store: Store, kind: str, dead: Callable[[str, Any], bool]) -> int:
    """Forget facts about what is gone; returns how many. A damaged record is about nothing."""
    paths = sorted((store.root / "records" / kind).glob("[!.]*"))
    gone = [path for path in paths if (value := store.record(kind, path.name)) is None or dead(path.name, value)]
    for path in gone:
        path.unlink()
    return len(gone)


def _remove_trees(store: Store, spoilt: Callable[[os.stat_result], bool], *, latest: float = math.inf) -> int:
    """Trees are hard links to blobs and can be made again."""
    removed = 0
    for tree in (store.root / "trees").iterdir():
        files = (path for path in tree.rglob("*") if path.is_file())
        if tree.lstat().st_mtime <= latest and any(spoilt(path.lstat()) for path in files):
            _remove(tree)
            removed += 1
    return removed


def _shares(blob: os.stat_result, facts: os.stat_result) -> bool:
    return blob.st_ino == facts.st_ino


def _alone(facts: os.stat_result) -> bool:
    """Whether a tree's file has no blob any more, so that it takes room for itself alone."""
    return facts.st_nlink == 1


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
