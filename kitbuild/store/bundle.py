"""Carry a part of a store to a machine with no network. Part of the foundation below the steps.

A bundle is a plain tar: `bundle.json` first (every blob with its size), then `blobs/<sha256>`. The same content gives
the same bytes. Each blob is verified as it is read, and nothing else comes along: what the blobs mean is in the lock.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from typing import TYPE_CHECKING, Any, BinaryIO

from kitbuild.errors import UsageError, VerificationError
from kitbuild.store.blobs import CHUNK_BYTES, replacing

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from kitbuild.progress import Progress
    from kitbuild.store.blobs import Store

INDEX = "bundle.json"
VERSION = 1
_LARGEST_INDEX_BYTES = 64 << 20
_AGAIN = "write it where there is a network: kitbuild fetch RECIPE --bundle F"
_SHA256 = re.compile(r"[0-9a-f]{64}")


def write_bundle(
    store: Store,
    sha256s: Iterable[str],
    output: Path,
    *,
    progress: Progress,
) -> None:
    """Write the blobs into `output`, atomically."""
    paths = {sha256: store.require(sha256, name="a file of the bundle") for sha256 in sorted(set(sha256s))}
    sizes = {sha256: path.stat().st_size for sha256, path in paths.items()}
    index = json.dumps({"version": VERSION, "blobs": sizes}, indent=1, sort_keys=True).encode()
    total = float(sum(sizes.values()))
    with (
        replacing(output) as stream,
        progress.activity("Writing the bundle", total=total, unit="bytes") as advance,
        tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as archive,
    ):
        archive.addfile(_member(INDEX, len(index)), io.BytesIO(index))
        for sha256, path in paths.items():
            with path.open("rb") as blob:
                archive.addfile(_member(f"blobs/{sha256}", sizes[sha256]), blob)
            advance(sizes[sha256])


def read_bundle(path: Path, store: Store, *, progress: Progress) -> tuple[str, ...]:
    """Take everything in; returns the sha256 of each blob. A wrong byte is exit 7 and nothing of it is kept."""
    try:
        with _opened(path) as stream, tarfile.open(fileobj=stream, mode="r:") as archive:
            return _read(archive, store, path=path, progress=progress)
    except tarfile.ReadError as error:
        raise UsageError(f"{path} is no bundle of kitbuild: {error}", hint=_AGAIN) from error


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except FileNotFoundError as error:
        raise UsageError(f"there is no bundle {path}", hint=_AGAIN) from error
    except OSError as error:
        raise UsageError(f"the bundle {path} cannot be read: {error.strerror}", hint=_AGAIN) from error


def _read(archive: tarfile.TarFile, store: Store, *, path: Path, progress: Progress) -> tuple[str, ...]:
    index = _index(archive, path)
    sizes: Mapping[str, int] = index["blobs"]
    seen: list[str] = []
    with progress.activity("Reading the bundle", total=float(sum(sizes.values())), unit="bytes") as advance:
        while (member := archive.next()) is not None:
            sha256 = member.name.removeprefix("blobs/")
            stream = archive.extractfile(member) if member.isreg() else None
            if stream is None or sizes.get(sha256) != member.size or sha256 in seen:
                raise VerificationError(f"{path}: {member.name} is not what its {INDEX} lists", hint=_AGAIN)
            if not store.has(sha256):
                store.add_chunks(_chunks(stream, path), name=f"{path}: {member.name}", expected=sha256)
            seen.append(sha256)
            advance(member.size)
    absent = sorted(set(sizes) - set(seen))
    if absent:
        raise VerificationError(f"{path} ends early: {len(absent)} of {len(sizes)} files are missing", hint=_AGAIN)
    return tuple(seen)


def _index(archive: tarfile.TarFile, path: Path) -> dict[str, Any]:
    first = archive.next()
    stream = archive.extractfile(first) if first and first.isreg() and first.name == INDEX else None
    if first is None or stream is None or first.size > _LARGEST_INDEX_BYTES:
        raise UsageError(f"{path} is no bundle of kitbuild: it does not begin with {INDEX}", hint=_AGAIN)
    try:
        index = json.loads(stream.read())
        version, blobs = index["version"], index["blobs"]
        right = index.keys() == {"version", "blobs"}
        right = right and all(_SHA256.fullmatch(key) and isinstance(size, int) for key, size in blobs.items())
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise VerificationError(f"{path}: {INDEX} cannot be read", hint=_AGAIN) from error
    if version != VERSION:
        raise UsageError(f"{path} is a bundle of version {version}", hint="use the kitbuild that wrote it")
    if not right:
        raise VerificationError(f"{path}: {INDEX} holds names that no bundle has", hint=_AGAIN)
    return dict(index)


def _chunks(stream: Any, path: Path) -> Iterator[bytes]:
    try:
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk
    except tarfile.ReadError as error:
        raise VerificationError(f"{path} ends early", hint=_AGAIN) from error


def _member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o644
    return member
