"""An engine and a registry."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from kitbuild.image import connect
from tests.registry import running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from docker import DockerClient


@pytest.fixture
def client() -> Iterator[DockerClient]:
    client = connect(os.environ)
    yield client
    client.close()


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`localhost:PORT` of a real registry."""
    yield from running(tmp_path_factory.mktemp("engine"))
