"""Step 3: the two Pythons that compile: the base's, in a container without network, and the host's."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from kitbuild.errors import ImageError
from kitbuild.image.engine import engine_errors
from kitbuild.image.load import load_base

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from docker import DockerClient
    from docker.models.containers import Container

    from kitbuild.base.models import LockedBase
    from kitbuild.progress import Progress
    from kitbuild.store import Store

WORKERS = max(2, min(8, os.cpu_count() or 2))
"""How many things are done at once; no byte depends on it."""
_FOLDER = "kitbuild-compile"


@dataclass(frozen=True)
class HostCompiler:
    """A Python on this machine, for the local engine."""

    python: Path

    @cached_property
    def key(self) -> str:
        """Version, build and bytecode magic."""
        code = "import sys, importlib.util as u; print(sys.version, u.MAGIC_NUMBER.hex())"
        return subprocess.run([self.python, "-ISc", code], check=True, capture_output=True, text=True).stdout.strip()

    def __call__(self, work: Path, *, advance: Callable[[int], None]) -> None:
        """Compile in place."""
        command = [str(self.python), str(work / "pyc_driver.py"), str(work), str(WORKERS)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout or ():
                advance(int(line))
        if process.returncode:
            raise ImageError(f"{self.python} could not compile the modules (exit {process.returncode})")


@dataclass(frozen=True)
class ContainerCompiler:
    """The base's Python, in a container that gets the sources and gives the .pyc as archives: no mount.

    `client` and `image` (the engine's id of the base) are called when there is something to compile, not before.
    """

    client: Callable[[], DockerClient]
    image: Callable[[], str]
    interpreter: str
    key: str

    def __call__(self, work: Path, *, advance: Callable[[int], None]) -> None:
        """Compile in a container and fetch `work/out`."""
        command = [f"/{_FOLDER}/pyc_driver.py", f"/{_FOLDER}", str(WORKERS)]
        with engine_errors("compile modules in the base"):
            container: Container = self.client().containers.create(
                self.image(), command, entrypoint=[self.interpreter], network_mode="none", user="0:0", working_dir="/"
            )
            try:
                self._run(container, work, advance)
            finally:
                container.remove(force=True, v=True)

    def _run(self, container: Container, work: Path, advance: Callable[[int], None]) -> None:
        with (work / "in.tar").open("w+b") as stream:
            _pack(work, stream)
            stream.seek(0)
            container.put_archive("/", stream)
        container.start()
        for index in _lines(container.logs(stream=True, follow=True, stdout=True, stderr=False)):
            advance(index)
        status = container.wait()["StatusCode"]
        if status:
            text = container.logs(stdout=False, stderr=True, tail=20).decode(errors="replace").strip()
            raise ImageError(f"the base's {self.interpreter} could not compile the modules (exit {status}): {text}")
        (work / "in.tar").unlink()
        chunks, _ = container.get_archive(f"/{_FOLDER}/out")
        with tarfile.open(fileobj=ChunkStream(chunks), mode="r|") as archive:
            unpack_files(archive, work)


def unpack_files(archive: tarfile.TarFile, folder: Path) -> None:
    """Regular files, below `folder` only (`extractall` has no filter before Python 3.11.4; Debian 12 has 3.11.2)."""
    for member in archive:
        name = PurePosixPath(member.name)
        if not member.isfile():
            continue
        if name.is_absolute() or ".." in name.parts:
            raise ImageError(f"the compiler's container gave a file outside its folder: {member.name}")
        stream = archive.extractfile(member)
        assert stream is not None, "a regular file has bytes"  # noqa: S101 - for us
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            shutil.copyfileobj(stream, file)


def _pack(work: Path, stream: Any) -> None:
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name in ("jobs.json", "pyc_driver.py", "src"):
            archive.add(work / name, f"{_FOLDER}/{name}", filter=_rooted)


def _rooted(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


def _lines(chunks: Any) -> Iterator[int]:
    text = b""
    for chunk in chunks:
        text += chunk
        *lines, text = text.split(b"\n")
        yield from (int(line) for line in lines if line.strip().isdigit())


def base_compiler(
    locked: LockedBase, client: DockerClient | Callable[[], DockerClient], *, store: Store, progress: Progress
) -> ContainerCompiler:
    """The locked base's Python; only where there is something to compile is the engine needed, and given the base."""
    engine = client if callable(client) else lambda: client
    return ContainerCompiler(
        client=engine,
        image=lambda: load_base(locked, engine(), store=store, progress=progress),
        interpreter=locked.interpreter,
        key=locked.config_digest,
    )


class ChunkStream(io.RawIOBase):
    """A file of an iterator of chunks."""

    def __init__(self, chunks: Any) -> None:
        self._chunks = iter(chunks)
        self._rest = b""

    def readable(self) -> bool:
        """Yes."""
        return True

    def readinto(self, buffer: Any) -> int:
        """The next piece, as `io.RawIOBase` has it."""
        if not self._rest:
            self._rest = next(self._chunks, b"")
        part, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)
