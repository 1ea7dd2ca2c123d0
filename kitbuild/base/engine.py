"""Bases in a container engine: find one there, bring one into the store."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

import docker
import docker.errors
import requests

from kitbuild.base import bases, oci
from kitbuild.base.models import Upstream
from kitbuild.errors import ImageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from docker.models.images import Image

    from kitbuild.base.models import LockedBase
    from kitbuild.progress import Progress
    from kitbuild.store import Store


def find_image(client: docker.DockerClient, reference: str) -> Image | None:
    """The engine's image of this name or id, or None."""
    with engine_errors(f"look up {reference}"):
        try:
            return client.images.get(reference)
        except (docker.errors.ImageNotFound, docker.errors.NullResource):
            return None


def import_base(
    client: docker.DockerClient, image: Image, *, name: str, store: Store, progress: Progress
) -> LockedBase:
    """Save an image from the engine into the store as a base called `name`."""
    with store.scratch() as folder:
        saved_path = folder / "saved.tar"
        total = image.attrs.get("Size")
        with (
            engine_errors(f"save {name}"),
            saved_path.open("wb") as out,
            progress.activity(f"take {name} from the engine", total=total, unit="bytes") as advance,
        ):
            for chunk in client.api.get_image(str(image.id), chunk_size=oci.CHUNK_BYTES):
                out.write(chunk)
                advance(len(chunk))
        with oci.read_archive(saved_path) as saved:
            return bases.add(
                store,
                name=name,
                config=saved.config,
                openers=[partial(saved.layer, position) for position in range(len(saved.members))],
                progress=progress,
                origin=origin_of(image),
            )


def origin_of(image: Image) -> Upstream | None:
    """The registry digest that the engine pulled the image by, as something to be found by again."""
    for entry in image.attrs.get("RepoDigests") or ():
        name, _at, digest = entry.partition("@")
        if digest.startswith("sha256:"):
            return Upstream(name=name, digest=digest)
    return None


def last_error(events: Iterable[Mapping[str, Any]], seen: Callable[[Mapping[str, Any]], None] | None = None) -> str:
    """Read what an engine reports to its end, which also frees the connection; the error in it, or nothing."""
    error = ""
    for event in events:
        if seen is not None:
            seen(event)
        error = str(event.get("error") or error).strip()
    return error


@contextlib.contextmanager
def engine_errors(doing: str) -> Iterator[None]:
    """An engine that fails or goes away is exit 5 and says at what."""
    try:
        yield
    except docker.errors.APIError as error:
        raise ImageError(f"the engine could not {doing}: {error.explanation}", hint="see the engine's log") from error
    except (docker.errors.DockerException, requests.RequestException) as error:
        raise ImageError(
            f"the engine went away while asked to {doing}: {error}", hint="start it again; `docker info` must answer"
        ) from error
