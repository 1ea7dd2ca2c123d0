"""scripts/engine starts what is missing and stops only what it started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.registry import ENGINE

if TYPE_CHECKING:
    from collections.abc import Iterator

# Answers /_ping at the socket that --host names, as an engine does.
DOCKERD = """#!{python}
import http.server, socketserver, sys

class Ping(http.server.BaseHTTPRequestHandler):
    def address_string(self): return "x"
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

path = sys.argv[sys.argv.index("--host") + 1].removeprefix("unix://")
socketserver.UnixStreamServer(path, Ping).serve_forever()
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A short path: a socket's may have 107 characters."""
    with tempfile.TemporaryDirectory(prefix="kb-") as folder:
        yield Path(folder)


def script(
    *words: str, place: Path, dockerd: str = "", uid: int = 0, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run it as if by this user, with this program as dockerd."""
    (place / "bin").mkdir(exist_ok=True)
    for name, text in {"id": f"#!/bin/sh\necho {uid}\n", "dockerd": dockerd}.items():
        (place / "bin" / name).write_text(text)
        (place / "bin" / name).chmod(0o755)
    path = f"{place / 'bin'}:{os.environ['PATH']}"
    env = {**os.environ, "DOCKER_HOST": f"unix://{place}/docker.sock", "PATH": path} | environ
    return subprocess.run(
        [ENGINE, *words, "--state", place / "state"], env=env, capture_output=True, text=True, timeout=120, check=False
    )


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_start_and_stop(place: Path) -> None:
    """An engine that is missing is started; a second start finds it; stop ends that process."""
    fake = DOCKERD.format(python=sys.executable)
    first = script("start", place=place, dockerd=fake)
    assert (first.returncode, first.stderr.splitlines()[-1]) == (0, "engine: started")
    pid = int((place / "state" / "dockerd.pid").read_text())
    assert alive(pid)
    assert script("start", place=place, dockerd=fake).stderr == "engine: one is running\n"
    assert script("stop", place=place).stderr == "engine: stopped\n"
    assert not alive(pid)
    assert not (place / "state" / "dockerd.pid").exists()


def test_an_engine_that_dies(place: Path) -> None:
    """Exit 5 with its last words, and no pid file is left."""
    result = script("start", place=place, dockerd="#!/bin/sh\necho no cgroups\nexit 1\n")
    assert result.returncode == 5
    assert "no cgroups\nerror: dockerd does not answer\nhint: the lines above are from" in result.stderr
    assert not (place / "state" / "dockerd.pid").exists()


def test_without_root(place: Path) -> None:
    """Someone who may not start an engine is told what to do: exit 5, nothing started."""
    result = script("start", place=place, uid=1000, dockerd=DOCKERD.format(python=sys.executable))
    assert result.returncode == 5
    assert result.stderr == (
        "error: no container engine answers\nhint: start Docker (sudo systemctl start docker),"
        " or install it (sudo apt-get install docker.io), then try again\n"
    )
    assert not (place / "state" / "dockerd.pid").exists()


def test_a_running_engine_is_left_alone(place: Path) -> None:
    """What someone else started is used, and stop does not stop it."""
    (place / "fake").write_text(DOCKERD.format(python=sys.executable))
    engine = subprocess.Popen([sys.executable, place / "fake", "--host", f"unix://{place}/docker.sock"])
    try:
        for _ in range(100):
            if script("status", place=place).returncode == 0:
                break
        assert script("start", place=place).stderr == "engine: one is running\n"
        assert script("stop", place=place).stderr == "engine: not started by this script, left alone\n"
        assert engine.poll() is None
    finally:
        engine.terminate()
        engine.wait()


def test_a_pid_that_is_another_program_now(place: Path) -> None:
    """A pid file from before a reboot does not end a stranger."""
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        (place / "state").mkdir()
        (place / "state" / "dockerd.pid").write_text(f"{stranger.pid}\n")
        assert script("stop", place=place).returncode == 0
        assert stranger.poll() is None
    finally:
        stranger.send_signal(signal.SIGKILL)
        stranger.wait()


def test_a_remote_engine_that_is_down(place: Path) -> None:
    """An engine elsewhere is not ours to start: exit 5."""
    result = script("start", place=place, DOCKER_HOST="tcp://127.0.0.1:9")
    assert result.returncode == 5
    assert result.stderr == (
        "error: no engine answers at DOCKER_HOST=tcp://127.0.0.1:9\nhint: start that engine, or unset DOCKER_HOST\n"
    )


@pytest.mark.parametrize("words", [(), ("begin",), ("registry",), ("start", "--force")])
def test_usage(place: Path, words: tuple[str, ...]) -> None:
    """A wrong call is exit 2 and shows how."""
    result = script(*words, place=place)
    assert result.returncode == 2
    assert "scripts/engine start|stop|status" in result.stderr


def test_registry(place: Path) -> None:
    """The registry's address is all of stdout; a second start gives the same one; stop leaves nothing."""
    first = script("registry", "start", place=place)
    again = script("registry", "start", place=place)
    assert first.stdout == again.stdout
    host, port = first.stdout.strip().split(":")
    socket.create_connection((host, int(port)), timeout=5).close()
    pid = int((place / "state" / "registry" / "pid").read_text())
    assert script("registry", "stop", place=place).returncode == 0
    assert not alive(pid)
    assert [path.name for path in (place / "state").iterdir()] == ["lock"]
