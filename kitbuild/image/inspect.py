"""Step 3, asked from outside: whether the image that an engine holds is the one that its label and a lock say."""

from __future__ import annotations

import hashlib
import tarfile
from typing import TYPE_CHECKING

import docker.errors

from kitbuild.errors import ImageError, VerificationError
from kitbuild.image.compilers import ChunkStream
from kitbuild.image.config import CONTENT_LABEL
from kitbuild.image.content import CONTENT
from kitbuild.image.engine import engine_errors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from docker import DockerClient
    from docker.models.containers import Container


def verify_image(client: DockerClient, engine_id: str, *, expected: str | None = None) -> str:
    """The sha256 of the image's content.json, after comparing it with the label and with `expected`. Runs nothing."""
    with engine_errors(f"inspect {engine_id}"):
        try:
            labels = client.images.get(engine_id).labels
        except docker.errors.ImageNotFound as error:
            raise ImageError(f"the engine has no image {engine_id}", hint="run `kitbuild image RECIPE`") from error
        label = labels.get(CONTENT_LABEL)
        if label is None:
            raise VerificationError(f"{engine_id} has no label {CONTENT_LABEL}: kitbuild did not make it")
        found = hashlib.sha256(read_files(client, engine_id, (CONTENT,))[CONTENT]).hexdigest()
    for name, wanted in (("its label", label), ("the lock's image", expected)):
        if wanted is not None and wanted != found:
            raise VerificationError(f"{engine_id}: {CONTENT} has sha256 {found}, {name} says {wanted}")
    return found


def read_files(client: DockerClient, engine_id: str, paths: Sequence[str]) -> dict[str, bytes]:
    """Files of an image by path, through a container that is never started."""
    container = client.containers.create(engine_id, ["info"], network_mode="none")
    try:
        return {path: _read(container, engine_id, path) for path in paths}
    finally:
        container.remove(force=True, v=True)


def _read(container: Container, engine_id: str, path: str) -> bytes:
    try:
        chunks, _ = container.get_archive(path)
    except docker.errors.NotFound as error:
        raise VerificationError(f"{engine_id} has no {path}") from error
    with tarfile.open(fileobj=ChunkStream(chunks), mode="r|") as archive:
        for member in archive:
            stream = archive.extractfile(member)
            if stream is not None:
                return stream.read()
    raise VerificationError(f"{engine_id}: {path} is no file")
