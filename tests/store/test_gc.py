"""Verifying a store and dropping what nobody asks for."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kitbuild.progress import Silent
from kitbuild.store.gc import Freed, drop_folders, drop_records, gc, verify

if TYPE_CHECKING:
    from pathlib import Path

    from kitbuild.store import Store


def spoil(path: Path) -> None:
    path.chmod(0o644)
    path.write_bytes(b"spoilt")


def test_a_sound_store_has_no_problem(store: Store) -> None:
    """Every blob hashes to its name."""
    store.add_bytes(b"one")
    assert verify(store, progress=Silent()) == ()


def test_a_spoilt_blob_is_found_and_removed_on_request(store: Store) -> None:
    """The problem names the file; `repair` removes it and the trees that share it, nothing else."""
    good, bad = store.add_bytes(b"one"), store.add_bytes(b"two")
    sound, shared = store.tree([("a", good)]), store.tree([("b", bad)])
    spoil(store.path(bad))
    problems = verify(store, progress=Silent())
    assert [problem.file for problem in problems] == [str(store.path(bad))]
    assert problems[0].message.startswith("6 bytes with sha256 ")
    assert store.has(bad)
    assert verify(store, progress=Silent(), repair=True)[0].hint == "removed; run `kitbuild fetch`"
    assert not store.has(bad)
    assert (sound.is_dir(), shared.is_dir()) == (True, False)


def test_gc_keeps_what_is_named(store: Store) -> None:
    """Other blobs, their trees and leftovers in work/ go; what is freed is counted."""
    kept, dropped = store.add_bytes(b"kept"), store.add_bytes(b"dropped")
    sound, old = store.tree([("a", kept)]), store.tree([("a", kept), ("b", dropped)])
    (store.root / "work" / f"{dropped}.part").write_bytes(b"dro")
    (store.root / "work" / "scratch").mkdir()
    assert gc(store, {kept}, min_age_seconds=0) == Freed(blobs=1, bytes=7, trees=1)
    assert (store.has(kept), store.has(dropped), sound.is_dir(), old.is_dir()) == (True, False, True, False)
    assert list((store.root / "work").iterdir()) == []


def test_gc_leaves_a_tree_that_was_just_used(store: Store) -> None:
    """A run may have it mounted: its blob goes, the tree stays, and a later gc takes what nothing else holds."""
    dropped = store.add_bytes(b"dropped")
    files = [("a", dropped)]
    tree = store.tree(files)
    for path in (store.path(dropped), tree):
        os.utime(path, (1, 1))
    assert store.tree(files) == tree
    assert gc(store, ()) == Freed(blobs=1, bytes=7, trees=0)
    assert (tree / "a").read_bytes() == b"dropped"
    os.utime(tree, (1, 1))
    assert gc(store, ()) == Freed(blobs=0, bytes=0, trees=1)
    assert not tree.exists()


def test_folders_are_dropped_by_name_and_age(store: Store) -> None:
    """What is kept, what is young and what is in the making stays; a link inside is not followed."""
    for name in ("kept", "young", "old", ".making"):
        folder = store.root / "envs" / name
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(b"12345")
        (folder / "link").symlink_to(store.root)
        if name != "young":
            os.utime(folder, (1, 1))
    assert drop_folders(store, "envs", {"kept"}) == Freed(bytes=5, trees=1)
    assert sorted(path.name for path in (store.root / "envs").iterdir()) == [".making", "kept", "young"]
    assert store.root.is_dir()


def test_records_of_what_is_gone_are_forgotten(store: Store) -> None:
    """Those that the caller calls dead, and damaged ones, which say nothing."""
    for name in ("live", "dead", "damaged"):
        store.write_record("layers", name, {"name": name})
    (store.root / "records/layers/damaged").write_bytes(b"{")
    assert drop_records(store, "layers", lambda key, value: key == "dead" == value["name"]) == 2
    assert store.records("layers") == {"live": {"name": "live"}}


def test_gc_leaves_what_is_young(store: Store) -> None:
    """A blob that another process has just put there stays."""
    young, old = store.add_bytes(b"young"), store.add_bytes(b"old")
    os.utime(store.path(old), (1, 1))
    assert gc(store, ()) == Freed(blobs=1, bytes=3, trees=0)
    assert store.has(young)
