"""Look after a store: hash it again, and drop what nobody asks for. Part of the foundation below the steps."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kitbuild.errors import Problem
from kitbuild.store.blobs import sha256_file

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

    from kitbuild.progress import Progress
    from kitbuild.store.blobs import Store

DAY_SECONDS = 86_400.0


@dataclass(frozen=True, kw_only=True)
class Freed:
    """What `gc` removed."""

    blobs: int
    bytes: int
    trees: int


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
                    _remove_trees(store, {path.stat().st_ino})
                    path.unlink()
            advance(1)
    return tuple(problems)


def gc(store: Store, keep: Collection[str], *, min_age_seconds: float = DAY_SECONDS) -> Freed:
    """Remove blobs whose sha256 is not in `keep`, trees made of them, and what kills left in `work/`.

    Nothing younger than `min_age_seconds` goes: another process may have put it there for a lock it is making.
    """
    kept, latest = frozenset(keep), time.time() - min_age_seconds
    count, size, inodes = 0, 0, set()
    for path in blobs(store):
        facts = path.stat()
        if path.name in kept or facts.st_mtime > latest:
            continue
        inodes.add(facts.st_ino)
        path.unlink()
        count, size = count + 1, size + facts.st_size
    for path in (store.root / "work").iterdir():
        if path.lstat().st_mtime <= latest:
            _remove(path)
    return Freed(blobs=count, bytes=size, trees=_remove_trees(store, inodes))


def _remove_trees(store: Store, inodes: Collection[int]) -> int:
    """Trees are hard links to blobs and can be made again."""
    removed = 0
    for tree in (store.root / "trees").iterdir():
        if any(path.lstat().st_ino in inodes for path in tree.rglob("*") if path.is_file()):
            _remove(tree)
            removed += 1
    return removed


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
