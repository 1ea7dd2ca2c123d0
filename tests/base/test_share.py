"""A base that was given away is the same base where it arrives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kitbuild.base import bases
from kitbuild.base.share import push_base, read_base, write_base
from kitbuild.errors import ImageError, VerificationError
from kitbuild.progress import Silent
from kitbuild.store import Store
from tests.base import made

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def other(tmp_path: Path) -> Store:
    return Store.open({"KITBUILD_HOME": str(tmp_path / "other")})


def test_file(store: Store, other: Store, tmp_path: Path) -> None:
    """Written to a file twice, the bytes are equal; read from it, so is the base."""
    base = made.add(store)
    for name in ("one.tar", "two.tar"):
        write_base(base, tmp_path / name, store=store, progress=Silent())
    assert (tmp_path / "one.tar").read_bytes() == (tmp_path / "two.tar").read_bytes()
    notes = made.Notes()
    assert base == read_base(tmp_path / "one.tar", name=base.name, store=other, progress=notes)
    assert bases.held(other, base)
    assert notes.lines == [f"base {base.name} @ {base.manifest_digest} ({tmp_path / 'one.tar'})"]


def test_damaged_file(store: Store, other: Store, tmp_path: Path) -> None:
    """A byte changed inside a layer is exit 7, and nothing is recorded."""
    base = made.add(store, mark="to be damaged")
    path = tmp_path / "b.tar"
    write_base(base, path, store=store, progress=Silent())
    path.write_bytes(path.read_bytes().replace(b"to be damaged", b"to be DAMAGED"))
    with pytest.raises(VerificationError, match="kitbuild/base-cpu: layer 2 of 2: sha256 is"):
        read_base(path, name=base.name, store=other, progress=Silent())
    assert not other.records("bases")


def test_place_that_cannot_be_written(store: Store, tmp_path: Path) -> None:
    """Exit 5, naming the place; no part is left."""
    (tmp_path / "taken.tar").mkdir()
    with pytest.raises(ImageError, match=r"taken\.tar cannot be written: Is a directory"):
        write_base(made.add(store), tmp_path / "taken.tar", store=store, progress=Silent())
    assert [path.name for path in tmp_path.glob(".taken*")] == []


def test_push(store: Store, registry: str) -> None:
    """The registry's digest is the one that locks name."""
    base = made.add(store)
    notes = made.Notes()
    where = push_base(base, f"{registry}/share/base:1", store=store, environ={}, progress=notes)
    assert where == f"{registry}/share/base@{base.manifest_digest}"
    assert notes.lines == [f"pushed {where}"]
