"""Step 3: an assembled image into an engine, sending only the layers that it lacks."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import IO, TYPE_CHECKING, Any, cast

import docker.errors
import requests.exceptions

from kitbuild.base.oci import CHUNK_BYTES, write_archive
from kitbuild.errors import ImageError
from kitbuild.image.config import image_manifest
from kitbuild.image.engine import engine_error, engine_errors
from kitbuild.image.models import Base, Image, Loaded, refuse_damaged

if TYPE_CHECKING:
    from collections.abc import Iterator

    from docker import DockerClient

    from kitbuild.base.models import LockedBase
    from kitbuild.progress import Progress
    from kitbuild.store import Store

_KIND = "loaded"
_FAILURES = (docker.errors.DockerException, requests.exceptions.RequestException, ImageError)


def load(image: Image, client: DockerClient, *, store: Store, progress: Progress) -> Loaded:
    """Have the engine hold the image under its tag, and prove that it is ours by the engine's own id of it."""
    with engine_errors("be asked what it holds"):
        containerd = uses_containerd(client)
        expected = image.manifest_digest if containerd else image.config_digest
        if _has(client, expected):
            _tag(client, expected, image.tag)
            return Loaded(engine_id=expected, reused=tuple(layer.digest for layer in image.layers), sent_bytes=0)
        omit = _sent_before(client, image, store) if containerd else _held(client, image)
    sent = _send(image, client, omit, expected, containerd=containerd, progress=progress)
    if sent is None:
        progress.note("the engine no longer has a layer that it had; sending all of them")
        omit = frozenset()
        sent = _send(image, client, omit, expected, containerd=containerd, progress=progress)
    with engine_errors(f"name the image {image.tag}"):
        _tag(client, expected, image.tag)
    if containerd:
        store.write_record(_KIND, image.config_digest.removeprefix("sha256:"), _sent_record(client, image))
    return Loaded(
        engine_id=expected,
        reused=tuple(layer.digest for layer in image.layers if layer.digest in omit),
        sent_bytes=sent or 0,
    )


def load_base(
    locked: LockedBase, client: DockerClient, *, store: Store, progress: Progress, tag: str | None = None
) -> str:
    """The engine's id of the base alone, so that its own Python can compile."""
    base = Base.stored(locked, store)
    image = Image(
        config=base.config,
        manifest=image_manifest(base.config, base.layers),
        layers=base.layers,
        tag=tag or f"kitbuild/base:{base.config_digest.removeprefix('sha256:')[:12]}",
    )
    return load(image, client, store=store, progress=progress).engine_id


def uses_containerd(client: DockerClient) -> bool:
    """Whether the engine keeps images in containerd's content store and names them by their manifest."""
    return "io.containerd.snapshotter.v1" in str(client.info().get("DriverStatus"))


def _has(client: DockerClient, engine_id: str) -> bool:
    try:
        return _bare(client.images.get(engine_id).id or "") == _bare(engine_id)
    except docker.errors.ImageNotFound:
        return False


def _bare(digest: str) -> str:
    return digest.removeprefix("sha256:")


def _tag(client: DockerClient, engine_id: str, tag: str) -> None:
    repository, _, version = tag.rpartition(":")
    client.images.get(engine_id).tag(repository, version)


def _held(client: DockerClient, image: Image) -> frozenset[str]:
    """The classic store knows a layer by the chain of all below it: the longest prefix any of its images has."""
    ours = [layer.digest for layer in image.layers]
    longest = 0
    for summary in client.api.images(all=True):
        with contextlib.suppress(docker.errors.APIError):
            theirs = (client.images.get(summary["Id"]).attrs.get("RootFS") or {}).get("Layers") or []
            common = next((n for n, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
            longest = max(longest, min(len(ours), len(theirs)) if common is None else common)
    return frozenset(ours[:longest]) - frozenset(ours[longest:])


def _sent_before(client: DockerClient, image: Image, store: Store) -> frozenset[str]:
    """What we sent: containerd takes an archive that lacks a blob without a word, and fails later."""
    engine = client.info().get("ID")
    ours = {layer.digest for layer in image.layers}
    kept: set[str] = set()
    for record in store.records(_KIND).values():
        if record["engine"] == engine and ours & set(record["layers"]) and _has(client, record["manifest_digest"]):
            kept |= ours & set(record["layers"])
    return frozenset(kept)


def _sent_record(client: DockerClient, image: Image) -> dict[str, Any]:
    return {
        "engine": client.info().get("ID"),
        "manifest_digest": image.manifest_digest,
        "layers": [layer.digest for layer in image.layers],
    }


def _send(
    image: Image,
    client: DockerClient,
    omit: frozenset[str],
    expected: str,
    *,
    containerd: bool,
    progress: Progress,
) -> int | None:
    """Bytes sent, or None where leaving layers out did not work."""
    try:
        with engine_errors("load the image"):
            sent = _post(image, client, omit, progress)
            _check(client, expected, image, complete=containerd and bool(omit))
    except _FAILURES:
        if omit:
            return None
        refuse_damaged(image.layers)
        raise
    return sent


def _post(image: Image, client: DockerClient, omit: frozenset[str], progress: Progress) -> int:
    size = sum({layer.digest: layer.size for layer in image.layers if layer.digest not in omit}.values())
    sent = 0

    def counted() -> Iterator[bytes]:
        nonlocal sent
        for chunk in archive_chunks(image, omit):
            sent += len(chunk)
            advance(len(chunk))
            yield chunk

    with progress.activity(f"loading {image.tag} into the engine", total=size, unit="bytes") as advance:
        answers: Any = client.api.load_image(counted(), quiet=True)  # type: ignore[no-untyped-call]
        for answer in answers or ():
            trouble = answer.get("error") or answer.get("message")
            if trouble:
                raise engine_error("load the image", str(trouble))
    return sent


def archive_chunks(image: Image, omit: frozenset[str]) -> Iterator[bytes]:
    """The archive as it is written, through a pipe: no copy on disk."""
    reading, writing = os.pipe()
    failed: list[BaseException] = []

    def write() -> None:
        try:
            with os.fdopen(writing, "wb") as stream:
                write_archive(
                    cast("IO[bytes]", stream),
                    config=image.config,
                    manifest=image.manifest,
                    layers=[(layer.digest, layer.path) for layer in image.layers],
                    tag=image.tag,
                    omit=omit,
                )
        except BrokenPipeError:
            return  # the reader stopped; it says why
        except BaseException as error:  # noqa: BLE001 - raised where the chunks are read
            failed.append(error)

    thread = threading.Thread(target=write, daemon=True)
    with os.fdopen(reading, "rb", buffering=CHUNK_BYTES) as stream:
        thread.start()
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk
    thread.join()
    if failed:
        raise ImageError(f"a layer cannot be read: {failed[0]}") from failed[0]


def _check(client: DockerClient, expected: str, image: Image, *, complete: bool) -> None:
    if not _has(client, expected):
        raise ImageError(
            f"the engine loaded {image.tag} but does not know it as {expected}",
            hint="its image store changes what it is given; use Docker 20.10 or newer",
        )
    if complete:  # making a container unpacks what the image says it has
        client.api.remove_container(client.api.create_container(expected, command=["info"])["Id"], v=True)
