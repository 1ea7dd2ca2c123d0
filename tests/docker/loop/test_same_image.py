"""The same lock on another machine: the same image, to the digest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.docker.loop.command import CHECKOUT
from tests.docker.loop.stores import new_machine
from tests.image import scan

if TYPE_CHECKING:
    from kitbuild.store import Store
    from tests.docker.loop.command import Kitbuild
    from tests.docker.loop.conftest import Baseline

BLOCK_BYTES = 4096
pytestmark = [pytest.mark.docker, pytest.mark.slow]


def test_same_image_from_an_empty_store(kit: Kitbuild, baseline: Baseline, store: Store, tmp_path: Path) -> None:
    """Another user, umask, time zone, locale, hash seed, temporary directory and one processor, and a store with
    downloads only: the same digests, no trace of the machine and its secrets in any layer,
    and hardly more bytes than the same files take on a disk."""
    home = new_machine(store, tmp_path / "home-of-the-store", baseline.lock, modules=False)
    (tmp_path / "scratch").mkdir()
    other = {
        **scan.SECRETS,
        "KITBUILD_HOME": str(home),
        "TMPDIR": str(tmp_path / "scratch"),
        "TZ": "Asia/Kathmandu",
        "LANG": "tr_TR.UTF-8",
        "LC_ALL": "C",
        "PYTHONHASHSEED": "123",
        "PYTHONPATH": str(CHECKOUT),
        "SOURCE_DATE_EPOCH": "86400",
    }
    within = ["unshare", "--user", "--map-user=12345", "--map-group=12345"]
    within += ["taskset", "--cpu-list", str(min(os.sched_getaffinity(0)))]
    done = subprocess.run(
        [*within, sys.executable, "-m", "kitbuild", "image", baseline.recipe, "--json"],
        env={**kit.environ, **other},
        umask=0o077,
        cwd=os.sep,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    image = json.loads(done.stdout)
    assert baseline.image["lock_sha256"] == image["lock_sha256"]
    assert [layer["digest"] for layer in baseline.image["layers"]] == [layer["digest"] for layer in image["layers"]]
    for key in ("image_id", "manifest_digest", "content_sha256"):
        assert baseline.image[key] == image[key]
    assert list((tmp_path / "scratch").iterdir()) == []
    locked = {wheel.name for wheel in baseline.lock.wheels}
    words = (*scan.WORDS, *scan.words_of_this_machine(tmp_path, CHECKOUT, store.root, Path(sys.prefix)))
    installed = 0
    for layer in image["layers"]:
        path = home / "blobs/sha256" / layer["digest"][7:9] / layer["digest"][7:]
        assert scan.found_words(path, words) == set(), layer["name"]
        assert list(scan.unwanted(path, locked=locked)) == [], layer["name"]
        with tarfile.open(path) as archive:
            installed += sum(-(-member.size // BLOCK_BYTES) for member in archive if member.isfile()) * BLOCK_BYTES
    assert sum(layer["size"] for layer in image["layers"]) <= 1.02 * installed
