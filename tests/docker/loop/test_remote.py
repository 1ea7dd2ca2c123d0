"""An engine that is not reached by a socket of this machine: none of our paths is mounted there."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import threading
from typing import TYPE_CHECKING

import pytest

from tests.docker.loop.recipes import read_lock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import docker

    from tests.docker.loop.command import Kitbuild
    from tests.docker.loop.conftest import Baseline

pytestmark = pytest.mark.docker


def pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def join(near: socket.socket, path: str) -> None:
    with near, socket.socket(socket.AF_UNIX) as far:
        far.connect(path)
        back = threading.Thread(target=pump, args=(far, near))
        back.start()
        pump(near, far)
        back.join()


def serve(listener: socket.socket, path: str) -> None:
    joined = []
    with contextlib.suppress(OSError):
        while True:
            near, _ = listener.accept()
            joined.append(threading.Thread(target=join, args=(near, path)))
            joined[-1].start()
    for each in joined:
        each.join()


@pytest.fixture
def address(engine: docker.DockerClient) -> Iterator[str]:
    """The engine by TCP, as another machine's would be."""
    assert engine.ping()
    path = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock").removeprefix("unix://")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=serve, args=(listener, path))
        server.start()
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        server.join()


def ours(engine: docker.DockerClient) -> list[str]:
    return [
        container.name or ""
        for container in engine.containers.list(all=True, filters={"label": "org.kitbuild.remote-run"})
    ]


def test_run_on_another_machine(
    kit: Kitbuild, baseline: Baseline, engine: docker.DockerClient, address: str, tmp_path: Path
) -> None:
    """Through the API alone it trains the same bits; the archive verifies here, and nothing is left there."""
    ran = kit("run", baseline.recipe, "--out", tmp_path / "runs", "--host", address)
    assert kit("compare", baseline.run_dir, ran["run_dir"])["verdict"] == "IDENTICAL"
    assert kit("archive", "verify", ran["run_dir"])["schema"] == "kitbuild.archive-verify/1"
    name = ran["run_dir"].rpartition("/")[2]
    assert name not in ours(engine)
    assert read_lock(baseline.recipe).sha256 == ran_lock(tmp_path, name)


def ran_lock(folder: Path, name: str) -> str:
    return hashlib.sha256((folder / "runs" / name / "lock.json").read_bytes()).hexdigest()


def test_by_ssh(kit: Kitbuild, baseline: Baseline, tmp_path: Path) -> None:
    """`--host user@machine` speaks through the ssh program of the user, here one that stays on this machine."""
    (tmp_path / "bin").mkdir()
    ssh = tmp_path / "bin/ssh"
    ssh.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/called\nfor command in "$@"; do :; done\nexec $command\n')
    ssh.chmod(0o755)
    near = kit.given(PATH=f"{tmp_path}/bin:{os.environ['PATH']}")
    ran = near("run", baseline.recipe, "--out", tmp_path / "runs", "--host", "someone@elsewhere")
    assert kit("compare", baseline.run_dir, ran["run_dir"])["verdict"] == "IDENTICAL"
    called = set(
        (tmp_path / "called").read_text().replace("-p 22 ", "").splitlines()
    )  # said by some of the SDK's calls
    assert called == {"-l someone -- elsewhere docker system dial-stdio"}


def test_nobody_there(kit: Kitbuild, baseline: Baseline, tmp_path: Path) -> None:
    """Exit 6 before anything is made, with the line that must work first."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/ssh").write_text("#!/bin/sh\nexit 255\n")
    (tmp_path / "bin/ssh").chmod(0o755)
    far = kit.given(PATH=f"{tmp_path}/bin:{os.environ['PATH']}")
    failed = far.fails(6, "run", baseline.recipe, "--out", tmp_path / "runs", "--host", "someone@elsewhere")
    assert failed["message"] == "no container engine answers at ssh://someone@elsewhere"
    assert "`docker -H ssh://someone@elsewhere version` must work" in failed["hint"]
    assert not (tmp_path / "runs").exists()
