"""What goes wrong around a run: the exit code, one message, and everything left valid."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.docker.loop.recipes import read_lock, recipe

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


def test_damaged_input_is_found_before_training(kit: Kitbuild, store: Store, tmp_path: Path) -> None:
    """One flipped byte in the data that is mounted is exit 7, by name; nothing is trained; repaired, it runs."""
    path = recipe(tmp_path)
    data = tmp_path / "data" / "commands-train.jsonl"
    rows = data.read_bytes().splitlines(keepends=True)
    spaces = b" " * int.from_bytes(os.urandom(2), "big")  # bytes that no other recipe has; JSON ignores them
    data.write_bytes(b"".join((rows[0].rstrip(b"\n"), spaces, b"\n", *rows[1:])))
    kit("fetch", path)
    (file,) = read_lock(path).datasets[0].tree.files
    blob = store.path(file.sha256)
    damaged = bytearray(blob.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    blob.chmod(0o644)
    blob.write_bytes(damaged)

    error = kit.fails(7, "run", path, "--out", tmp_path / "runs")
    assert error["message"].startswith("1 of ")
    assert error["message"].endswith(f"/inputs/data/0/{file.path}")
    assert [problem["file"] for problem in error["problems"]] == [f"/inputs/data/0/{file.path}"]
    run_dir = Path(error["run_dir"])
    assert {"metrics.jsonl", "model"}.isdisjoint(item.name for item in run_dir.iterdir())
    assert kit("compare", run_dir, run_dir, exit_code=9)["verdict"] == "NOT_COMPARABLE"

    assert file.sha256 in str(kit.fails(7, "store", "verify", "--repair")["problems"])
    assert kit("store", "verify")["damaged"] == 0
    assert kit("run", path, "--out", tmp_path / "runs")["exit_code"] == 0


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


def test_resume_in_a_directory_of_somebody_else(kit: Kitbuild, baseline: Baseline, tmp_path: Path) -> None:
    """A run directory that belongs to another user, or that may not be written, is exit 6 and says which."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for name in ("lock.json", "recipe.yaml"):
        (theirs / name).write_bytes((baseline.run_dir / name).read_bytes())
    (theirs / "checkpoints/checkpoint-1").mkdir(parents=True)
    (theirs / "checkpoints/checkpoint-1/kit.json").write_text("{}")
    if os.geteuid() == 0:
        os.chown(theirs, 12345, 12345)
        expected = f"the run directory {theirs} belongs to uid 12345, not to you (uid 0)"
    else:  # only root can give a directory away
        theirs.chmod(0o500)
        expected = f"the run directory {theirs} is not writable"
    assert kit.fails(6, "run", baseline.recipe, "--resume", theirs)["message"] == expected


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
