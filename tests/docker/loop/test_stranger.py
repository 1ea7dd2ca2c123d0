"""Somebody with an engine and one packed file: no recipe, no lock, no store, no network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.docker.loop.test_podman import podman

if TYPE_CHECKING:
    from tests.docker.loop.command import Kitbuild
    from tests.docker.loop.conftest import Baseline

pytestmark = [pytest.mark.docker, pytest.mark.slow_extra]
__all__ = ["podman"]
NOWHERE = "http://127.0.0.1:9"  # https://www.rfc-editor.org/rfc/rfc863: nobody listens


@pytest.fixture(scope="module")
def packed(kit: Kitbuild, baseline: Baseline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything of one run in one file."""
    path = tmp_path_factory.mktemp("packed") / "x.kit.tar"
    kit("archive", "pack", baseline.run_dir, "--include", "all", "--output", path)
    return path


def cut_off(kit: Kitbuild, home: Path, engine: str) -> Kitbuild:
    """A machine that has another engine, whose store is empty, and whose every way out leads nowhere."""
    dead = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "HF_ENDPOINT"), NOWHERE)
    indexes = {
        "PIP_INDEX_URL": NOWHERE,
        "UV_INDEX_URL": NOWHERE,
        "UV_DEFAULT_INDEX": NOWHERE,
        "PIP_CONFIG_FILE": "/dev/null",
    }
    return kit.given(KITBUILD_HOME=str(home), DOCKER_HOST=engine, UV_FIND_LINKS=None, **dead, **indexes)


def test_a_stranger_reproduces_a_run(
    kit: Kitbuild, baseline: Baseline, packed: Path, podman: str, tmp_path: Path
) -> None:
    """Image from the lock, the run, the comparison: the same image, IDENTICAL, exit 0; another loss is exit 8."""
    there = cut_off(kit, tmp_path / "home", podman)
    again = there("reproduce", packed, "--out", tmp_path / "runs")
    assert (again["schema"], again["verdict"], again["first_difference"]) == ("kitbuild.reproduce/1", "IDENTICAL", None)
    found = json.loads((Path(again["run_dir"]) / "manifest.json").read_bytes())
    assert found["image"]["config_digest"] == baseline.image["image_id"]
    assert found["environment"]["locked"] is True
    assert there("archive", "verify", packed)["archive_sha256"] == baseline.run["archive_sha256"]
    report = tmp_path / "report.html"
    assert there("compare", packed, again["run_dir"], "--report", report)["verdict"] == "IDENTICAL"
    assert "Every value is the same, bit for bit" in report.read_text(encoding="utf-8")


def test_a_damaged_file_runs_nothing(kit: Kitbuild, packed: Path, podman: str, tmp_path: Path) -> None:
    """One other bit in the middle is exit 7 before an image is made, and nothing of it stays."""
    data = bytearray(packed.read_bytes())
    data[len(data) // 2] ^= 1
    damaged = tmp_path / "damaged.kit.tar"
    damaged.write_bytes(data)
    there = cut_off(kit, tmp_path / "home", podman)
    told = there.fails(7, "reproduce", damaged, "--out", tmp_path / "runs")
    assert "does not verify" in told["message"]
    assert not (tmp_path / "runs").exists()
    assert not list((tmp_path / "home").rglob("*.part"))
