"""A bundle, carried to a machine with an engine and no network, is enough: the same image, and the same values."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kitbuild.lock.files import lock_path
from tests.docker.loop.recipes import KERNELS, TINY, read_lock, recipe
from tests.hub.fixtures import standard_hub

if TYPE_CHECKING:
    from pathlib import Path

    from tests.docker.loop.command import Kitbuild

pytestmark = [pytest.mark.docker, pytest.mark.slow_extra]
ROOT = () if os.geteuid() == 0 else ("--user", "--map-root-user")
CUT_OFF = ("unshare", *ROOT, "--net")
BUILT = {"  cuda: cpu\n": "  cuda: cpu\n  packages: {deepspeed: 0.19.8}\n"}
"""DeepSpeed is published as a source only: its wheel was built here, and cannot be downloaded by anyone."""


def moved(path: Path, folder: Path) -> Path:
    """The recipe and its lock, without the data beside them."""
    folder.mkdir()
    for file in (path, lock_path(path)):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder / path.name


def test_bundle_is_enough(kit: Kitbuild, tmp_path: Path) -> None:
    """Wheels (one built from source), base, kernels, model and data come out of one file; the network is cut."""
    with standard_hub(tmp_path / "hub") as hub:
        there = kit.given(**hub.environment(tmp_path / "hf"))
        path = recipe(tmp_path / "here", KERNELS, changed=BUILT)
        there("lock", path)
        fetched = there("fetch", path, "--bundle", tmp_path / "bundle.tar")
        image = there("image", path)
    run = kit("run", path, "--out", tmp_path / "runs")
    (built,) = [wheel for wheel in read_lock(path).wheels if wheel.built is not None]
    assert built.name == "deepspeed"

    lonely = replace(
        kit.given(KITBUILD_HOME=str(tmp_path / "store"), HOME=str(tmp_path / "home"), UV_CACHE_DIR=None), within=CUT_OFF
    )
    there_path = moved(path, tmp_path / "there")
    missing = lonely.fails(4, "image", there_path)
    assert missing["message"]
    carried = lonely("fetch", there_path, "--from", tmp_path / "bundle.tar")
    assert (carried["blobs"], carried["bytes"]) == (fetched["blobs"], fetched["bytes"])
    again = lonely("image", there_path)
    for key in ("image_id", "manifest_digest", "content_sha256", "lock_sha256"):
        assert image[key] == again[key]
    other = lonely("run", there_path, "--out", tmp_path / "runs")
    assert kit("compare", run["run_dir"], other["run_dir"])["verdict"] == "IDENTICAL"
    assert lonely("store", "verify")["damaged"] == 0


def test_bundle_for_another_lock_is_not_enough(kit: Kitbuild, tmp_path: Path) -> None:
    """What a bundle lacks is said by name, exit 4; what it has is kept."""
    path = recipe(tmp_path / "here", TINY)
    kit("lock", path)
    kit("fetch", path, "--bundle", tmp_path / "bundle.tar")
    other = recipe(tmp_path / "other", TINY, changed=BUILT)
    kit("lock", other)
    lonely = replace(kit.given(KITBUILD_HOME=str(tmp_path / "store"), UV_CACHE_DIR=None), within=CUT_OFF)
    error = lonely.fails(4, "fetch", moved(other, tmp_path / "there"), "--from", tmp_path / "bundle.tar")
    assert "deepspeed" in str(error)
    assert lonely("fetch", moved(path, tmp_path / "right"))["blobs"] > 50
