"""Filling the store and carrying it to a machine with no network."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from kitbuild.errors import ImageError, LockError, ResolveError, UsageError
from kitbuild.flow import building
from kitbuild.flow.context import Context
from kitbuild.image import HostCompiler, assemble
from kitbuild.lock.closure import closure
from kitbuild.lock.files import lock_path, read_lock, write_lock
from kitbuild.lock.models import Built, LockedWheel
from kitbuild.progress import Silent
from kitbuild.recipe import read
from tests.image.kit import locked_wheel, make_lock, make_wheel, new_store

REPOSITORY = Path(__file__).resolve().parents[2]


class NoEngine(Context):
    """A context in which nobody may ask for an engine."""

    def client(self) -> Any:
        raise ImageError("the engine was asked for")


def context(folder: Path) -> Context:
    return NoEngine(environ={}, store=new_store(folder), progress=Silent())


@pytest.fixture
def full(tmp_path: Path) -> Context:
    return context(tmp_path / "full")


@pytest.fixture
def recipe(tmp_path: Path, full: Context) -> Path:
    """A recipe with a current lock, all of whose files are in the store `full`."""
    shutil.copytree(REPOSITORY / "recipes/data", tmp_path / "data")
    path = Path(shutil.copy(REPOSITORY / "recipes/tiny-cpu.yaml", tmp_path / "tiny.yaml"))
    write_lock(path, make_lock(full.store, wheels(full), recipe_sha256=read(path).sha256))
    return path


def wheels(context: Context) -> tuple[LockedWheel, ...]:
    """One from an index, one that was built from source, which no index has."""
    built = Built(sdist_sha256="5" * 64, python="3.11", requires=("setuptools==80.9.0",), env={"TZ": "UTC"})
    made = locked_wheel(context.store, *make_wheel("made", {"made.py": b"x = 1\n"}))
    plain = locked_wheel(context.store, *make_wheel("tool", {"tool.py": b"x = 2\n"}))
    return plain, made.model_copy(update={"index": "built", "built": built})


def test_bundle_carries_everything(full: Context, recipe: Path, tmp_path: Path) -> None:
    """From one store through a file into an empty one: nothing else is asked, and the lock is complete there."""
    bundle = tmp_path / "b.tar"
    told = building.fetch(full, recipe, bundle=bundle, source=None)
    assert told.fields["bundle"] == str(bundle)
    other = context(tmp_path / "other")
    carried = building.fetch(other, recipe, bundle=None, source=bundle)
    assert carried.fields == {key: value for key, value in told.fields.items() if key != "bundle"}
    assert carried.fields["blobs"] == len(closure(make_lock(other.store, wheels(other))))


def test_carried_closure_gives_the_image(full: Context, recipe: Path, tmp_path: Path) -> None:
    """On the other machine the image is assembled from what came out of the bundle, to the same digests."""
    building.fetch(full, recipe, bundle=tmp_path / "b.tar", source=None)
    other = context(tmp_path / "other")
    building.fetch(other, recipe, bundle=None, source=tmp_path / "b.tar")
    lock = read_lock(recipe)
    assert lock is not None
    compiler = HostCompiler(Path(sys.executable))
    images = [
        assemble(lock, recipe=recipe.read_bytes(), store=place.store, compiler=compiler, progress=Silent())
        for place in (full, other)
    ]
    assert images[0].manifest_digest == images[1].manifest_digest


def test_bundle_without_the_lock(full: Context, recipe: Path, tmp_path: Path) -> None:
    """A bundle does not bring the lock: exit 3 that says so, and nobody is asked for a new one."""
    building.fetch(full, recipe, bundle=tmp_path / "b.tar", source=None)
    lock_path(recipe).unlink()
    with pytest.raises(LockError, match=r"there is no .*tiny\.lock\.json: a bundle has the files of a lock"):
        building.fetch(context(tmp_path / "other"), recipe, bundle=None, source=tmp_path / "b.tar")
    assert not lock_path(recipe).exists()


def test_bundle_of_another_lock(full: Context, recipe: Path, tmp_path: Path) -> None:
    """What it lacks is listed, exit 4, and the network is not asked; what it has stays in the store."""
    building.fetch(full, recipe, bundle=tmp_path / "b.tar", source=None)
    more = locked_wheel(full.store, *make_wheel("more", {"more.py": b"x = 3\n"}))
    write_lock(recipe, make_lock(full.store, (*wheels(full), more), recipe_sha256=read(recipe).sha256))
    other = context(tmp_path / "other")
    with pytest.raises(ResolveError, match=r"b\.tar lacks 1 of the lock's files, such as more-1\.0-") as caught:
        building.fetch(other, recipe, bundle=None, source=tmp_path / "b.tar")
    assert [problem.message for problem in caught.value.problems] == [f"{more.file} is not in the store"]
    assert all(other.store.has(wheel.sha256) for wheel in wheels(full))


def test_bundle_that_cannot_be_written(full: Context, recipe: Path) -> None:
    """Exit 2 that names the file."""
    with pytest.raises(UsageError, match=r"^/proc/none/b\.tar cannot be written: "):
        building.fetch(full, recipe, bundle=Path("/proc/none/b.tar"), source=None)


def test_bundle_on_a_full_disk(full: Context, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit 2 that names the file and not the store; nothing half-made is left."""

    def no_space(_stream: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_space)
    place = tmp_path / "full-disk"
    place.mkdir()
    with pytest.raises(UsageError, match=r"b\.tar cannot be written: No space left on device$"):
        building.fetch(full, recipe, bundle=place / "b.tar", source=None)
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("content", [None, b"", b"no tar"])
def test_bundle_that_is_none(content: bytes | None, full: Context, recipe: Path, tmp_path: Path) -> None:
    """Exit 2, and the store stays as it was."""
    bundle = tmp_path / "b.tar"
    if content is not None:
        bundle.write_bytes(content)
    other = context(tmp_path / "other")
    with pytest.raises(UsageError, match="bundle"):
        building.fetch(other, recipe, bundle=None, source=bundle)
    assert list((other.store.root / "blobs").rglob("*")) == [other.store.root / "blobs/sha256"]
    assert full.store.root.is_dir()


def test_both_at_once(full: Context, recipe: Path, tmp_path: Path) -> None:
    """--bundle and --from contradict each other."""
    with pytest.raises(UsageError, match="do not go together"):
        building.fetch(full, recipe, bundle=tmp_path / "a", source=tmp_path / "b")


def test_stale_lock_is_not_fetched(full: Context, recipe: Path) -> None:
    """Exit 3; `fetch` never locks anew over a lock that is there."""
    recipe.write_text(recipe.read_text() + "# a remark\n")
    before = lock_path(recipe).read_bytes()
    with pytest.raises(LockError, match="is stale"):
        building.fetch(full, recipe, bundle=None, source=None)
    assert lock_path(recipe).read_bytes() == before


def test_local_file_that_is_gone(full: Context, recipe: Path) -> None:
    """What has no upstream and is in no store cannot be made up: exit 4 that names it."""
    lock = make_lock(full.store)
    full.store.path(lock.datasets[0].tree.files[0].sha256).unlink()
    with pytest.raises(ResolveError, match=r"data\.jsonl .* is not in the store and has no upstream"):
        building.fetch(full, recipe, bundle=None, source=None)


@pytest.mark.parametrize("tag", ["Bad:Tag:x", "UPPER", "a//b", "x:", "-a", ""])
def test_a_tag_that_is_no_image_name(tag: str, tmp_path: Path) -> None:
    """A wrong --tag is a usage error, before anything is read."""
    with pytest.raises(UsageError, match="is not an image name"):
        building.image(cast("Any", None), tmp_path / "absent.yaml", tag=tag, push=None, output=None)


@pytest.mark.parametrize("tag", ["a", "team/qwen3:v1", "localhost:5000/a/b-c:1.0_x", "a__b"])
def test_a_tag_that_is_an_image_name(tag: str) -> None:
    """What Docker takes is taken."""
    assert building.TAG.fullmatch(tag)
