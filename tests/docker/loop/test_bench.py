"""`kitbuild bench` with real training: one cell, twice, on this machine's processor."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.docker.loop.recipes import recipe

if TYPE_CHECKING:
    from pathlib import Path

    from tests.docker.loop.command import Kitbuild

pytestmark = [pytest.mark.train]


def test_a_cell(kit: Kitbuild, tmp_path: Path) -> None:
    """Step time, memory, share of the matrix product rate, the same bits twice; no run is left; again it is instant."""
    path = recipe(tmp_path)
    words = ("bench", path, "--engine", "local", "--length", 32, "--steps", 5, "--out", tmp_path / "out")
    told = kit(*words)
    (row,) = told["rows"]
    assert (row["state"], row["detail"]) == ("ok", None)
    assert row["deterministic"] is True
    assert 0 < row["fastest"] <= row["step_seconds"] <= row["slowest"] < row["ready_seconds"]
    assert 0 < row["mfu"] < 1
    assert row["peak_allocated_bytes"] > 1 << 20
    # Every row is full: 16 rows of 32 tokens a step.
    assert row["tokens_per_second"] == pytest.approx(16 * 32 * 2 / (row["fastest"] + row["slowest"]))
    assert told["device"]["kind"] == "cpu"
    assert not list((tmp_path / "out").glob("**/manifest.json"))
    before = (tmp_path / "out/rows.jsonl").read_bytes()
    assert kit(*words)["rows"] == [row]
    assert (tmp_path / "out/rows.jsonl").read_bytes() == before
    assert json.loads((tmp_path / "out/rows.json").read_text())["rows"] == [row]
