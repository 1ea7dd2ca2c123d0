"""A Slurm of our own on this machine, and recipes that its jobs train."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ruamel.yaml import YAML

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REPOSITORY = Path(__file__).resolve().parents[2]
ENDED = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY"})
WAIT_SECONDS = 300


def wait(condition: Callable[[], Any], what: str, seconds: float = WAIT_SECONDS) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.2)
    return found


@dataclass(frozen=True)
class Job:
    """A submitted job, and the directory that it was submitted from."""

    slurm: Slurm
    number: str
    name: str

    def show(self) -> dict[str, str]:
        told = self.slurm.run("scontrol", "show", "job", "--oneliner", self.number)
        return dict(word.split("=", 1) for word in told.split() if "=" in word)

    def wait(self) -> dict[str, str]:
        """How it ended."""
        wait(lambda: self.show()["JobState"] in ENDED, f"the end of job {self.number}: {self.log}")
        return self.show()

    def wait_for_step(self, step: int) -> None:
        wait(lambda: self.steps() >= step, f"step {step} of job {self.number}: {self.log}")

    def steps(self) -> int:
        return sum(path.read_bytes().count(b"\n") for path in self.out.glob("node-0/*/metrics.jsonl"))

    @property
    def out(self) -> Path:
        return self.slurm.folder / "runs" / f"{self.name}-{self.number}"

    @property
    def run_dir(self) -> Path:
        (found,) = self.out.glob("node-0/*")
        return found

    @property
    def log(self) -> str:
        path = self.slurm.folder / f"{self.name}-{self.number}.log"
        return path.read_text() if path.exists() else ""


@dataclass(frozen=True)
class Slurm:
    """Where jobs are submitted from; `environ` has kitbuild on its path."""

    folder: Path
    environ: dict[str, str]

    def run(self, *words: str, **environ: str) -> str:
        done = subprocess.run(
            words, cwd=self.folder, env=self.environ | environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def recipe(self, name: str, **changes: dict[str, Any]) -> Path:
        """The tiny recipe with some sections changed, and no evaluation; locked."""
        yaml = YAML()
        value = yaml.load((REPOSITORY / "recipes/tiny-cpu.yaml").read_text())
        value["name"] = name
        del value["evaluate"]
        for section, keys in changes.items():
            value.setdefault(section, {}).update(keys)
        path = self.folder / f"{name}.yaml"
        with path.open("w") as stream:
            yaml.dump(value, stream)
        self.run("kitbuild", "lock", str(path))
        return path

    def submit(self, recipe: Path, *options: str, **environ: str) -> Job:
        """Render, and hand to sbatch as it is."""
        script = recipe.with_suffix(".sh")
        self.run("kitbuild", "render", "slurm", recipe.name, "--container", "none", "--output", str(script))
        number = self.run("sbatch", "--parsable", *options, str(script), **environ).strip()
        return Job(self, number, recipe.stem)


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Two nodes, for as long as these tests run."""
    place = tmp_path_factory.mktemp("slurm")
    state, tools, folder = place / "state", place / "bin", place / "work"
    tools.mkdir()
    (tools / "kitbuild").write_text(f'#!/bin/sh\nexec {sys.executable} -m kitbuild "$@"\n')
    (tools / "kitbuild").chmod(0o755)
    folder.mkdir()
    shutil.copytree(REPOSITORY / "recipes/data", folder / "data")
    script = REPOSITORY / "scripts/slurm"
    started = subprocess.run(
        [script, "start", "--state", state, "--nodes", "2", "--cpus", "4"], capture_output=True, text=True, check=False
    )
    assert started.returncode == 0, started.stderr
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    environ = {**os.environ, "SLURM_CONF": started.stdout.strip(), "PATH": path, "PYTHONPATH": str(REPOSITORY)}
    yield Slurm(folder, environ)
    subprocess.run([script, "stop", "--state", state], check=True)
