"""The container formats, as bytes. Below `base` and `image`: no engine, no network, no store.

One archive serves every reader: `docker load` (the classic store reads `manifest.json`, the containerd store
`index.json`) and tools that know the OCI image layout. Its bytes are a function of its arguments.
Formats: https://github.com/opencontainers/image-spec and
https://github.com/moby/docker-image-spec/blob/main/spec.md#combined-image-json--filesystem-changeset-format.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import posixpath
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from kitbuild.errors import ImageError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
CHUNK_BYTES = 1 << 20
_LARGEST_DOCUMENT_BYTES = 64 << 20
_MOST_INDEXES = 4  # an index of an index; one that names itself ends
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"


def canonical(value: object) -> bytes:
    """JSON with sorted keys and no spaces, UTF-8."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def digest_of(data: bytes) -> str:
    """`sha256:…` of bytes."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def config_bytes(
    *,
    architecture: str,
    diff_ids: Sequence[str],
    config: dict[str, Any],
    history: Sequence[dict[str, Any]],
    created: str = "1970-01-01T00:00:00Z",
) -> bytes:
    """An image configuration. `config` is its run part (Env, Labels, Entrypoint, …); one `history` entry a layer."""
    return canonical(
        {
            "architecture": architecture,
            "config": config,
            "created": created,
            "history": list(history),
            "os": "linux",
            "rootfs": {"diff_ids": list(diff_ids), "type": "layers"},
        }
    )


def manifest_bytes(
    config: bytes, layers: Sequence[tuple[str, int]], *, annotations: Mapping[str, str] | None = None
) -> bytes:
    """The manifest of an image whose layers are uncompressed tars: (digest, size) each, bottom first."""
    return canonical(
        {
            **({"annotations": dict(annotations)} if annotations else {}),
            "config": {"digest": digest_of(config), "mediaType": CONFIG_TYPE, "size": len(config)},
            "layers": [{"digest": digest, "mediaType": LAYER_TYPE, "size": size} for digest, size in layers],
            "mediaType": MANIFEST_TYPE,
            "schemaVersion": 2,
        }
    )


def full_name(tag: str) -> str:
    """A tag as containerd names it: with a registry, and with a tag."""
    first, slash, _rest = tag.partition("/")
    named = tag if slash and (first == "localhost" or set(first) & set(".:")) else None
    if named is None:
        named = f"docker.io/{tag}" if slash else f"docker.io/library/{tag}"
    return named if ":" in named.rpartition("/")[2] else f"{named}:latest"


def write_archive(
    target: Path | IO[bytes],
    *,
    config: bytes,
    manifest: bytes,
    layers: Sequence[tuple[str, Path]],
    tag: str | None = None,
    omit: Collection[str] = (),
) -> None:
    """Write the archive to a file or to a stream that need not seek.

    `layers` are (digest, uncompressed tar), bottom first; the bytes of digests in `omit`, which the engine
    already has, are left out.
    """
    with contextlib.ExitStack() as stack:
        stream: Any = stack.enter_context(target.open("wb")) if isinstance(target, Path) else target
        with tarfile.open(fileobj=stream, mode="w|", format=tarfile.GNU_FORMAT) as archive:
            _add_folder(archive, "blobs")
            _add_folder(archive, "blobs/sha256")
            written: set[str] = set(omit)
            for data in (config, manifest):
                _add_bytes(archive, _blob_name(digest_of(data)), data)
            for digest, path in layers:
                if digest not in written:
                    written.add(digest)
                    _add_file(archive, _blob_name(digest), path)
            _add_bytes(archive, "index.json", _index(manifest, tag))
            _add_bytes(archive, "manifest.json", _docker_manifest(config, [digest for digest, _path in layers], tag))
            _add_bytes(archive, "oci-layout", canonical({"imageLayoutVersion": "1.0.0"}))


@dataclass(frozen=True, kw_only=True)
class SavedImage:
    """An image inside an archive: its configuration's bytes as they are, and its layers' members, bottom first."""

    archive: tarfile.TarFile
    config: bytes
    members: tuple[str, ...]

    @property
    def diff_ids(self) -> tuple[str, ...]:
        """Digests of the uncompressed layers."""
        return diff_ids_of(self.config)

    @property
    def manifest_digest(self) -> str | None:
        """As the archive's index has it; None where an engine wrote an archive without one."""
        if "index.json" not in self.archive.getnames():
            return None
        (entry,) = json.loads(_read(self.archive, "index.json"))["manifests"]
        return str(entry["digest"])

    def layer(self, position: int) -> contextlib.AbstractContextManager[IO[bytes]]:
        """The uncompressed tar of one layer."""
        stream = self.archive.extractfile(self._follow(self.members[position]))
        if stream is None:
            raise ImageError(f"the archive has no file {self.members[position]}", hint="save the image again")
        return uncompressed(stream, name=self.members[position])

    def _follow(self, name: str) -> tarfile.TarInfo:
        """`docker save` of older engines writes a repeated layer as a symbolic link."""
        member = self.archive.getmember(name)
        if member.issym():
            return self.archive.getmember(posixpath.normpath(posixpath.join(posixpath.dirname(name), member.linkname)))
        return member


@contextlib.contextmanager
def read_archive(path: Path) -> Iterator[SavedImage]:
    """Open what `docker save`, `write_archive` or an OCI-layout writer wrote; it must hold one image."""
    try:
        with tarfile.open(path, mode="r:") as archive:
            yield _saved(archive)
    except IsADirectoryError as error:
        raise ImageError(f"{path} is a folder, not an image archive", hint=f"tar it: tar -cf F -C {path} .") from error
    except (tarfile.TarError, KeyError, ValueError, IndexError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ImageError(
            f"{path} is not an image archive: {error}", hint="give what `docker save` or `--output` wrote"
        ) from error


def diff_ids_of(config: bytes) -> tuple[str, ...]:
    """Digests of the uncompressed layers that a configuration names."""
    return tuple(json.loads(config)["rootfs"]["diff_ids"])


@contextlib.contextmanager
def uncompressed(stream: IO[bytes], *, name: str) -> Iterator[IO[bytes]]:
    """The stream's content, unpacked when it is gzip."""
    buffered = io.BufferedReader(cast("io.RawIOBase", stream)) if not hasattr(stream, "peek") else stream
    start = cast("io.BufferedReader", buffered).peek(4)[:4]
    if start.startswith(_ZSTD):
        raise ImageError(f"{name} is compressed with zstd", hint="push the base with gzip or uncompressed layers")
    if not start.startswith(_GZIP):
        yield buffered
        return
    with gzip.GzipFile(fileobj=buffered, mode="rb") as plain:
        yield cast("IO[bytes]", plain)


def chunks(stream: IO[bytes]) -> Iterator[bytes]:
    """A stream in pieces."""
    while chunk := stream.read(CHUNK_BYTES):
        yield chunk


def _saved(archive: tarfile.TarFile) -> SavedImage:
    names = {member.name for member in archive.getmembers()}
    try:
        return _from_docker(archive) if "manifest.json" in names else _from_layout(archive)
    except (TypeError, AttributeError, RecursionError) as error:
        raise ValueError("its manifest is not that of an image") from error


def _from_docker(archive: tarfile.TarFile) -> SavedImage:
    entries = json.loads(_read(archive, "manifest.json"))
    if len(entries) != 1:
        raise ImageError(f"the archive holds {len(entries)} images", hint="save one image by its tag or id")
    return SavedImage(archive=archive, config=_read(archive, entries[0]["Config"]), members=tuple(entries[0]["Layers"]))


def _from_layout(archive: tarfile.TarFile) -> SavedImage:
    document = json.loads(_read(archive, "index.json"))
    for _ in range(_MOST_INDEXES):
        if "manifests" not in document:
            break
        platforms = [entry for entry in document["manifests"] if not _is_attestation(entry)]
        if len(platforms) != 1:
            raise ImageError(f"the archive holds {len(platforms)} images", hint="save one image for one platform")
        document = json.loads(_read(archive, _blob_name(platforms[0]["digest"])))
    return SavedImage(
        archive=archive,
        config=_read(archive, _blob_name(document["config"]["digest"])),
        members=tuple(_blob_name(layer["digest"]) for layer in document["layers"]),
    )


def _is_attestation(entry: dict[str, Any]) -> bool:
    """BuildKit adds provenance beside the image as a manifest for no platform."""
    return "vnd.docker.reference.type" in entry.get("annotations", {})


def _read(archive: tarfile.TarFile, name: str) -> bytes:
    member = archive.getmember(name)
    stream = archive.extractfile(member)
    if stream is None or member.size > _LARGEST_DOCUMENT_BYTES:
        raise ValueError(f"{name} is no document of {_LARGEST_DOCUMENT_BYTES >> 20} MiB or less")
    return stream.read()


def _blob_name(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/")


def _index(manifest: bytes, tag: str | None) -> bytes:
    entry: dict[str, Any] = {"digest": digest_of(manifest), "mediaType": MANIFEST_TYPE, "size": len(manifest)}
    if tag:
        name = full_name(tag)
        entry["annotations"] = {
            "io.containerd.image.name": name,
            "org.opencontainers.image.ref.name": name.rpartition(":")[2],
        }
    return canonical({"manifests": [entry], "mediaType": INDEX_TYPE, "schemaVersion": 2})


def _docker_manifest(config: bytes, digests: Sequence[str], tag: str | None) -> bytes:
    entry = {
        "Config": _blob_name(digest_of(config)),
        "Layers": [_blob_name(digest) for digest in digests],
        "RepoTags": [tag] if tag else None,
    }
    return canonical([entry])


def _add_folder(archive: tarfile.TarFile, name: str) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.mode = tarfile.DIRTYPE, 0o755
    archive.addfile(info)


def _add_bytes(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o444
    archive.addfile(info, io.BytesIO(data))


def _add_file(archive: tarfile.TarFile, name: str, path: Path) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = path.stat().st_size, 0o444
    with path.open("rb") as stream:
        archive.addfile(info, stream)
