"""Two nodes as two containers: host names and addresses of their own, on a network of the job."""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import docker
import docker.errors
import pytest
from docker.types import Mount

from tests.docker.loop.recipes import recipe

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from docker.models.containers import Container

    from tests.docker.loop.command import Kitbuild

pytestmark = [pytest.mark.docker, pytest.mark.slow_extra]
LOST_SECONDS = 15
END_SECONDS = 240
USER = 10001
STEPS = {
    "  max_steps: 10": "  max_steps: 60\n  save_steps: 10",
    "launch:\n  threads_per_process: 2": "launch:\n  nodes: 2\n  processes_per_node: 2\n  threads_per_process: 1",
    "  micro: 8 ": "  micro: 2 ",
}


@dataclass(frozen=True, kw_only=True)
class Built:
    engine_id: str
    inputs: Path


@pytest.fixture(scope="module")
def built(kit: Kitbuild, tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("nodes")
    path = recipe(folder, changed=STEPS)
    image = kit("image", path)
    kit("fetch", path, "--inputs", folder / "inputs")
    return Built(engine_id=image["engine_id"], inputs=folder / "inputs")


@pytest.fixture(scope="module")
def other(kit: Kitbuild, tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("other")
    path = recipe(folder, changed={**STEPS, "seed: 42": "seed: 43"})
    image = kit("image", path)
    kit("fetch", path, "--inputs", folder / "inputs")
    return Built(engine_id=image["engine_id"], inputs=folder / "inputs")


class Job:
    """Two containers, a run directory for each, one folder of checkpoints."""

    def __init__(self, engine: docker.DockerClient, folder: Path) -> None:
        self.engine, self.folder, self.name = engine, folder, f"kit-{uuid.uuid4().hex[:8]}"
        self.network = engine.networks.create(self.name, internal=True)
        self.nodes: dict[int, Container] = {}
        for name in ("node-0", "node-1", "checkpoints"):
            (folder / name).mkdir()
            os.chown(folder / name, USER, USER)

    def start(self, rank: int, built: Built, **environ: str) -> None:
        inputs = [
            Mount(f"/inputs/{path.relative_to(built.inputs)}", str(path), type="bind", read_only=True)
            for path in sorted(built.inputs.iterdir())
        ]
        places = [("/out", f"node-{rank}"), ("/out/checkpoints", "checkpoints")]
        self.nodes[rank] = self.engine.containers.run(
            built.engine_id,
            ["train"],
            detach=True,
            name=f"{self.name}-{rank}",
            hostname=f"node-{rank}",
            network=self.name,
            user=f"{USER}:{USER}",
            read_only=True,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            shm_size=1 << 30,
            tmpfs={"/tmp": "rw,mode=1777", "/cache": "rw,exec,mode=1777"},  # noqa: S108
            mounts=[*inputs, *(Mount(place, str(self.folder / name), type="bind") for place, name in places)],
            environment={
                "MASTER_ADDR": f"{self.name}-0", "MASTER_PORT": "29500", "NODE_RANK": str(rank),
                "KIT_LOST_SECONDS": str(LOST_SECONDS), "KIT_JOIN_SECONDS": "120", **environ,
            },
        )  # fmt: skip

    def wait(self, rank: int, seconds: float = END_SECONDS) -> int:
        return int(self.nodes[rank].wait(timeout=seconds)["StatusCode"])

    def end(self) -> list[int]:
        return [self.wait(0), self.wait(1)]

    def logs(self) -> str:
        return "".join(node.logs().decode() for node in self.nodes.values())

    def message(self, rank: int) -> str:
        return str(json.loads((self.folder / f"node-{rank}/exit.json").read_bytes())["message"])

    def steps(self) -> int:
        path = self.folder / "node-0/metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def trained(self, steps: int) -> None:
        until = time.monotonic() + END_SECONDS
        while self.steps() < steps:
            assert time.monotonic() < until, self.logs()
            time.sleep(0.05)

    def remove(self) -> None:
        for node in self.nodes.values():
            with contextlib.suppress(docker.errors.APIError):
                node.remove(force=True)
        self.nodes = {}


@pytest.fixture
def job(engine: docker.DockerClient, tmp_path: Path) -> Iterator[Job]:
    made = Job(engine, tmp_path)
    yield made
    made.remove()
    made.network.remove()


@pytest.fixture(scope="module")
def whole(engine: docker.DockerClient, built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two nodes of two processes, undisturbed."""
    made = Job(engine, tmp_path_factory.mktemp("whole"))
    try:
        for rank in (0, 1):
            made.start(rank, built)
        assert made.end() == [0, 0], made.logs()
    finally:
        made.remove()
        made.network.remove()
    return made.folder / "node-0"


def test_two_nodes_are_one(kit: Kitbuild, whole: Path, tmp_path: Path) -> None:
    """2 nodes × 2 processes and 1 × 4 are IDENTICAL; the archive is whole and has all four ranks."""
    one = {"launch:\n  threads_per_process: 2": "launch:\n  processes_per_node: 4\n  threads_per_process: 1"}
    four = kit("run", recipe(tmp_path, changed={**STEPS, **one}), "--out", tmp_path / "runs")
    assert kit("compare", four["run_dir"], whole)["verdict"] == "IDENTICAL"
    kit("archive", "verify", whole)
    launch: dict[str, Any] = json.loads((whole / "manifest.json").read_bytes())["launch"]
    assert ([item["rank"] for item in launch["proven"]], launch["hosts"]) == ([0, 1, 2, 3], ["node-0", "node-1"])


def test_another_image(job: Job, built: Built, other: Built) -> None:
    """A node with another image is named on both, exit 7, and nothing is trained."""
    job.start(0, built)
    job.start(1, other)
    assert job.end() == [7, 7], job.logs()
    for rank in (0, 1):
        assert "node 1 (node-1) has another lock than node 0 (node-0)" in job.message(rank)
    assert job.steps() == 0


@pytest.mark.parametrize("how", ["killed", "cut off"])
def test_a_lost_node(kit: Kitbuild, job: Job, built: Built, whole: Path, how: str) -> None:
    """Killed or cut off: each node that is left ends in time, and the job started again gives the same bits."""
    for rank in (0, 1):
        job.start(rank, built)
    job.trained(15)
    began = time.monotonic()
    if how == "killed":
        job.nodes[1].kill()
        assert job.wait(0) == 6, job.logs()
    else:
        job.network.disconnect(job.nodes[1])
        assert job.end() == [6, 6], job.logs()
        assert "did not answer for 15 s" in job.message(0) + job.message(1)
    assert time.monotonic() - began < LOST_SECONDS + 60
    job.remove()
    for rank in (0, 1):
        job.start(rank, built, KIT_RESUME="auto")
    assert job.end() == [0, 0], job.logs()
    assert kit("compare", whole, job.folder / "node-0")["verdict"] == "IDENTICAL"


def test_a_slow_node(kit: Kitbuild, job: Job, built: Built, whole: Path) -> None:
    """A node that stands still for less than the time that makes it lost is waited for; the bits are the same."""
    for rank in (0, 1):
        job.start(rank, built)
    job.trained(5)
    job.nodes[1].pause()
    time.sleep(LOST_SECONDS / 3)
    job.nodes[1].unpause()
    assert job.end() == [0, 0], job.logs()
    assert kit("compare", whole, job.folder / "node-0")["verdict"] == "IDENTICAL"
