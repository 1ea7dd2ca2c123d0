"""Fill the store with everything that a lock names. No decision is made here: what comes must be the locked bytes.

Part of step 2. Where everything is in the store already, the network is not touched.
"""

from __future__ import annotations

from functools import partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from kitbuild.base.find import ensure
from kitbuild.errors import ResolveError
from kitbuild.lock.hub import Hub, HubFile
from kitbuild.lock.pylock import addresses_of, read_pylock
from kitbuild.lock.uv import Sources
from kitbuild.lock.wheel_places import locate_wheels
from kitbuild.store import sha256_file
from kitbuild.store.download import Download, fetch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    import docker

    from kitbuild.lock.hub import RepoType
    from kitbuild.lock.models import Lock, LockedFile, LockedTree, LockedWheel
    from kitbuild.progress import Progress
    from kitbuild.store import Store


def fetch_locked(
    lock: Lock,
    *,
    store: Store,
    environ: Mapping[str, str],
    progress: Progress,
    client: Callable[[], docker.DockerClient],
    folder: Path | None,
    indexes: Mapping[str, str],
    base: bool = True,
    wheels: bool = True,
) -> None:
    """Fetch what is missing: wheels, kernels, model, data, the base's layers. `base` and `wheels` can be left out.

    `folder` is the recipe's: what the lock has from disk is taken from there where the store lacks it.
    `indexes` are the recipe's too: the lock names them without their addresses.
    """
    missing = tuple(wheel for wheel in lock.wheels if wheels and not store.has(wheel.sha256))
    if missing:
        told = _told(lock, folder)
        _fetch_wheels(lock, missing, told=told, indexes=indexes, store=store, environ=environ, progress=progress)
    downloads: list[Download] = []
    hub: Hub | None = None
    for repo, repo_type, commit, files in _hub_files(lock):
        gone = tuple(_hub_file(file) for file in files if not store.has(file.sha256))
        if gone:
            hub = hub or Hub(environ)
            downloads += hub.downloads(repo, repo_type, commit, gone)
    fetch(store, downloads, progress=progress, environ=environ)
    for key, path, file in _local_files(lock):
        if folder is not None and not store.has(file.sha256) and (folder / path).is_file():
            store.add_file(folder / path, name=path, expected=file.sha256)
        if not store.has(file.sha256):
            raise ResolveError(
                f"{key}: {file.path} (sha256 {file.sha256[:12]}…) is not in the store and has no upstream",
                hint="put the file back, or take it from a bundle: kitbuild fetch RECIPE --from BUNDLE",
            )
    if base:
        ensure(lock.base, store=store, environ=environ, client_factory=client, progress=progress)


def _fetch_wheels(
    lock: Lock,
    wheels: tuple[LockedWheel, ...],
    *,
    told: Mapping[str, str],
    indexes: Mapping[str, str],
    store: Store,
    environ: Mapping[str, str],
    progress: Progress,
) -> None:
    """From the addresses that this machine remembers; where one of them is gone, the indexes are asked anew."""
    locate = partial(locate_wheels, wheels, lock=lock, indexes=indexes, store=store, environ=environ, progress=progress)
    trusting = Sources.read(indexes, environ).trusting
    try:
        fetch(store, locate(told=told), progress=progress, environ=trusting)
    except ResolveError:
        fetch(store, locate(anew=True), progress=progress, environ=trusting)


def _told(lock: Lock, folder: Path | None) -> Mapping[str, str]:
    """Addresses from the pylock.toml beside the recipe, while it is the locked one."""
    file = lock.package_set.pylock
    if file is None or folder is None or not (folder / file.path).is_file():
        return {}
    if sha256_file(folder / file.path) != (file.sha256, file.size):
        return {}
    return addresses_of(read_pylock(folder / file.path))


def trees(lock: Lock) -> Iterator[tuple[str, RepoType, LockedTree]]:
    """Every file tree of the lock but the kernels', with its recipe key."""
    if lock.model.weights is not None:
        yield "model", "model", lock.model.weights
    if lock.model.tokenizer is not None:
        yield "model.tokenizer", "model", lock.model.tokenizer
    for index, dataset in enumerate(lock.datasets):
        yield f"dataset.{index}", "dataset", dataset.tree
    if lock.evaluate is not None:
        yield "evaluate.dataset", "dataset", lock.evaluate.tree


def _hub_files(lock: Lock) -> Iterator[tuple[str, RepoType, str, tuple[LockedFile, ...]]]:
    for _, repo_type, tree in trees(lock):
        if tree.repo is not None:
            yield tree.repo, repo_type, str(tree.commit), tree.files
    for kernel in lock.kernels:
        yield kernel.repo, "kernel", kernel.commit, kernel.files


def _local_files(lock: Lock) -> Iterator[tuple[str, str, LockedFile]]:
    """Recipe key, path from the recipe's folder, file."""
    for key, _, tree in trees(lock):
        if tree.path is not None:
            alone = len(tree.files) == 1 and PurePosixPath(tree.path).name == tree.files[0].path
            yield from ((key, tree.path if alone else f"{tree.path}/{file.path}", file) for file in tree.files)
    if lock.model.chat_template is not None:
        yield "model.chat_template", lock.model.chat_template.path, lock.model.chat_template


def _hub_file(file: LockedFile) -> HubFile:
    return HubFile(path=file.path, size=file.size, sha256=file.sha256, blob_id="")
