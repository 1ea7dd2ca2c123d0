"""One world for the whole session: engine, registry, Hub, package index, and machines that know nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import docker
import docker.errors
import pytest

from kitbuild.base.find import find
from kitbuild.image.load import load_base
from kitbuild.progress import Silent
from kitbuild.store import Store
from tests.headline.stand_ins import publish_packages
from tests.hub.fixtures import standard_hub
from tests.lock.package_index import PackageIndex, serving
from tests.registry import running

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.hub.server import HubServer

ROOT = Path(__file__).parents[2]
NOWHERE = "http://127.0.0.1:9"  # the discard port: what asks the outside by this proxy fails at once


@dataclass(frozen=True, kw_only=True)
class Done:
    """A command that has ended."""

    code: int
    output: dict[str, Any]
    errors: str


@dataclass(kw_only=True)
class World:
    """What every machine here can reach; nothing else answers."""

    folder: Path
    hub: HubServer
    index: PackageIndex
    registry: str
    client: docker.DockerClient
    upstream: str
    images: list[str] = field(default_factory=list)

    def machine(self, name: str, *recipes: str) -> Machine:
        """A new machine: an empty home and store, and copies of these recipes."""
        place = self.folder / f"{name}-{time.time_ns()}"
        place.mkdir()
        for recipe in recipes:
            (place / recipe).write_bytes((ROOT / "recipes" / recipe).read_bytes())
        return Machine(world=self, place=place)

    def environment(self, place: Path) -> dict[str, str]:
        """Everything that a command is told of this world."""
        engine = {name: os.environ[name] for name in ("DOCKER_HOST",) if name in os.environ}
        proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy"), NOWHERE)
        return {
            **engine,
            **proxies,
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "HOME": str(place / "home"),
            "KITBUILD_HOME": str(place / "store"),
            "KITBUILD_BASE_REGISTRY": self.registry,
            **self.hub.environment(place / "hf"),
            "UV_DEFAULT_INDEX": self.index.url,
            "UV_CACHE_DIR": str(place / "uv"),
            "UV_NO_CONFIG": "1",
            "PIP_CONFIG_FILE": os.devnull,
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
        }


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A folder with a home and a store of its own, where commands are run."""

    world: World
    place: Path

    def kitbuild(self, *arguments: str, umask: int = 0o022, variables: Mapping[str, str] | None = None) -> Done:
        """Run the command line with `--json`, as a process."""
        done = subprocess.run(
            [sys.executable, "-c", "from kitbuild.cli import main; main()", *arguments, "--json"],
            cwd=self.place,
            env={**self.world.environment(self.place), **(variables or {})},
            umask=umask,
            capture_output=True,
            text=True,
            check=False,
        )
        try:
            output = json.loads(done.stdout)
        except ValueError:
            output = {}
        return Done(code=done.returncode, output=output, errors=done.stdout + done.stderr)

    def file(self, name: str) -> Path:
        """A file beside the recipes."""
        return self.place / name


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`localhost:PORT` of a real registry."""
    yield from running(tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="session")
def engine() -> Iterator[docker.DockerClient]:
    client = docker.from_env()
    yield client
    client.close()


@pytest.fixture(scope="session")
def upstream(engine: docker.DockerClient) -> Iterator[str]:
    """The CPU base of this machine's own store, in the engine, in place of NVIDIA's image: Python and a compiler."""
    store = Store.open(os.environ)
    base = find(None, target="cpu", store=store, environ=os.environ, client_factory=lambda: engine, progress=Silent())
    tag = f"kitbuild-test/cuda:{time.time_ns()}"
    load_base(base, engine, store=store, tag=tag, progress=Silent())
    yield tag
    engine.images.remove(tag, force=True)


@pytest.fixture(scope="session")
def world(
    tmp_path_factory: pytest.TempPathFactory, registry: str, engine: docker.DockerClient, upstream: str
) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("world")
    prefix = f"{registry}/headline-{time.time_ns()}"
    with standard_hub(tmp_path_factory.mktemp("hub")) as hub, serving() as index:
        publish_packages(index)
        made = World(folder=folder, hub=hub, index=index, registry=prefix, client=engine, upstream=upstream)
        yield made
        for image in reversed(made.images):
            with contextlib.suppress(docker.errors.ImageNotFound):
                engine.images.remove(image, force=True)


@contextlib.contextmanager
def tag_kept(client: docker.DockerClient, name: str) -> Iterator[None]:
    """Whatever the engine calls `name` now has that name again at the end; meanwhile nothing has."""
    kept = f"kitbuild-test/kept:{time.time_ns()}"
    before = _renamed(client, name, kept)
    try:
        yield
    finally:
        with contextlib.suppress(docker.errors.ImageNotFound):
            client.images.remove(name, force=True)
        if before:
            _renamed(client, kept, f"{name}:latest")


def _renamed(client: docker.DockerClient, old: str, new: str) -> bool:
    try:
        client.images.get(old).tag(*new.rsplit(":", 1))
        client.images.remove(old)
    except docker.errors.ImageNotFound:
        return False
    return True
