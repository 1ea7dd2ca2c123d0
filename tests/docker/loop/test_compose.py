"""A rendered Compose file, started: the image that is only in this engine, and inputs as a directory."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.docker.loop.command import Kitbuild
    from tests.docker.loop.conftest import Baseline

pytestmark = [pytest.mark.docker, pytest.mark.slow_extra]


def compose(folder: Path, project: str, *words: str) -> str:
    user = {"KIT_USER": f"{os.geteuid() or 10001}:{os.getegid() or 10001}"}
    done = subprocess.run(
        ["docker-compose", "-p", project, "-f", "compose.yaml", *words],
        cwd=folder,
        env=os.environ | user,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_compose_file_trains(kit: Kitbuild, baseline: Baseline, tmp_path: Path) -> None:
    """What is rendered starts as it is, hardened, and gives the same bits; a finished run is not written over."""
    kit("fetch", baseline.recipe, "--inputs", tmp_path / "inputs")
    kit("render", "compose", baseline.recipe, "--output", tmp_path / "compose.yaml")
    (tmp_path / "out").mkdir()
    if os.geteuid() == 0:
        os.chown(tmp_path / "out", 10001, 10001)
    project = f"kit{os.getpid()}"
    try:
        compose(tmp_path, project, "up", "--exit-code-from", "train")
        verdict = kit("compare", baseline.run_dir, tmp_path / "out")
        kept = (tmp_path / "out/manifest.json").read_bytes()
        again = subprocess.run(
            ["docker-compose", "-p", project, "-f", "compose.yaml", "up", "--exit-code-from", "train"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        compose(tmp_path, project, "down")
    manifest = json.loads(kept)
    assert verdict["verdict"] == "IDENTICAL"
    hardened = {"cap_drop": "all", "network": "none", "new_privileges": False, "read_only_root": True}
    assert manifest["environment"]["hardening"] == hardened
    assert manifest["image"]["config_digest"] == baseline.image["image_id"]
    assert again.returncode == 0
    assert (tmp_path / "out/manifest.json").read_bytes() == kept
