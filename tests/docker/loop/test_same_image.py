"""The same lock on another machine: the same image, to the digest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.docker.loop.command import CHECKOUT
from tests.docker.loop.stores import new_machine

if TYPE_CHECKING:
    from pathlib import Path

    from kitbuild.store import Store
    from tests.docker.loop.command import Kitbuild
    from tests.docker.loop.conftest import Baseline

pytestmark = [pytest.mark.docker, pytest.mark.slow]


def test_same_image_from_an_empty_store(kit: Kitbuild, baseline: Baseline, store: Store, tmp_path: Path) -> None:
    """Another umask, time zone, locale and hash seed, and a store with downloads only: the same two digests."""
    home = new_machine(store, tmp_path / "home", baseline.lock, modules=False)
    other = {
        "KITBUILD_HOME": str(home),
        "TZ": "Asia/Kathmandu",
        "LANG": "tr_TR.UTF-8",
        "LC_ALL": "C",
        "PYTHONHASHSEED": "123",
        "PYTHONPATH": str(CHECKOUT),
        "SOURCE_DATE_EPOCH": "86400",
    }
    done = subprocess.run(
        [sys.executable, "-m", "kitbuild", "image", baseline.recipe, "--json"],
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
