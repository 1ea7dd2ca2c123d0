"""What an earlier lock fixed, under each name that it may be called by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kitbuild.lock.models import LockedDataset, LockedModel, LockedTree, Moved
from kitbuild.lock.pins import names, pins_of
from tests.image.kit import COMMIT, locked_file, make_kernel, make_lock

if TYPE_CHECKING:
    from kitbuild.lock.models import Lock
    from kitbuild.store import Store

OLD = "d" * 40


@pytest.fixture
def lock(store: Store) -> Lock:
    """A model and a dataset that were renamed since the recipe was written, and a kernel that was sent on twice."""
    files = (locked_file(store, "x", b"x"),)

    def tree(repo: str) -> LockedTree:
        return LockedTree(repo=repo, revision="main", commit=COMMIT, files=files)

    dataset: dict[str, Any] = {"format": "json", "config": None, "split": "train", "data_files": ("x",)}
    moved = (Moved(repo="org/first", revision="v1", commit=OLD), Moved(repo="org/second", revision="v2", commit=OLD))
    kernel = make_kernel(store).model_copy(update={"redirects": moved})
    return make_lock(
        store,
        kernels=(kernel,),
        model=LockedModel(weights=tree("org/model"), config=None, tokenizer=tree("org/tokenizer"), chat_template=None),
        datasets=(LockedDataset(tree=tree("org/data"), **dataset),),
        evaluate=LockedDataset(tree=tree("org/held-out"), **dataset),
        recipe={
            "model": {"repo": "org/model-before", "tokenizer": {"repo": "org/tokenizer"}},
            "dataset": [{"repo": "org/data-before"}],
            "evaluate": {"dataset": {"repo": "org/held-out"}},
        },
    )


EVERYTHING = {
    ("model", "org/model", "main"): COMMIT,
    ("model", "org/model-before", "main"): COMMIT,
    ("model", "org/tokenizer", "main"): COMMIT,
    ("dataset", "org/data", "main"): COMMIT,
    ("dataset", "org/data-before", "main"): COMMIT,
    ("dataset", "org/held-out", "main"): COMMIT,
    ("kernel", "org/first", "v1"): OLD,
    ("kernel", "org/second", "v2"): OLD,
    ("kernel", "org/tiny", "v1"): COMMIT,
}


@pytest.mark.parametrize(
    ("update", "moves"),
    [
        ((), ()),
        (("org/model",), ("org/model", "org/model-before")),
        (("org/data-before",), ("org/data", "org/data-before")),
        (("org/tokenizer", "org/held-out"), ("org/tokenizer", "org/held-out")),
        (("org/first",), ("org/first", "org/second", "org/tiny")),
        (("org/tiny",), ("org/first", "org/second", "org/tiny")),
    ],
)
def test_commits(lock: Lock, update: tuple[str, ...], moves: tuple[str, ...]) -> None:
    """A repository stays or moves as a whole: by the recipe's name, by today's, and all the way of a kernel."""
    expected = {place: commit for place, commit in EVERYTHING.items() if place[1] not in moves}
    found = pins_of(lock, frozenset(update), target="cpu")
    assert found.commits == expected
    assert found.versions == {"tool": "1.0", "torch": "1.0"}
    assert found.base == lock.base.manifest_digest


def test_packages_and_base(lock: Lock) -> None:
    """A package by any spelling of its name, and the base, move alone; another target keeps the commits only."""
    assert pins_of(lock, frozenset({"Torch"}), target="cpu").versions == {"tool": "1.0"}
    base = pins_of(lock, frozenset({"base"}), target="cpu")
    assert (base.base, base.versions, base.commits) == (None, {"tool": "1.0", "torch": "1.0"}, EVERYTHING)
    other = pins_of(lock, frozenset(), target="cuda128")
    assert (other.base, other.versions, other.commits) == (None, {}, EVERYTHING)
    none = pins_of(None, frozenset(), target="cpu")
    assert (none.base, none.versions, none.commits) == (None, {}, {})


def test_names(lock: Lock) -> None:
    """Each of these may be told to move."""
    assert names(lock) == {"base", "tool", "torch", *(repo for _, repo, _ in EVERYTHING)}
