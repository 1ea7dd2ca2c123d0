"""Give a base to others: a registry, or a file that engines and `read_base` take."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kitbuild.base import bases, oci
from kitbuild.base.registry import push
from kitbuild.errors import ImageError
from kitbuild.store.blobs import replacing

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from kitbuild.base.models import LockedBase
    from kitbuild.progress import Progress
    from kitbuild.store import Store


def push_base(base: LockedBase, reference: str, *, store: Store, environ: Mapping[str, str], progress: Progress) -> str:
    """Push a base with its very digests; returns `host/repository@digest`."""
    manifest, config, layers = bases.manifest(store, base), bases.config(store, base), bases.layers(store, base)
    where = push(reference, manifest, config, layers, environ=environ, progress=progress)
    progress.note(f"pushed {where}")
    return where


def write_base(base: LockedBase, path: Path, *, store: Store, progress: Progress) -> None:
    """Write a base as one archive, which `docker load` takes too."""
    try:
        with progress.activity(f"write {path.name}", total=None, unit="bytes"), replacing(path) as stream:
            oci.write_archive(
                stream,
                config=bases.config(store, base),
                manifest=bases.manifest(store, base),
                layers=bases.layers(store, base),
                tag=base.name.partition("@")[0],
            )
    except OSError as error:
        raise ImageError(f"{path} cannot be written: {error.strerror}", hint="choose another place") from error


def read_base(path: Path, *, name: str, store: Store, progress: Progress) -> LockedBase:
    """Take a base from such an archive, or from what `docker save` wrote, into the store."""
    with oci.read_archive(path) as saved:
        openers = [partial(saved.layer, position) for position in range(len(saved.members))]
        base = bases.add(store, name=name, config=saved.config, openers=openers, progress=progress)
    bases.remember_name(store, base)
    progress.note(f"base {name} @ {base.manifest_digest} ({path})")
    return base
