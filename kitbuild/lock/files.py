"""The lock file beside its recipe: read, written, and whether it still belongs to the recipe.

Part of step 2; no network.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pydantic import ValidationError

import kitbuild
from kitbuild.errors import LockError, Problem
from kitbuild.guest_files import guest_sha256
from kitbuild.lock.models import LOCK_VERSION, Lock, LockedFile, LockedTree, Maker
from kitbuild.store import sha256_file
from kitbuild.store.blobs import write_atomically

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kitbuild.recipe import LoadedRecipe

LAYOUT = 2
"""Raised whenever the same lock would give another image."""


def lock_path(recipe_path: Path) -> Path:
    """`recipes/x.yaml` → `recipes/x.lock.json`."""
    return recipe_path.with_name(recipe_path.stem + ".lock.json")


def maker() -> Maker:
    """What wrote it: kitbuild, as the lock names it."""
    return Maker(version=kitbuild.__version__, guest_sha256=guest_sha256(), layout=LAYOUT)


def parse_lock(data: bytes, *, name: str) -> Lock:
    """A lock from its bytes; anything but a whole, untouched lock of this format is exit 3."""
    stem = name.removesuffix(".lock.json")
    again = "make it again: kitbuild lock " + (f"{stem}.yaml" if stem != name else "RECIPE")
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise LockError(f"{name} is not JSON: {error}", hint=again) from error
    if not isinstance(fields, dict) or "version" not in fields:
        raise LockError(f"{name} is not a kitbuild lock", hint=again)
    if fields["version"] != LOCK_VERSION:
        raise LockError(
            f"{name} has lock version {fields['version']}; this kitbuild reads {LOCK_VERSION}",
            hint="use the kitbuild that wrote it, or make it again with `kitbuild lock`",
        )
    told = fields.pop("content_sha256", None)
    try:
        lock = Lock.model_validate(fields)
    except ValidationError as error:
        problems = [
            Problem(file=name, key=".".join(map(str, item["loc"])), message=item["msg"]) for item in error.errors()
        ]
        raise LockError(f"{name} is damaged", hint=again, problems=problems) from error
    if told != lock.content_sha256:
        raise LockError(f"{name} was edited: content_sha256 is not of its content", hint=again)
    return lock


def read_lock(recipe_path: Path) -> Lock | None:
    """The lock beside a recipe, or None where there is none."""
    path = lock_path(recipe_path)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LockError(
            f"{path} cannot be read: {error.strerror}", hint="put the lock there, or remove what is in its place"
        ) from error
    return parse_lock(data, name=str(path))


def write_lock(recipe_path: Path, lock: Lock) -> tuple[Path, bool]:
    """Write the lock if its bytes changed. Returns its path and whether they did."""
    path = lock_path(recipe_path)
    data = lock.to_bytes()
    if path.is_file() and path.read_bytes() == data:
        return path, False
    try:
        write_atomically(path, data)
    except OSError as error:
        raise LockError(f"{path} cannot be written: {error.strerror}", hint="check who owns the folder") from error
    return path, True


def check_current(loaded: LoadedRecipe, lock: Lock, *, by_size: bool = False) -> None:
    """Raise, exit 3, where the lock does not belong to this recipe, its local files or this kitbuild.

    With `by_size`, local files are not hashed: a first look in milliseconds, for what comes before the real one.
    """
    check_maker(lock)
    hint = f"kitbuild lock {loaded.path}"
    if lock.recipe_sha256 != loaded.sha256:
        raise LockError(f"{lock_path(loaded.path)} is stale: {loaded.path} changed since", hint=hint)
    problems = list(_changed_files(lock, loaded.path.parent, by_size=by_size))
    if problems:
        raise LockError(f"{lock_path(loaded.path)} is stale: local files changed since", hint=hint, problems=problems)


def check_maker(lock: Lock) -> None:
    """Raise, exit 3, where another kitbuild wrote the lock: it would assemble another image."""
    ours = maker()
    if lock.kitbuild != ours:
        which = "version" if lock.kitbuild.version != ours.version else "build"
        raise LockError(
            f"the lock was written by another {which} of kitbuild ({lock.kitbuild.version},"
            f" guest {lock.kitbuild.guest_sha256[:12]}); this is {ours.version}, guest {ours.guest_sha256[:12]}",
            hint=f"install kitbuild {lock.kitbuild.version}, or lock anew with this one: kitbuild lock RECIPE",
        )


def _changed_files(lock: Lock, folder: Path, *, by_size: bool) -> Iterator[Problem]:
    """Local files that are there and are not the locked ones; what is gone is taken from the store."""
    for key, tree in local_trees(lock):
        place = folder / str(tree.path)
        for file in tree.files:
            path = place if place.is_file() else place / file.path
            if path.is_file() and not _same(path, file, by_size=by_size):
                yield Problem(file=str(path), key=key, message="is not the locked file any more")
    single = (("model.chat_template", lock.model.chat_template), ("image.pylock", lock.package_set.pylock))
    for key, one in single:
        if one is not None and (folder / one.path).is_file() and not _same(folder / one.path, one, by_size=by_size):
            yield Problem(file=str(folder / one.path), key=key, message="is not the locked file any more")


def local_trees(lock: Lock) -> Iterator[tuple[str, LockedTree]]:
    """Every tree that came from disk, by recipe key."""
    trees = [("model", lock.model.weights), ("model.tokenizer", lock.model.tokenizer)]
    trees += [(f"dataset.{index}", dataset.tree) for index, dataset in enumerate(lock.datasets)]
    trees += [("evaluate.dataset", lock.evaluate.tree)] if lock.evaluate else []
    yield from ((key, tree) for key, tree in trees if tree is not None and tree.path is not None)


def _same(path: Path, file: LockedFile, *, by_size: bool) -> bool:
    # Size first: hashing a checkpoint takes seconds, and most edits change the size.
    return path.stat().st_size == file.size and (by_size or sha256_file(path)[0] == file.sha256)
