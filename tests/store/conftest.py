"""A store of its own and a faulty server for each test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kitbuild.store import Store
from tests.store.faulty_server import Faulty, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open({"KITBUILD_HOME": str(tmp_path / "store")})


@pytest.fixture
def server() -> Iterator[Faulty]:
    with serving() as state:
        yield state
