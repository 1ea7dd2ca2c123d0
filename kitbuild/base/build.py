"""Build the base of a CUDA target from its Dockerfile: done rarely, its result is shared by digest."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections import deque
from typing import TYPE_CHECKING, Any

from kitbuild.base import bases, engine, facts
from kitbuild.base.targets import Target, dockerfile_path, load_target
from kitbuild.errors import ImageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import docker

    from kitbuild.base.models import LockedBase
    from kitbuild.progress import Progress
    from kitbuild.store import Store

_LAST_LINES = 12


def build(
    target: str,
    *,
    client: docker.DockerClient,
    store: Store,
    progress: Progress,
    upstream: str | None = None,
    network: str | None = None,
) -> LockedBase:
    """Build `Dockerfile.<target>`, take the result into the store under its default name.

    `upstream` replaces the Dockerfile's BASE; `network` is the build's (`none` where nothing is installed).
    """
    chosen = load_target(target)
    dockerfile = dockerfile_path(chosen).read_bytes()
    upstream_name = upstream or default_upstream(dockerfile)
    with store.making(f"build {target}"):
        progress.note(f"building {chosen.base} from {chosen.dockerfile} on {upstream_name}")
        digest = _pull_upstream(client, upstream_name, progress)
        labels = {
            "org.kitbuild.base.target": target,
            facts.LABEL_DOCKERFILE: hashlib.sha256(dockerfile).hexdigest(),
            facts.LABEL_UPSTREAM: upstream_name.partition("@")[0],
        } | ({facts.LABEL_UPSTREAM_DIGEST: digest} if digest else {})
        _docker_build(client, chosen, dockerfile, base=upstream_name, labels=labels, network=network, progress=progress)
        image = engine.find_image(client, chosen.base)
        if image is None:
            raise ImageError(f"the engine built {chosen.base} and does not show it", hint="see the engine's log")
        base = engine.import_base(client, image, name=chosen.base, store=store, progress=progress)
    bases.remember_name(store, base, definition=definition(chosen))
    progress.note(f"base {base.name} @ {base.manifest_digest} (built from {chosen.dockerfile})")
    return base


def definition(target: Target) -> str:
    """What the default base of a built target is made from: the digest of its Dockerfile."""
    return hashlib.sha256(dockerfile_path(target).read_bytes()).hexdigest()


def default_upstream(dockerfile: bytes) -> str:
    """The default of the BASE argument."""
    for line in dockerfile.decode().splitlines():
        if line.startswith("ARG BASE="):
            return line.removeprefix("ARG BASE=").strip()
    raise ImageError("the Dockerfile has no `ARG BASE=`", hint="install kitbuild again")


def _pull_upstream(client: docker.DockerClient, name: str, progress: Progress) -> str | None:
    """Make sure the engine has the image; the digest that it is known by: the registry's, else its id."""
    image = engine.find_image(client, name)
    if image is None:
        with (
            engine.engine_errors(f"pull {name}"),
            progress.activity(f"pull {name}", total=None, unit="steps") as advance,
        ):
            error = engine.last_error(client.api.pull(name, stream=True, decode=True), lambda _event: advance(1))
        if error:
            raise ImageError(f"the engine could not pull {name}: {error}", hint="check the name and network")
        image = engine.find_image(client, name)
    origin = engine.origin_of(image) if image else None
    return origin.digest if origin else image.id if image else None


def _docker_build(
    client: docker.DockerClient,
    target: Target,
    dockerfile: bytes,
    *,
    base: str,
    labels: dict[str, str],
    network: str | None,
    progress: Progress,
) -> None:
    last: deque[str] = deque(maxlen=_LAST_LINES)
    with (
        engine.engine_errors(f"build {target.dockerfile}"),
        progress.activity(f"build {target.dockerfile}", total=None, unit="steps") as advance,
    ):
        events = client.api.build(
            fileobj=_context(dockerfile),
            custom_context=True,
            tag=target.base,
            buildargs={"BASE": base},
            labels=labels,
            network_mode=network,
            rm=True,
            forcerm=True,
            decode=True,
        )

        def seen(event: Mapping[str, Any]) -> None:
            for line in _lines(event):
                last.append(line)
                progress.note(f"build: {line}")
                advance(1)

        error = engine.last_error(events, seen)
    if error:
        raise ImageError(
            f"building {target.dockerfile} failed: {error}\n" + "\n".join(last),
            hint="the lines above are the build's last; it needs the network, or a BASE that has everything",
        )


def _lines(event: Mapping[str, Any]) -> list[str]:
    return [line for line in event.get("stream", "").splitlines() if line.strip()]


def _context(dockerfile: bytes) -> io.BytesIO:
    """A build context of nothing but the Dockerfile."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        info = tarfile.TarInfo("Dockerfile")
        info.size = len(dockerfile)
        archive.addfile(info, io.BytesIO(dockerfile))
    packed.seek(0)
    return packed
