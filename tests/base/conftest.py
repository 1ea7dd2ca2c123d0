"""A store, a real registry, and the bootstrapped Debian base, made once a session."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import docker
import pytest

from kitbuild.base.bootstrap import bootstrap
from kitbuild.progress import Silent
from kitbuild.store import Store
from tests.registry import ENGINE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kitbuild.base.models import LockedBase


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open({"KITBUILD_HOME": str(tmp_path / "home")})


@pytest.fixture(scope="session")
def registry_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    state = tmp_path_factory.mktemp("engine")
    yield state
    subprocess.run([ENGINE, "registry", "stop", "--state", state], check=True, capture_output=True)


@pytest.fixture(scope="session")
def registry(registry_state: Path) -> str:
    """`localhost:PORT` of a real registry."""
    started = subprocess.run(
        [ENGINE, "registry", "start", "--state", registry_state], check=True, stdout=subprocess.PIPE, text=True
    )
    return started.stdout.strip()


@pytest.fixture(scope="session")
def session_store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store.open({"KITBUILD_HOME": str(tmp_path_factory.mktemp("home"))})


@pytest.fixture(scope="session")
def debian_base(session_store: Store) -> LockedBase:
    return bootstrap("cpu", store=session_store, progress=Silent(), environ=dict(os.environ))


@pytest.fixture
def client() -> Iterator[docker.DockerClient]:
    engine = docker.from_env()
    yield engine
    engine.close()
