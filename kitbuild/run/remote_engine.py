"""Step 4, with an engine on another machine: it has none of our directories, so everything goes through its API.

Inputs are copied into a volume of the container before it starts, the run directory is copied out when it ends.
"""

from __future__ import annotations

import contextlib
import shutil
import tarfile
import time
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import docker.errors
import requests.exceptions

from kitbuild.errors import RunError
from kitbuild.guest_files import GUEST_UID
from kitbuild.image.compilers import ChunkStream
from kitbuild.run.docker_engine import ENDED, ContainerProcess, create, keep_log, start
from kitbuild.run.follow import Stop, follow, followed, raise_for, read_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from docker import DockerClient
    from docker.models.containers import Container

    from kitbuild.progress import Progress
    from kitbuild.run.container import ContainerSpec

OUT = PurePosixPath("/out")
LABEL = "org.kitbuild.remote-run"
"""Not that of a run here: whoever cleans up after another machine's kitbuild would take its results away."""
POLL_SECONDS = 1.0
STATUS_SECONDS = 2.0
_CHUNK_BYTES = 1 << 20
_BLOCK_BYTES = tarfile.BLOCKSIZE
_LOCAL = frozenset({"http+docker://localhost", "http+docker://localnpipe"})
_FAILURES = (docker.errors.DockerException, requests.exceptions.RequestException)


def is_remote(client: DockerClient) -> bool:
    """Whether the engine is reached by TCP or SSH: nobody can tell whether a path there is the same file as here."""
    return client.api.base_url not in _LOCAL


class RemoteProcess(ContainerProcess):
    """A container far away as `follow` sees it: asked less often, and its status brought here."""

    def __init__(self, container: Container, run_dir: Path) -> None:
        super().__init__(container)
        self._run_dir = run_dir
        self._asked = self._status = float("-inf")

    def exit_code(self) -> int | None:
        """None while it runs."""
        now = time.monotonic()
        if now - self._asked < POLL_SECONDS:
            return None
        self._asked = now
        if now - self._status >= STATUS_SECONDS:
            self._status = now
            # With its lock, a run directory is known as a run, should this process be killed.
            wanted = ["status.json", *([] if (self._run_dir / "lock.json").exists() else ["lock.json"])]
            for name in wanted:
                with contextlib.suppress(*_FAILURES, OSError):  # not written yet
                    fetch(self._container, OUT / name, self._run_dir)
        return super().exit_code()


def run_remote(
    spec: ContainerSpec, run_dir: Path, *, client: DockerClient, progress: Progress, stop: Stop, resume: bool
) -> None:
    """Copy in, start, follow to the end, copy out, remove. Raises what the guest says went wrong."""
    with followed(run_dir):
        if _collect_old(spec.name, run_dir, client) and read_json(run_dir / "exit.json").get("exit_code") == 0:
            progress.note("the run has finished there meanwhile")
            return
        volumes = sorted({str(OUT), *("/inputs" for mount in spec.mounts if mount.container != OUT)})
        container = create(
            replace(spec, mounts=(), user=f"{GUEST_UID}:{GUEST_UID}", volumes=tuple(volumes)),
            {LABEL: run_dir.name},
            client,
        )
        try:
            _send_all(container, spec, run_dir, progress=progress, resume=resume)
            start(container)
            process = RemoteProcess(container, run_dir)
            try:
                code = follow(process, run_dir, progress=progress, stop=stop)
            finally:
                process.kill()  # where it was not followed to its end
                _bring_back(container, run_dir, progress=progress)
            keep_log(container, run_dir)
            raise_for(code, process, run_dir, stop=stop)
        finally:
            with contextlib.suppress(*_FAILURES):
                container.remove(force=True, v=True)


def _collect_old(name: str, run_dir: Path, client: DockerClient) -> bool:
    """A kitbuild that was killed left its container there: what it holds is newer than what is here."""
    try:
        old = client.containers.get(name)
    except docker.errors.NotFound:
        return False
    if old.status not in ENDED:
        raise RunError(
            f"the container {name} still trains on that engine",
            hint=f"wait for its end (docker wait {name}), or have it save and stop: docker stop -t 600 {name}",
        )
    if LABEL in old.labels:
        fetch(old, OUT, run_dir)
    old.remove(v=True)
    return True


def _send_all(container: Container, spec: ContainerSpec, run_dir: Path, *, progress: Progress, resume: bool) -> None:
    inputs = [(mount.container.relative_to("/inputs"), mount.host) for mount in spec.mounts if mount.container != OUT]
    size = sum(path.stat().st_size for _, host in inputs for path in _files(host))
    if inputs:
        with progress.activity("copying model and data to the engine", total=float(size), unit="bytes") as advance:
            _put(container, "/inputs", _tar(inputs, uid=0, advance=advance))
    if resume:
        with progress.activity("copying the run to the engine", total=None, unit="bytes") as advance:
            _put(container, str(OUT), _tar([(PurePosixPath(), run_dir)], uid=GUEST_UID, advance=advance))


def _put(container: Container, place: str, chunks: Iterator[bytes]) -> None:
    try:
        container.put_archive(place, chunks)
    except _FAILURES as error:
        raise RunError(
            f"the engine did not take what belongs in {place}: {error}",
            hint="look at the space on its disk, and try again",
        ) from error


def _bring_back(container: Container, run_dir: Path, *, progress: Progress) -> None:
    try:
        with progress.activity("copying the run from the engine", total=None, unit="bytes"):
            fetch(container, OUT, run_dir)
    except _FAILURES as error:
        raise RunError(f"the run could not be copied from the engine: {error}") from error


def fetch(container: Container, place: PurePosixPath, run_dir: Path) -> None:
    """Regular files of the container, below `run_dir` only; each is whole or not there."""
    chunks, _ = container.get_archive(str(place))
    with tarfile.open(fileobj=ChunkStream(chunks), mode="r|") as archive:
        for member in archive:
            name = PurePosixPath(member.name)
            name = name.relative_to(OUT.name) if place == OUT else name
            if not member.isfile():
                continue
            if name.is_absolute() or ".." in name.parts:
                raise RunError(f"the container gave a file outside its run directory: {member.name}")
            stream = archive.extractfile(member)
            assert stream is not None, "a regular file has bytes"  # noqa: S101 - for us
            target = run_dir / name
            target.parent.mkdir(parents=True, exist_ok=True)
            part = target.with_name(f".{target.name}.part")
            with part.open("wb") as file:
                shutil.copyfileobj(stream, file, _CHUNK_BYTES)
            part.replace(target)


def _tar(listed: list[tuple[PurePosixPath, Path]], *, uid: int, advance: Any) -> Iterator[bytes]:
    """A tar, made while it is sent: a model need not be on the disk twice."""
    for name, host in listed:
        for path in sorted([host, *host.rglob("*")] if host.is_dir() else [host]):
            info = tarfile.TarInfo(str(name / path.relative_to(host).as_posix()) if path != host else str(name))
            info.uid = info.gid = uid
            if path.is_dir():
                info.type, info.mode = tarfile.DIRTYPE, 0o755
                if info.name != ".":
                    yield info.tobuf(tarfile.PAX_FORMAT)
                continue
            if path.is_symlink() or not path.is_file():
                continue
            info.size, info.mode = path.stat().st_size, 0o644
            yield info.tobuf(tarfile.PAX_FORMAT)
            with path.open("rb") as stream:
                while chunk := stream.read(_CHUNK_BYTES):
                    advance(len(chunk))
                    yield chunk
            yield b"\0" * (-info.size % _BLOCK_BYTES)
    yield b"\0" * (2 * _BLOCK_BYTES)


def _files(host: Path) -> Iterator[Path]:
    yield from (path for path in (host.rglob("*") if host.is_dir() else (host,)) if path.is_file())
