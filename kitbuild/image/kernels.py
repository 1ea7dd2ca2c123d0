"""Step 3: the locked kernels as a Hugging Face cache that works offline and read-only.

`kernels` 0.17 reads KERNELS_CACHE, else HF_HUB_CACHE, and offline asks huggingface_hub for the snapshot of a
commit. That needs `snapshots/<commit>/…` only: regular files do, no `blobs/`. Without `trees/<commit>.json` the
snapshot counts as complete (with the one that a download leaves, which lists the whole repository, it would
not); without `refs/` nothing that is not pinned to a commit can load. Only what a kernel depends on has a ref: a
kernel's metadata names versions, and `kernels` looks these up offline as `refs/v1`; each holds the locked commit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kitbuild.errors import ImageError
from kitbuild.image.entries import Entry, Stored

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kitbuild.lock.models import Lock, LockedFile, LockedKernel
    from kitbuild.store import Store

CACHE = "/kit/kernels"


def kernel_files(lock: Lock) -> Iterator[tuple[str, LockedFile, LockedKernel]]:
    """`(path below the cache, file, kernel)`; a kernel that has two roles is there once."""
    seen: dict[str, str] = {}
    for kernel in lock.kernels:
        root = f"kernels--{kernel.repo.replace('/', '--')}/snapshots/{kernel.commit}"
        for file in kernel.files:
            path = f"{root}/{file.path}"
            if seen.setdefault(path, file.sha256) != file.sha256:
                raise ImageError(f"{kernel.repo}: the lock has {file.path} twice, with different digests")
            yield path, file, kernel


def kernel_refs(lock: Lock) -> dict[str, str]:
    """Path below the cache to the commit, for every name by which one kernel asks for another."""
    return {
        f"kernels--{kernel.repo.replace('/', '--')}/refs/{kernel.revision}": kernel.commit
        for kernel in lock.kernels
        if kernel.role == "dependency" and kernel.revision != kernel.commit
    }


def kernel_entries(lock: Lock, store: Store) -> tuple[Entry, ...]:
    """The cache's files, from the store."""
    found = {
        path: Entry(
            path=f"{CACHE}/{path}",
            size=file.size,
            source=Stored(file=store.require(file.sha256, name=f"{kernel.repo} {file.path}")),
            owner=f"{kernel.repo}@{kernel.commit[:7]}",
            sha256=file.sha256,
        )
        for path, file, kernel in kernel_files(lock)
    }
    found |= {
        path: Entry.of(f"{CACHE}/{path}", commit.encode(), owner="kernels")
        for path, commit in kernel_refs(lock).items()
    }
    return tuple(found[path] for path in sorted(found))
