from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.guest import root as roots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REPOSITORY = Path(__file__).parents[2]


@dataclass
class Run:
    out: Path
    process: subprocess.Popen[str]
    pid: int = 0
    rc: int | None = None
    terminal: str = ""
    log: Path = field(default_factory=Path)

    def wait(self) -> Run:
        assert self.process.stdout is not None
        self.rc = json.loads(self.process.stdout.readline())["rc"]
        self.terminal = self.log.read_text()
        return self

    @property
    def exit(self) -> dict[str, Any]:
        return json.loads((self.out / "exit.json").read_bytes())  # type: ignore[no-any-return]

    @property
    def manifest(self) -> dict[str, Any]:
        return json.loads((self.out / "manifest.json").read_bytes())  # type: ignore[no-any-return]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        path = self.out / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def values(self) -> list[tuple[Any, ...]]:
        """What must not differ between two runs."""
        names = ("step", "loss", "grad_norm", "learning_rate", "tokens", "batch_sha256")
        return [tuple(line[name] for name in names) for line in self.metrics]

    @property
    def weights(self) -> dict[str, str]:
        return {name: facts["sha256"] for name, facts in self.manifest["weights"].items()}


class Guest:
    """Builds trees at one fixed path (libraries read cache paths when imported) and runs guests in them."""

    def __init__(self, folder: Path, process: subprocess.Popen[str]) -> None:
        self.folder, self.process = folder, process
        self.root: roots.Root
        self.count = 0

    def build(self, **changes: Any) -> roots.Root:
        for name in ("root", "out", "cache"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        self.root = roots.build(self.folder, **changes)
        return self.root

    def start(self, *argv: str, out: Path | None = None, environ: dict[str, str] | None = None, **job: Any) -> Run:
        self.count += 1
        out = out or self.folder / f"out-{self.count}"
        log = self.folder / f"terminal-{self.count}"
        held = {**self.root.environ, "KIT_OUT": str(out), **(environ or {})}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        line = {"environ": held, "argv": list(argv or ("train",)), "log": str(log), **job}
        self.process.stdin.write(json.dumps(line) + "\n")
        self.process.stdin.flush()
        return Run(out=out, process=self.process, pid=json.loads(self.process.stdout.readline())["pid"], log=log)

    def run(self, *argv: str, **options: Any) -> Run:
        return self.start(*argv, **options).wait()


@pytest.fixture(scope="session")
def train_python() -> str:
    """The python of the training environment; scripts/test sets it."""
    found = os.environ.get("KITBUILD_TRAIN_PYTHON")
    assert found, "set KITBUILD_TRAIN_PYTHON to a python that has the locked training set"
    return found


@pytest.fixture(scope="session")
def deepspeed_python() -> str:
    """Likewise, with DeepSpeed: of the lock of recipes/tiny-deepspeed-cpu.yaml."""
    found = os.environ.get("KITBUILD_DEEPSPEED_PYTHON")
    assert found, "set KITBUILD_DEEPSPEED_PYTHON to a python that has the locked training set with DeepSpeed"
    return found


@pytest.fixture(scope="session")
def zygote(train_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guest]:
    with started(train_python, tmp_path_factory.mktemp("guest")) as found:
        yield found


@pytest.fixture(scope="session")
def deepspeed_zygote(deepspeed_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guest]:
    folder = tmp_path_factory.mktemp("deepspeed")
    with started(deepspeed_python, folder, "deepspeed", DS_ACCELERATOR="cpu") as found:
        yield found


@contextlib.contextmanager
def started(python: str, folder: Path, *modules: str, **variables: str) -> Iterator[Guest]:
    cache = folder / "cache"
    environ = {
        "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "KERNELS_CACHE": str(folder / "root/kit/kernels"),
        "HF_HOME": str(cache / "kit/hf"), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1", **variables,
    }  # fmt: skip
    command = [python, str(Path(__file__).parent / "zygote.py"), str(REPOSITORY), json.dumps(environ), *modules]
    with (folder / "zygote.log").open("w") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=folder,
            env={**os.environ, **environ},
        )
        yield Guest(folder, process)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.wait(timeout=60)
        process.stdout.close()


@pytest.fixture
def zero(deepspeed_zygote: Guest) -> Guest:
    """A guest that has DeepSpeed."""
    return deepspeed_zygote


@pytest.fixture
def guest(zygote: Guest) -> Guest:
    return zygote


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., roots.Root]:
    """A tree of its own, for what needs no training libraries."""

    def make(**changes: Any) -> roots.Root:
        return roots.build(tmp_path, **changes)

    return make
