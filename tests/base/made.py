"""Small bases made by hand, and what tests talk to in place of engines and registries."""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
from functools import partial
from typing import TYPE_CHECKING, Any

from kitbuild.base import bases, oci
from kitbuild.progress import Silent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from kitbuild.base.models import LockedBase
    from kitbuild.store import Store

STATUS = (
    "Package: libc6\nStatus: install ok installed\nArchitecture: amd64\nVersion: 2.36-9+deb12u10\n"
    "Description: words\n more: words\n\n"
    "Package: python3.11-minimal\nStatus: install ok installed\nArchitecture: amd64\nVersion: 3.11.2-6+deb12u6\n\n"
    "Package: gone\nStatus: deinstall ok config-files\nArchitecture: all\nVersion: 1\n"
)
DEBIAN = {
    "./var/lib/dpkg/status": STATUS,
    "./usr/bin/python3.11": "ELF",
    "./usr/bin/python3": "->python3.11",
}


def layer(files: dict[str, str]) -> bytes:
    """A tar of files by path; `->x` is a symbolic link to x."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            if text.startswith("->"):
                info.type, info.linkname = tarfile.SYMTYPE, text[2:]
                archive.addfile(info)
            else:
                info.size = len(text)
                archive.addfile(info, io.BytesIO(text.encode()))
    return packed.getvalue()


def config(layers: Sequence[bytes], **changes: Any) -> bytes:
    """The configuration of an image of these layers."""
    run = {"Env": changes.get("env", []), "Labels": changes.get("labels", {})}
    return oci.config_bytes(
        architecture=changes.get("architecture", "amd64"),
        diff_ids=[oci.digest_of(data) for data in layers],
        config=run,
        history=[{} for _ in layers],
    )


def write(folder: Path, layers: Sequence[bytes]) -> list[Path]:
    """Layers as files."""
    paths = [folder / f"layer{position}" for position in range(len(layers))]
    for path, data in zip(paths, layers, strict=True):
        path.write_bytes(data)
    return paths


@contextlib.contextmanager
def opened(data: bytes) -> Iterator[io.BytesIO]:
    """Bytes as `bases.add` opens a layer."""
    yield io.BytesIO(data)


def add(store: Store, name: str = "kitbuild/base-cpu", *, mark: str = "1") -> LockedBase:
    """A small base in the store; another `mark`, another base."""
    layers = [layer(DEBIAN), layer({"etc/mark": mark})]
    return bases.add(
        store,
        name=name,
        config=config(layers),
        openers=[partial(opened, data) for data in layers],
        progress=Silent(),
    )


class Notes(Silent):
    """Remembers what was noted."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, message: str) -> None:
        self.lines.append(message)


class FakeEngine:
    """As much of the Docker SDK as bases need: images by name, saved as the classic store does."""

    def __init__(self, images: dict[str, tuple[bytes, Sequence[bytes]]] | None = None) -> None:
        self.images = self
        self.api = self
        self._held = images or {}
        self.repo_digests: list[str] = []

    def get(self, name: str) -> Any:
        import docker.errors  # noqa: PLC0415 - only where an engine is pretended

        for tag, (configuration, _layers) in self._held.items():
            if name in {tag, oci.digest_of(configuration)}:
                return FakeImage(oci.digest_of(configuration), self.repo_digests)
        raise docker.errors.ImageNotFound(name)

    def get_image(self, image_id: str, chunk_size: int) -> Iterator[bytes]:
        assert chunk_size > 0
        (made,) = [value for value in self._held.values() if oci.digest_of(value[0]) == image_id]
        yield saved(*made)


class FakeImage:
    """The engine's idea of an image."""

    def __init__(self, image_id: str, repo_digests: list[str]) -> None:
        self.id = image_id
        self.attrs = {"Size": 1, "RepoDigests": repo_digests}


def saved(configuration: bytes, layers: Sequence[bytes]) -> bytes:
    """What `docker save` of a 20.10 writes."""
    members = {"c.json": configuration} | {f"{n}/layer.tar": data for n, data in enumerate(layers)}
    listed = [{"Config": "c.json", "Layers": [f"{n}/layer.tar" for n in range(len(layers))], "RepoTags": None}]
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, data in (members | {"manifest.json": json.dumps(listed).encode()}).items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return packed.getvalue()


def raising(error: Exception) -> Callable[[], Any]:
    """A client factory that fails."""

    def factory() -> Any:
        raise error

    return factory
