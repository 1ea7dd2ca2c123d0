"""Step 5: one file with which a stranger reproduces a run, and back.

A `.kit.tar` is a plain tar: `kit.json`, then `run/…`, then `blobs/sha256/…`, sorted, without times and owners, so
the same run and store give the same bytes. Trained weights are left out unless asked for: a verdict needs only
their digests, which are in the manifest. Format 1 had no digest of `kit.json` and is still read.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from kitbuild.archive.carried import Include, carried
from kitbuild.archive.kit import Kit, read_kit
from kitbuild.archive.read import check, read
from kitbuild.archive.seal import SEAL_FILE, WEIGHT_FOLDERS
from kitbuild.archive.source import BLOB_PREFIX, KIT_FILE, REPEATS_PREFIX, RUN_PREFIX, KitTar, RunDirectory
from kitbuild.archive.tar_bytes import plain_member
from kitbuild.base import bases
from kitbuild.base.facts import read_facts
from kitbuild.errors import UsageError, VerificationError
from kitbuild.store.blobs import replacing

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kitbuild.archive.read import Archive
    from kitbuild.archive.source import Stream
    from kitbuild.base.models import LockedBase
    from kitbuild.store.blobs import Store

CHUNK_BYTES = 1 << 20
DOCUMENTS = ("manifest.json", "recipe.yaml", "lock.json", "metrics.jsonl", "exit.json", SEAL_FILE)


def pack(run_dir: Path, output: Path, *, store: Store, include: Include = "local", weights: bool = False) -> Path:
    """Write `output` from a verified run directory; replaces an older file of that name only when complete."""
    archive = read(run_dir)
    if not isinstance(archive.source, RunDirectory):
        raise UsageError(f"{run_dir} is not a run directory", hint="it is packed already")
    check(archive)
    if archive.source.links():
        names = ", ".join(archive.source.links()[:3])
        raise VerificationError(
            f"{run_dir} has symbolic links ({names})", hint="an archive holds its own files; copy them in"
        )
    blobs = carried(archive.manifest.lock, include=include, store=store)
    try:
        return _write(archive, output, blobs, store=store, include=include, weights=weights)
    except OSError as error:
        raise UsageError(
            f"{output} cannot be written: {error.strerror}", hint="name a file where there is room and you may write"
        ) from error


def unpack(kit_tar: Path, store: Store, destination: Path) -> Path:
    """Check everything, put the blobs into the store, and make `destination` a run directory, in that order."""
    if not kit_tar.is_file():
        what = "is a directory, not a packed archive" if kit_tar.is_dir() else "does not exist"
        raise UsageError(f"{kit_tar} {what}", hint="name a file that `kitbuild archive pack` wrote")
    tar = KitTar.read(kit_tar)
    read_kit(tar)
    archive = read(kit_tar)
    check(archive)
    if destination.is_symlink() or (destination.exists() and (not destination.is_dir() or any(destination.iterdir()))):
        raise UsageError(f"{destination} exists and is not an empty directory", hint="name a new one")
    for sha256 in tar.blobs():
        if not store.has(sha256):
            with tar.open_member(BLOB_PREFIX + sha256) as stream:
                store.add_chunks(_chunks(stream), name=f"{kit_tar}: {BLOB_PREFIX}{sha256}", expected=sha256)
    _adopt_base(archive.manifest.lock.base, store)
    try:
        _extract(tar, destination)
    except OSError as error:
        raise UsageError(
            f"{destination} cannot be written: {error.strerror}", hint="name a directory that you may write"
        ) from error
    return destination


def _adopt_base(base: LockedBase, store: Store) -> None:
    """Make a carried base known here. Its facts are read from its own bytes, never believed."""
    if not bases.held(store, base) or bases.recorded(store, base.manifest_digest):
        return
    layers = [path for _digest, path in bases.layers(store, base)]
    facts = read_facts(name=base.name, config=bases.config(store, base), layers=layers, origin=base.upstream)
    if facts != base:
        raise VerificationError(f"the base {base.name} is not what the lock says of it", hint="do not use this archive")
    bases.record(store, base)


def _write(archive: Archive, output: Path, blobs: Iterable[str], *, store: Store, include: str, weights: bool) -> Path:
    run_dir = archive.path
    kit = Kit(run=run_dir.resolve().name, include=include, weights=weights, archive_sha256=archive.sha256)
    output.parent.mkdir(parents=True, exist_ok=True)
    with replacing(output) as stream, tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar:
        data = kit.to_bytes()
        tar.addfile(plain_member(KIT_FILE, len(data)), io.BytesIO(data))
        for file in _run_files(archive, weights=weights):
            _add(tar, RUN_PREFIX + file, run_dir / file)
        for sha256 in sorted(blobs):
            _add(tar, BLOB_PREFIX + sha256, store.path(sha256))
    return output


def _run_files(archive: Archive, *, weights: bool) -> Iterator[str]:
    """What archive.json lists; of an older run, what was known then. Weights where asked for."""
    listed = {SEAL_FILE, *archive.seal.files} if archive.seal else None
    for name in archive.source.names():
        kept = name in listed if listed is not None else name in DOCUMENTS or name.startswith(("logs/", "model/"))
        kept = kept or name.startswith(REPEATS_PREFIX)
        if kept and (weights or not name.startswith(WEIGHT_FOLDERS)):
            yield name


def _add(tar: tarfile.TarFile, name: str, path: Path) -> None:
    with path.open("rb") as stream:
        tar.addfile(plain_member(name, path.stat().st_size), stream)


def _extract(tar: KitTar, destination: Path) -> None:
    destination.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=destination.parent, prefix=f".{destination.name}."))
    try:
        for name in tar.names():
            target = part / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with tar.open(name) as stream, target.open("xb") as file:
                for chunk in _chunks(stream):
                    file.write(chunk)
        part.chmod(0o755)
        with contextlib.suppress(FileNotFoundError):
            destination.rmdir()
        part.replace(destination)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _chunks(stream: Stream) -> Iterator[bytes]:
    while chunk := stream.read(CHUNK_BYTES):
        yield chunk
