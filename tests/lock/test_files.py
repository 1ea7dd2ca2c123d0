"""The lock file: its bytes, and when it belongs to its recipe no more."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import kitbuild
from kitbuild import recipe as recipes
from kitbuild.errors import LockError
from kitbuild.lock.files import check_current, lock_path, parse_lock, read_lock, write_lock
from kitbuild.lock.models import LockedDataset, LockedModel, LockedTree, Maker
from tests.image.kit import locked_file, make_kernel, make_lock

if TYPE_CHECKING:
    from pathlib import Path

    from kitbuild.lock.models import Lock
    from kitbuild.recipe import LoadedRecipe
    from kitbuild.store import Store

RECIPE = """\
kitbuild: 1
name: tiny
model: {path: model, chat_template: chat.jinja}
dataset: {path: data.jsonl}
image: {cuda: cpu}
batch: {global: 1, micro: 1}
"""


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedRecipe:
    """A recipe with local files beside it."""
    folder = tmp_path / "recipes"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text("{}")
    (folder / "data.jsonl").write_text('{"text": "a"}\n')
    (folder / "chat.jinja").write_text("t")
    (folder / "tiny.yaml").write_text(RECIPE)
    return recipes.read(folder / "tiny.yaml")


@pytest.fixture
def lock(loaded: LoadedRecipe, store: Store) -> Lock:
    model = LockedModel(
        weights=LockedTree(path="model", files=(locked_file(store, "config.json", b"{}"),)),
        config=None,
        tokenizer=None,
        chat_template=locked_file(store, "chat.jinja", b"t"),
    )
    file = locked_file(store, "data.jsonl", b'{"text": "a"}\n')
    tree = LockedTree(path="data.jsonl", files=(file,))
    data = LockedDataset(tree=tree, format="json", config=None, split="train", data_files=("data.jsonl",))
    return make_lock(store, model=model, datasets=(data,), recipe_sha256=loaded.sha256)


def test_there_and_back(loaded: LoadedRecipe, lock: Lock) -> None:
    """A written lock is read as it was: sorted keys, one final newline; a second write changes nothing."""
    path, changed = write_lock(loaded.path, lock)
    assert (path, changed) == (loaded.path.with_name("tiny.lock.json"), True)
    data = path.read_bytes()
    assert data.endswith(b"}\n")
    assert not data.endswith(b"\n\n")
    fields = json.loads(data)
    assert list(fields) == sorted(fields)
    assert fields["content_sha256"] == lock.content_sha256
    assert read_lock(loaded.path) == lock
    assert write_lock(loaded.path, lock) == (path, False)
    assert not [item for item in path.parent.iterdir() if "lock" in item.name and item != path]
    check_current(loaded, lock)


def test_none_there(loaded: LoadedRecipe) -> None:
    """No file is no lock and no error."""
    assert read_lock(loaded.path) is None


def changed(lock: Lock, **fields: Any) -> bytes:
    return json.dumps({**json.loads(lock.to_bytes()), **fields}).encode()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{", r"^x\.lock\.json is not JSON: "),
        (b"\xff", r"^x\.lock\.json is not JSON: "),
        (b"[" * 100_000, r"^x\.lock\.json is not JSON: "),
        (b"[]", r"^x\.lock\.json is not a kitbuild lock$"),
        (b'{"a": 1}', r"^x\.lock\.json is not a kitbuild lock$"),
        (b'{"version": 2}', r"^x\.lock\.json has lock version 2; this kitbuild reads 1$"),
        (b'{"version": 1}', r"^x\.lock\.json is damaged$"),
    ],
)
def test_what_is_no_lock(data: bytes, message: str) -> None:
    """Anything else is exit 3 with what to do."""
    with pytest.raises(LockError, match=message) as caught:
        parse_lock(data, name="x.lock.json")
    assert "kitbuild" in (caught.value.hint or "")


def test_an_edited_lock(lock: Lock) -> None:
    """A value that was changed by hand, a key too many and one too few are exit 3."""
    with pytest.raises(LockError, match="was edited: content_sha256 is not of its content"):
        parse_lock(changed(lock, target="cuda129"), name="x.lock.json")
    with pytest.raises(LockError, match="was edited"):
        parse_lock(changed(lock, content_sha256=None), name="x.lock.json")
    with pytest.raises(LockError, match="is damaged") as caught:
        parse_lock(changed(lock, extra=1), name="x.lock.json")
    assert [problem.key for problem in caught.value.problems] == ["extra"]
    with pytest.raises(LockError, match="is damaged") as caught:
        parse_lock(changed(lock, wheels=None), name="x.lock.json")
    assert [problem.key for problem in caught.value.problems] == ["wheels"]


OUTSIDE = ("", "/etc/x", "../x", "a/../../x", "a//b", "./a", "a\0b")


@pytest.mark.parametrize("path", OUTSIDE)
def test_a_lock_names_nothing_outside(lock: Lock, path: str) -> None:
    """A stranger's lock, digests right, cannot make a file be written beside the store, or a run beside its folder."""
    tree, file = lock.datasets[0].tree, lock.datasets[0].tree.files[0].model_copy(update={"path": path})
    data = lock.datasets[0].model_copy(update={"tree": tree.model_copy(update={"files": (file,)})})
    wheel = lock.wheels[0].model_copy(update={"file": path})
    forged = lock.model_copy(update={"datasets": (data,), "wheels": (wheel,), "name": path})
    with pytest.raises(LockError, match="is damaged") as caught:
        parse_lock(forged.to_bytes(), name="x.lock.json")
    assert {"datasets.0.tree.files", "wheels.0.file", "name"} == {problem.key for problem in caught.value.problems}


def test_a_kernel_of_a_lock_stays_in_its_folder(store: Store) -> None:
    """Files, repository, revision and variant of a kernel become paths in the image."""
    kernel = make_kernel(store)
    file = kernel.files[0].model_copy(update={"path": "build/../../x"})
    outside = {"files": (file,), "repo": "../x", "revision": "/v1", "variant": "a/b"}
    forged = make_lock(store, kernels=(kernel.model_copy(update=outside),))
    with pytest.raises(LockError, match="is damaged") as caught:
        parse_lock(forged.to_bytes(), name="x.lock.json")
    assert {f"kernels.0.{name}" for name in outside} == {problem.key for problem in caught.value.problems}


def test_name_and_comments_change_no_content(lock: Lock) -> None:
    """`content_sha256` is of everything but the name and the recipe's own digest; `sha256` is of the bytes."""
    other = lock.model_copy(update={"name": "other", "recipe_sha256": "1" * 64})
    assert other.content_sha256 == lock.content_sha256
    assert other.sha256 != lock.sha256
    assert lock.model_copy(update={"target": "cuda129"}).content_sha256 != lock.content_sha256


def test_a_recipe_that_changed(loaded: LoadedRecipe, lock: Lock) -> None:
    """One byte of the recipe makes the lock stale: exit 3 with the command."""
    loaded.path.write_text(RECIPE + "# a comment\n")
    with pytest.raises(LockError, match=r"tiny\.lock\.json is stale: .*tiny\.yaml changed since$") as caught:
        check_current(recipes.read(loaded.path), lock)
    assert caught.value.hint == f"kitbuild lock {loaded.path}"


@pytest.mark.parametrize(
    ("name", "text", "key"),
    [
        ("data.jsonl", '{"text": "b"}\n', "dataset.0"),
        ("data.jsonl", '{"text": "longer"}\n', "dataset.0"),
        ("model/config.json", "[]", "model"),
        ("chat.jinja", "u", "model.chat_template"),
    ],
)
def test_local_files_that_changed(loaded: LoadedRecipe, lock: Lock, name: str, text: str, key: str) -> None:
    """An edited local file makes the lock stale and is named, also where its size is the same."""
    (loaded.path.parent / name).write_text(text)
    with pytest.raises(LockError, match="is stale: local files changed since") as caught:
        check_current(loaded, lock)
    (problem,) = caught.value.problems
    assert (problem.key, problem.file) == (key, str(loaded.path.parent / name))


def test_local_files_that_are_gone(loaded: LoadedRecipe, lock: Lock) -> None:
    """What is gone from disk is in the store or in a bundle: the lock stays current."""
    (loaded.path.parent / "data.jsonl").unlink()
    check_current(loaded, lock)


@pytest.mark.parametrize(
    ("maker", "which"),
    [
        ({"version": "0.0.1"}, "version"),
        ({"guest_sha256": "1" * 64}, "build"),
        ({"layout": 0}, "build"),
    ],
)
def test_another_kitbuild(loaded: LoadedRecipe, lock: Lock, maker: dict[str, Any], which: str) -> None:
    """Another version, guest or layout would give another image: exit 3 with the version to use."""
    other = lock.model_copy(update={"kitbuild": Maker(**{**lock.kitbuild.model_dump(), **maker})})
    with pytest.raises(LockError, match=f"^the lock was written by another {which} of kitbuild") as caught:
        check_current(loaded, other)
    assert f"install kitbuild {other.kitbuild.version}" in (caught.value.hint or "")
    assert kitbuild.__version__ in caught.value.message


def test_a_folder_that_cannot_be_written(lock: Lock, tmp_path: Path) -> None:
    """A lock that cannot be written is exit 3, not a crash."""
    (tmp_path / "file").touch()
    with pytest.raises(LockError, match=r"file/x\.lock\.json cannot be written"):
        write_lock(tmp_path / "file" / "x.yaml", lock)


def test_a_lock_that_is_a_folder(tmp_path: Path) -> None:
    """A lock that cannot be read is exit 3."""
    lock_path(tmp_path / "x.yaml").mkdir()
    with pytest.raises(LockError, match=r"x\.lock\.json cannot be read: Is a directory$"):
        read_lock(tmp_path / "x.yaml")
