"""Step 3, asked from outside: what an image says of itself, wherever it is. Runs nothing, and loads nothing.

An engine, an archive that `--output` wrote, or a registry, of which only the topmost layer is fetched. Each document
is compared with the digest that content.json has of it, and that with the image's label.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import tarfile
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

from kitbuild.base import oci
from kitbuild.base.reference import Reference
from kitbuild.base.registry import Registry
from kitbuild.errors import ImageError, UsageError, VerificationError
from kitbuild.image.config import CONTENT_LABEL, LOCK_LABEL
from kitbuild.image.content import CONTENT
from kitbuild.image.engine import engine_errors
from kitbuild.image.inspect import read_files
from kitbuild.image.provenance import PROVENANCE
from kitbuild.image.sbom import SBOM

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from docker import DockerClient

    from kitbuild.progress import Progress
    from kitbuild.store import Store

DOCUMENTS: Mapping[str, str] = {
    "lock": "/kit/lock.json",
    "recipe": "/kit/recipe.yaml",
    "sbom": SBOM,
    "provenance": PROVENANCE,
    "content": CONTENT,
}
"""Short name to path in the image."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """What an image says of itself, verified. `manifest_digest` is None where an engine does not keep it."""

    reference: str
    place: str
    config_digest: str
    manifest_digest: str | None
    labels: Mapping[str, str]
    layers: tuple[tuple[str, str], ...]
    """(name, digest), bottom first."""
    documents: Mapping[str, bytes] = field(repr=False)


def from_engine(client: DockerClient, reference: str) -> Told | None:
    """An engine's image, by tag or id; None where the engine has none of that name."""
    import docker.errors  # noqa: PLC0415 - a third of a second

    with engine_errors(f"inspect {reference}"):
        try:
            image = client.images.get(reference)
        except (docker.errors.ImageNotFound, docker.errors.NullResource):
            return None
        attributes: dict[str, Any] = image.attrs
        digests = (attributes.get("RootFS") or {}).get("Layers") or []
        found = read_files(client, str(image.id), tuple(DOCUMENTS.values())) if CONTENT_LABEL in image.labels else {}
        entries = client.api.history(str(image.id))  # type: ignore[no-untyped-call]
        history = [entry.get("CreatedBy") or "" for entry in reversed(entries)]
    return _told(
        reference=reference,
        place="engine",
        config_digest=str(image.id),
        manifest_digest=None,
        labels=image.labels,
        layers=_named(digests, history),
        files=found,
    )


def from_archive(path: Path) -> Told:
    """An archive that `kitbuild image --output` wrote."""
    with oci.read_archive(path) as saved:
        document, manifest = _config(saved.config, str(path)), saved.manifest_digest
        with saved.layer(len(saved.members) - 1) as stream:
            found = _files(stream)
    return _of_config(document, saved.config, found, reference=str(path), place="archive", manifest=manifest)


def from_registry(reference: str, *, store: Store, environ: Mapping[str, str], progress: Progress) -> Told:
    """An image in a registry, by tag or digest."""
    parsed = Reference.parse(reference)
    registry = Registry(parsed, environ=environ, failure=ImageError)
    remote = registry.image(architecture="amd64")
    if remote is None:
        raise ImageError(f"{reference} is neither in the engine nor in the registry {parsed.host}")
    with store.scratch() as folder, registry.layer(remote.layers[-1], folder=folder, progress=progress) as stream:
        found = _files(stream)
    document = _config(remote.config, reference)
    return _of_config(document, remote.config, found, reference=reference, place="registry", manifest=remote.digest)


def _config(data: bytes, reference: str) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(data)
        tuple(document["rootfs"]["diff_ids"])
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ImageError(
            f"{reference}: its configuration is not that of an image", hint="build or push the image again"
        ) from error
    return document


def _of_config(
    document: dict[str, Any],
    config: bytes,
    found: dict[str, bytes],
    *,
    reference: str,
    place: str,
    manifest: str | None,
) -> Told:
    history = [entry.get("created_by", "") for entry in document.get("history") or []]
    return _told(
        reference=reference,
        place=place,
        config_digest=oci.digest_of(config),
        manifest_digest=manifest,
        labels=(document.get("config") or {}).get("Labels") or {},
        layers=_named(document["rootfs"]["diff_ids"], history),
        files=found,
    )


def _named(digests: list[str], history: list[str]) -> tuple[tuple[str, str], ...]:
    names = [words.rpartition(" ")[2] for words in history]
    return tuple(zip(names if len(names) == len(digests) else [""] * len(digests), digests, strict=True))


def _files(stream: IO[bytes]) -> dict[str, bytes]:
    """The documents that a layer holds, by path."""
    wanted, found = frozenset(DOCUMENTS.values()), {}
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            path = "/" + posixpath.normpath(member.name).lstrip("/")
            if path in wanted and (content := archive.extractfile(member)):
                found[path] = content.read()
    return found


def _told(*, reference: str, files: Mapping[str, bytes], labels: Mapping[str, str], **facts: Any) -> Told:
    """The documents, once each is what the image's labels say, by way of content.json."""
    label = labels.get(CONTENT_LABEL)
    if label is None:
        raise UsageError(
            f"{reference} is no image of kitbuild: it has no label {CONTENT_LABEL}",
            hint="name one that `kitbuild image` built",
        )
    for path in DOCUMENTS.values():
        if path not in files:
            raise VerificationError(f"{reference} has no {path}", hint="build the image again")
    digests = {path: hashlib.sha256(data).hexdigest() for path, data in files.items()}
    expected: dict[str, str | None] = {CONTENT: label}
    if digests[CONTENT] == label:
        listed = json.loads(files[CONTENT])["files"]
        expected |= {path: listed.get(path) for path in DOCUMENTS.values() if path != CONTENT}
        expected[DOCUMENTS["lock"]] = labels.get(LOCK_LABEL)
    for path, wanted in expected.items():
        if digests[path] != wanted:
            raise VerificationError(f"{reference}: {path} has sha256 {digests[path]}, the image says {wanted}")
    documents = {name: files[path] for name, path in DOCUMENTS.items()}
    return Told(reference=reference, labels=labels, documents=documents, **facts)
