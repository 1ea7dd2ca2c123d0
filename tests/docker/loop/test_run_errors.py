"""What goes wrong around a run: the exit code, one message, and everything left valid."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.docker.loop.recipes import recipe
from tests.docker.loop.stores import new_machine

if TYPE_CHECKING:
    from kitbuild.store import Store
    from tests.docker.loop.command import Kitbuild
    from tests.docker.loop.conftest import Baseline

pytestmark = pytest.mark.docker


def test_no_engine(kit: Kitbuild, baseline: Baseline, tmp_path: Path) -> None:
    """Without an engine `image` is exit 5 and `run` and `reproduce` are exit 6, before anything is made."""
    host = f"unix://{tmp_path}/no-engine.sock"
    dead = kit.given(DOCKER_HOST=host)
    runs = tmp_path / "runs"
    error = dead.fails(5, "image", baseline.recipe)
    assert error["message"] == f"no container engine answers at {host}"
    assert "kitbuild run --engine local" in error["hint"]
    for arguments in (("run", baseline.recipe), ("reproduce", baseline.run_dir)):
        failed = dead.fails(6, *arguments, "--out", runs)
        assert (failed["message"], failed["hint"]) == (error["message"], error["hint"])
    assert error["message"] in dead.says(6, "run", baseline.recipe, "--out", runs)
    assert not runs.exists()


def test_damaged_input_is_found_before_training(
    kit: Kitbuild, baseline: Baseline, store: Store, tmp_path: Path
) -> None:
    """One flipped byte in the data that is mounted is exit 7, by name; nothing is trained; repaired, it runs."""
    home = new_machine(store, tmp_path / "home", baseline.lock)
    mine = kit.given(KITBUILD_HOME=str(home))
    mine("fetch", baseline.recipe)
    (file,) = baseline.lock.datasets[0].tree.files
    blob = home / store.path(file.sha256).relative_to(store.root)
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.chmod(0o644)
    blob.write_bytes(data)
    error = mine.fails(7, "run", baseline.recipe, "--out", tmp_path / "runs")
    assert error["message"].startswith("1 of ")
    assert error["message"].endswith(f"/inputs/data/0/{file.path}")
    assert [problem["file"] for problem in error["problems"]] == [f"/inputs/data/0/{file.path}"]
    run_dir = Path(error["run_dir"])
    assert not (run_dir / "metrics.jsonl").exists() or not (run_dir / "metrics.jsonl").read_bytes()
    assert not (run_dir / "model").exists() or not list((run_dir / "model").iterdir())
    verdict = kit("compare", baseline.run_dir, run_dir, exit_code=9)
    assert verdict["verdict"] == "NOT_COMPARABLE"

    damaged = mine.fails(7, "store", "verify", "--repair")
    assert len(damaged["problems"]) == 1
    assert mine("store", "verify")["damaged"] == 0
    again = mine("run", baseline.recipe, "--out", tmp_path / "runs")
    assert kit("compare", baseline.run_dir, again["run_dir"])["verdict"] == "IDENTICAL"


def test_out_of_memory(kit: Kitbuild, tmp_path: Path) -> None:
    """A batch that no memory holds is exit 6, says so, and says what to lower."""
    changed = {
        "max_length: 128": "max_length: 128\n  pad_to_multiple_of: 65536",
        "max_position_embeddings: 256": "max_position_embeddings: 65536",
        "attention: sdpa": "attention: eager",
        "evaluate:                            # before and after training\n": "",
        "  dataset:\n    path: data/commands-heldout.jsonl\n  metric: exact_match\n": "",
        "  max_new_tokens: 16\n  examples: 16\n  batch: 16\n": "",
    }
    error = kit.fails(6, "run", recipe(tmp_path, changed=changed), "--out", tmp_path / "runs")
    assert error["message"].startswith("out of memory")
    assert "batch.micro" in error["hint"]


def test_run_directory_of_somebody_else(kit: Kitbuild, baseline: Baseline, tmp_path: Path) -> None:
    """A place where no run directory can be made is exit 6 before an image is started."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    error = kit.fails(6, "run", baseline.recipe, "--out", blocked / "runs")
    assert error["message"].startswith(f"no run directory can be made in {blocked / 'runs'}: Not a directory")
    assert error["hint"] == "choose a place that you own with --out DIR"
    if os.geteuid() != 0:
        closed = tmp_path / "closed"
        closed.mkdir(mode=0o500)
        assert "Permission denied" in kit.fails(6, "run", baseline.recipe, "--out", closed)["message"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_resume_in_a_directory_of_somebody_else(kit: Kitbuild, baseline: Baseline, tmp_path: Path) -> None:
    """A run directory that belongs to another user is exit 6 and names the owner."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for name in ("lock.json", "recipe.yaml"):
        (theirs / name).write_bytes((baseline.run_dir / name).read_bytes())
    os.chown(theirs, 12345, 12345)
    error = kit.fails(6, "run", baseline.recipe, "--resume", theirs)
    assert error["message"] == f"the run directory {theirs} belongs to uid 12345, not to you (uid 0)"


def test_wrong_calls(kit: Kitbuild, baseline: Baseline, tmp_path: Path) -> None:
    """Wrong calls are exit 2 and say what is right."""
    usage = kit.fails(2, "run", baseline.recipe, "--engine", "podman-machine")
    assert (usage["code"], usage["hint"]) == ("usage", "one of docker, local")
    usage = kit.fails(2, "run", baseline.recipe, "--python", "/usr/bin/python3")
    assert usage["message"] == "--python goes with --engine local"
    usage = kit.fails(2, "run", baseline.recipe, "--resume", tmp_path / "none")
    assert usage["message"].endswith("is not a run that can be resumed: No such file or directory")
    assert kit.fails(2, "run", baseline.recipe, "--no-such-flag")["code"] == "usage"
    assert kit.fails(2, "compare", baseline.run_dir, tmp_path / "none")["code"] == "usage"
