"""Step 5: one file with which a stranger reproduces a run, and back.

A `.kit.tar` is a plain tar: `kit.json`, then `run/…`, then `blobs/sha256/…`, sorted, without times and owners, so
the same run and store give the same bytes. Trained weights are left out unless asked for: a verdict needs only
their digests, which are in the manifest.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kitbuild.archive.carried import Include, carried
from kitbuild.archive.documents import parse_json
from kitbuild.archive.read import check, read
from kitbuild.archive.source import BLOB_PREFIX, KIT_FILE, KIT_FORMAT, RUN_PREFIX, KitTar, RunDirectory
from kitbuild.base import bases
from kitbuild.base.facts import read_facts
from kitbuild.errors import LockError, UsageError, VerificationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kitbuild.archive.source import Stream
    from kitbuild.base.models import LockedBase
    from kitbuild.store.blobs import Store

CHUNK_BYTES = 1 << 20
DOCUMENTS = ("manifest.json", "recipe.yaml", "lock.json", "metrics.jsonl", "exit.json")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


@dataclass(frozen=True, kw_only=True)
class Kit:
    """What `kit.json` says."""

    run: str
    include: str
    weights: bool


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
        return _write(archive.source, output, blobs, store=store, include=include, weights=weights)
    except OSError as error:
        raise UsageError(
            f"{output} cannot be written: {error.strerror}", hint="name a file where there is room and you may write"
        ) from error


def read_kit(tar: KitTar) -> Kit:
    """The checked `kit.json` of a `.kit.tar`; a newer format is exit 3."""
    with tar.open_member(KIT_FILE) as stream:
        try:
            body = parse_json(stream.read())
        except ValueError as error:
            raise VerificationError(
                f"{tar.path}: {KIT_FILE} is not JSON: {error}", hint="the file is damaged"
            ) from error
    version = body.get("format") if isinstance(body, dict) else None
    if isinstance(version, int) and version > KIT_FORMAT:
        raise LockError(
            f"{tar.path}: format {version} is newer than this kitbuild reads ({KIT_FORMAT})",
            hint="use a newer kitbuild",
        )
    match body:
        case {"format": 1, "run": str(run), "include": str(include), "weights": bool(weights)} if _NAME.fullmatch(run):
            return Kit(run=run, include=include, weights=weights)
        case _:
            raise VerificationError(f"{tar.path}: {KIT_FILE} is malformed", hint="the file is damaged")


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


def _write(
    source: RunDirectory, output: Path, blobs: Iterable[str], *, store: Store, include: str, weights: bool
) -> Path:
    kit = {
        "format": KIT_FORMAT,
        "run": source.path.resolve().name,
        "include": include,
        "weights": weights,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=output.parent, prefix=f".{output.name}.")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar:
                data = (json.dumps(kit, indent=1, sort_keys=True) + "\n").encode()
                tar.addfile(_member(KIT_FILE, len(data)), io.BytesIO(data))
                for file in _run_files(source, weights=weights):
                    _add(tar, RUN_PREFIX + file, source.path / file)
                for sha256 in sorted(blobs):
                    _add(tar, BLOB_PREFIX + sha256, store.path(sha256))
            stream.flush()
            os.fchmod(stream.fileno(), 0o644)
            os.fsync(stream.fileno())
        Path(name).replace(output)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return output


def _run_files(source: RunDirectory, *, weights: bool) -> Iterator[str]:
    for name in source.names():
        if name in DOCUMENTS or name.startswith("logs/") or (weights and name.startswith("model/")):
            yield name


def _add(tar: tarfile.TarFile, name: str, path: Path) -> None:
    with path.open("rb") as stream:
        tar.addfile(_member(name, path.stat().st_size), stream)


def _member(name: str, size: int) -> tarfile.TarInfo:
    """A member without times and owners (`TarInfo` starts with zeros)."""
    member = tarfile.TarInfo(name)
    member.size = size
    member.mode = 0o644
    return member


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
