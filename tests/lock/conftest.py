"""A test Hub for the session, and stores."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kitbuild.store import Store
from tests.hub.fixtures import standard_hub

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.hub.server import HubServer


@pytest.fixture(scope="session")
def shared_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    with standard_hub(tmp_path_factory.mktemp("hub")) as running:
        yield running


@pytest.fixture
def hub(shared_hub: HubServer) -> HubServer:
    """The session's Hub, with no faults and an empty log of requests. Tests that change a repository make their own."""
    shared_hub.faults.clear()
    shared_hub.requests.clear()
    return shared_hub


@pytest.fixture
def hub_environ(hub: HubServer, tmp_path: Path) -> dict[str, str]:
    """What reaches that Hub and nothing else."""
    return {"HF_ENDPOINT": hub.url, "HOME": str(tmp_path), "HF_TOKEN": ""}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open({"KITBUILD_HOME": str(tmp_path / "store")})
