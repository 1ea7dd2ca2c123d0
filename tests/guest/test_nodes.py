"""Several nodes: processes of one machine here, containers with addresses of their own in tests/docker/nodes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Any

import pytest

from kitbuild.guest import nodes
from tests.guest import root as roots
from tests.guest.conftest import REPOSITORY
from tests.guest.test_train import PLAIN, TRAIN

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.train
LOST_SECONDS = 6
END_SECONDS = 90
"""Importing takes most of it where the machine is busy; no end waits for the half hour of a collective."""


class Job:
    """Nodes of one job: each with a root and a run directory of its own, and one folder of checkpoints."""

    def __init__(self, folder: Path, python: str) -> None:
        self.folder, self.python = folder, python
        self.checkpoints = folder / "checkpoints"
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]

    def build(self, rank: int, *, count: int = 2, processes: int = 1, **changes: Any) -> None:
        launch = {"nodes": count, "processes_per_node": processes}
        given: dict[str, Any] = {**PLAIN, "launch": launch, "batch": {"global": 8, "micro": 1}, **changes}
        roots.build(self.folder / f"node-{rank}", **given)
        (self.folder / f"node-{rank}" / "out").rmdir()

    def start(self, rank: int, **environ: str) -> None:
        place = self.folder / f"node-{rank}"
        out = place / "out"
        self.checkpoints.mkdir(exist_ok=True)
        if not out.exists():
            out.mkdir()
            (out / "checkpoints").symlink_to(self.checkpoints)
        terminal = os.open(place / "terminal", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.nodes[rank] = subprocess.Popen(
            [self.python, "-m", "kitbuild.guest", "train"],
            env={
                "PATH": os.environ["PATH"], "HOME": str(place), "PYTHONPATH": str(REPOSITORY), "PYTHONHASHSEED": "0",
                "PYTHONDONTWRITEBYTECODE": "1", "KIT_ENGINE": "local", "KIT_ROOT": str(place / "root"), "KIT_OUT": str(out),
                "KIT_CACHE": str(place / "cache"), "MASTER_ADDR": "localhost", "MASTER_PORT": str(self.port),
                "NODE_RANK": str(rank), "KIT_LOST_SECONDS": str(LOST_SECONDS), "KIT_JOIN_SECONDS": "60", **environ,
            },
            stderr=terminal, start_new_session=True,
        )  # fmt: skip
        os.close(terminal)

    def wait(self, rank: int, seconds: float = END_SECONDS) -> int:
        return self.nodes[rank].wait(timeout=seconds)

    def terminal(self, rank: int) -> str:
        return (self.folder / f"node-{rank}" / "terminal").read_text()

    def read(self, rank: int, name: str) -> dict[str, Any]:
        return json.loads((self.folder / f"node-{rank}" / "out" / name).read_bytes())  # type: ignore[no-any-return]

    def metrics(self) -> list[tuple[Any, ...]]:
        path = self.folder / "node-0" / "out" / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        names = ("step", "loss", "grad_norm", "learning_rate", "tokens", "batch_sha256")
        return [tuple(line[name] for name in names) for line in lines]

    def kill(self, rank: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.nodes[rank].pid, signal.SIGKILL)

    def training(self) -> None:
        for _ in range(END_SECONDS * 10):
            if len(self.metrics()) > 2:
                return
            time.sleep(0.1)
        raise AssertionError(self.terminal(0) + self.terminal(1))


@pytest.fixture
def job(tmp_path: Path, train_python: str) -> Iterator[Job]:
    made = Job(tmp_path, train_python)
    yield made
    for rank in made.nodes:
        made.kill(rank)
        made.wait(rank)


def test_two_nodes_are_one_of_twice_the_processes(job: Job) -> None:
    """2 nodes × 2 processes and 1 × 4 give the same bits; one archive holds what all four ranks told."""
    for rank in (0, 1):
        job.build(rank, processes=2)
        job.start(rank)
    assert [job.wait(rank) for rank in (0, 1)] == [0, 0], job.terminal(0) + job.terminal(1)
    found, manifest = job.metrics(), job.read(0, "manifest.json")
    assert [item["rank"] for item in manifest["launch"]["proven"]] == [0, 1, 2, 3]
    assert [item["sharing"]["world_size"] for item in manifest["launch"]["proven"]] == [4] * 4
    assert manifest["launch"]["hosts"] == [socket.gethostname()] * 2
    assert job.read(1, "exit.json")["exit_code"] == 0
    alone = Job(job.folder / "alone", job.python)
    alone.folder.mkdir()
    alone.build(0, count=1, processes=4)
    alone.start(0)
    assert alone.wait(0) == 0, alone.terminal(0)
    assert alone.metrics() == found
    assert alone.read(0, "manifest.json")["weights"] == manifest["weights"]


def test_another_lock_trains_nothing(job: Job) -> None:
    """A node with another lock is named on every node, exit 7, before anything is trained."""
    job.build(0)
    job.build(1, seed=8)
    for rank in (0, 1):
        job.start(rank)
    host = socket.gethostname()
    text = f"node 1 ({host}) has another lock than node 0 ({host})"
    for rank in (0, 1):
        assert job.wait(rank) == 7, job.terminal(rank)
        assert text in job.read(rank, "exit.json")["message"]
    assert job.metrics() == []


LONG: dict[str, Any] = {"train": {**TRAIN, "max_steps": 5000, "save_steps": 2, "save_total_limit": 2}}


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_lost_node(job: Job, how: str) -> None:
    """A node that is killed, or that answers no more, ends the others with exit 6; a whole checkpoint is left."""
    for rank in (0, 1):
        job.build(rank, **LONG)
        job.start(rank)
    job.training()
    if how == "killed":
        job.kill(1)
    else:
        os.killpg(job.nodes[1].pid, signal.SIGSTOP)
        for child in nodes._children(job.nodes[1].pid):
            os.kill(child, signal.SIGSTOP)
    began = time.monotonic()
    assert job.wait(0) == 6, job.terminal(0)
    assert time.monotonic() - began < LOST_SECONDS + 20
    message = job.read(0, "exit.json")["message"]
    expected = {"killed": "the connection to another node was lost", "stopped": "node 1 ("}
    assert expected[how] in message
    assert list(job.checkpoints.glob("checkpoint-*/kit.json"))


def test_the_first_node_never_comes(job: Job) -> None:
    """A node that finds no first node says where it looked, after the time that it was given."""
    job.build(1)
    job.start(1, KIT_JOIN_SECONDS="3")
    assert job.wait(1) == 6, job.terminal(1)
    assert f"node 1 found no node 0 at localhost:{job.port} within 3 s" in job.read(1, "exit.json")["message"]


def test_a_node_is_missing(job: Job) -> None:
    """The first node names the nodes that did not come."""
    job.build(0, count=3)
    job.start(0, KIT_JOIN_SECONDS="3")
    assert job.wait(0) == 6, job.terminal(0)
    assert "2 of 3 nodes did not come within 3 s: 1, 2" in job.read(0, "exit.json")["message"]


def test_what_is_compared() -> None:
    """Each thing that must be equal is named with the node and its host."""
    same = {"host": "a", "lock": "l", "image": "i", "nodes": 2, "resume": False, "checkpoints": "c"}
    assert nodes.differences({0: same, 1: {**same, "host": "b"}}) == []
    told = nodes.differences({0: same, 1: {**same, "host": "b", "image": "j", "resume": True}})
    assert [(problem.key, problem.message) for problem in told] == [
        ("image", "node 1 (b) has another image than node 0 (a)"),
        ("resume", "node 1 (b) has another wish to resume than node 0 (a)"),
    ]
