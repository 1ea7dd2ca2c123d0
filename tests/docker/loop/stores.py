"""Stores of a test's own that need no download: what is large is linked from the store that the suite uses."""

from __future__ import annotations

import contextlib
import os
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from kitbuild.lock.models import Lock
    from kitbuild.store import Store

SMALL_BYTES = 1 << 20
UPSTREAM = ("bases", "base-names", "wheel-addresses")
"""Records of what was found on the network."""


def upstream_blobs(lock: Lock) -> set[str]:
    """What a new machine would download: wheels and the base."""
    base = {digest.removeprefix("sha256:") for digest in (lock.base.config_digest, *lock.base.diff_ids)}
    return {wheel.sha256 for wheel in lock.wheels} | base


def new_machine(source: Store, target: Path, lock: Lock, *, modules: bool = True) -> Path:
    """A store with what upstream has, as after a download, and the compiled modules, which take minutes."""
    blobs = upstream_blobs(lock)
    if modules:
        blobs |= {record["blob"] for record in source.records("pyc").values()}
    for sha256 in blobs:
        path = source.path(sha256)
        place = target / path.relative_to(source.root)
        place.parent.mkdir(parents=True, exist_ok=True)
        _link_or_copy(path, place)
    for kind in (*UPSTREAM, *(("pyc",) if modules else ())):
        if (source.root / "records" / kind).is_dir():
            shutil.copytree(source.root / "records" / kind, target / "records" / kind)
    if (source.root / "uv").is_dir():  # the resolver's cache of what indexes told
        (target / "uv").symlink_to(source.root / "uv")
    return target


def _link_or_copy(path: Path, place: Path) -> None:
    if path.stat().st_size >= SMALL_BYTES:
        with contextlib.suppress(OSError):
            os.link(path, place)
            return
    shutil.copy(path, place)
