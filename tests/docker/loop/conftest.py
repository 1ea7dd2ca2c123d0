"""What the tests of the loop share: the program, the suite's store, and one finished run of the tiny recipe."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import docker
import docker.errors
import pytest

from kitbuild.errors import KitbuildError
from kitbuild.image.assemble import default_tag
from kitbuild.store import Store
from tests.docker.loop.command import Kitbuild
from tests.docker.loop.recipes import MADE, read_lock, recipe

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kitbuild.lock.models import Lock


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """A recipe, its image and a complete run of it."""

    recipe: Path
    image: dict[str, Any]
    run: dict[str, Any]

    @property
    def run_dir(self) -> Path:
        return Path(self.run["run_dir"])

    @property
    def lock(self) -> Lock:
        return read_lock(self.recipe)


@pytest.fixture(scope="session")
def kit(engine: docker.DockerClient) -> Iterator[Kitbuild]:
    """The program with the store that the caller's environment names, and no Hub of the caller's."""
    yield Kitbuild().given(HF_ENDPOINT=None, HF_TOKEN=None)
    for path in MADE:
        with contextlib.suppress(KitbuildError, OSError, docker.errors.APIError):
            engine.images.remove(default_tag(read_lock(path)))


@pytest.fixture(scope="session")
def store() -> Store:
    return Store.open(os.environ)


@pytest.fixture(scope="session")
def engine() -> Iterator[docker.DockerClient]:
    client = docker.from_env()
    yield client
    client.close()


@pytest.fixture(scope="session")
def baseline(kit: Kitbuild, tmp_path_factory: pytest.TempPathFactory) -> Baseline:
    """One run of the tiny recipe, which other runs are compared with."""
    folder = tmp_path_factory.mktemp("baseline")
    path = recipe(folder)
    image = kit("image", path)
    return Baseline(recipe=path, image=image, run=kit("run", path, "--out", folder / "runs"))
