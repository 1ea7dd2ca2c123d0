"""Run directories: their names, whose they are, and the list of them."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING

import pytest

from kitbuild.archive import claim_run_dir, list_runs, new_run_dir, read, run_name, show
from kitbuild.errors import RunError
from tests.archive.factory import Run

if TYPE_CHECKING:
    from pathlib import Path

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def test_a_name_holds_the_utc_time_and_six_hex_digits() -> None:
    """The time is UTC whatever zone the clock is in."""
    local = NOW.astimezone(timezone(timedelta(hours=9)))
    assert run_name("tiny", local, b"\xab\xcd\xef\x01") == "tiny-20260102T030405Z-abcdef"


def test_a_new_directory_is_usable_whatever_the_umask(tmp_path: Path) -> None:
    """A strict umask does not lock the container out of reading it."""
    old = os.umask(0o777)
    try:
        path = new_run_dir(tmp_path, "tiny", lambda: NOW, lambda _size: b"\0\1\2")
    finally:
        os.umask(old)
    assert path == tmp_path / "tiny-20260102T030405Z-000102"
    assert path.stat().st_mode & 0o777 == 0o755


def test_a_root_that_cannot_hold_runs_is_exit_6(tmp_path: Path) -> None:
    """The message names the place and the hint the flag."""
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError) as caught:
        new_run_dir(tmp_path / "file" / "runs", "tiny")
    assert caught.value.message == f"no run directory can be made in {tmp_path / 'file' / 'runs'}: Not a directory"
    assert caught.value.hint == "choose a place that you own with --out DIR"
    assert caught.value.exit_code == 6


def test_a_name_that_exists_is_not_taken_twice(tmp_path: Path) -> None:
    """Two runs never share a directory."""
    new_run_dir(tmp_path, "tiny", lambda: NOW, lambda _size: b"\0\1\2")
    with pytest.raises(RunError, match="File exists"):
        new_run_dir(tmp_path, "tiny", lambda: NOW, lambda _size: b"\0\1\2")


def test_a_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    """Owner and caller are named by uid, exit 6."""
    mine = tmp_path.stat().st_uid
    with pytest.raises(RunError) as caught:
        claim_run_dir(tmp_path, uid=mine + 1234)
    assert caught.value.message == f"the run directory {tmp_path} belongs to uid {mine}, not to you (uid {mine + 1234})"
    assert caught.value.exit_code == 6


def test_root_leaves_a_users_directory_alone(tmp_path: Path) -> None:
    """Root would have to give the directory to the container's uid, so it takes its own only."""
    if os.geteuid() == 0:
        os.chown(tmp_path, 4321, -1)
    with pytest.raises(RunError, match=r"belongs to uid \d+, not to you \(uid 0\)"):
        claim_run_dir(tmp_path, uid=0)


def test_an_empty_directory_of_ours_is_taken(tmp_path: Path) -> None:
    """A named directory is made, and found again while it is empty."""
    assert claim_run_dir(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert claim_run_dir(tmp_path / "a" / "b").is_dir()


def test_a_directory_with_something_in_it_is_taken_only_to_resume(tmp_path: Path) -> None:
    """A new run never mixes with an old one."""
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(RunError, match="is not empty"):
        claim_run_dir(tmp_path)
    assert claim_run_dir(tmp_path, resume=True) == tmp_path


def test_a_file_is_no_run_directory(tmp_path: Path) -> None:
    """A file in the way is exit 6."""
    (tmp_path / "x").write_text("")
    with pytest.raises(RunError, match="cannot be used: File exists"):
        claim_run_dir(tmp_path / "x")


def test_a_summary_says_what_a_person_asks(tmp_path: Path) -> None:
    """Steps, losses as decimals, what was learned, device and seed."""
    found = show(read(Run().write(tmp_path / "run")))
    assert (found.state, found.steps, found.loss_first, found.loss_last) == ("complete", 5, 2.875, 2.375)
    assert (found.exact_match_before, found.exact_match_after) == (0.0, 0.75)
    assert (found.loss_before, found.loss_after) == (2.0, 1.0)
    assert (found.device, found.seed, found.tensors, found.environment_locked) == ("cpu", 42, 2, True)
    assert found.as_json()["name"] == "run"


@pytest.mark.parametrize(
    "evaluate", [None, {"before": None, "after": 3}, {"before": {"loss": "x"}, "after": {"loss": 1}}]
)
def test_a_held_out_loss_that_is_not_there_is_none(tmp_path: Path, evaluate: object) -> None:
    """No evaluation, or one that a stranger wrote, is no number and no crash."""
    found = show(read(Run(manifest={"results": {"evaluate": evaluate}}).write(tmp_path / "run")))
    assert (found.loss_before, found.loss_after) == (None, None)


def test_a_list_shows_every_run_and_what_is_wrong_with_it(tmp_path: Path) -> None:
    """A damaged, a stopped, a failed and a killed run are listed with their state; other folders are not."""
    Run().write(tmp_path / "a-complete")
    Run(exit={"exit_code": 10}, manifest={"complete": False}).write(tmp_path / "b-stopped")
    Run(exit={"exit_code": 6}, manifest={"complete": False}).write(tmp_path / "c-failed")
    killed = Run(exit=None).write(tmp_path / "d-killed")
    (killed / "manifest.json").unlink()
    damaged = Run().write(tmp_path / "e-damaged")
    (damaged / "manifest.json").write_text("{")
    (tmp_path / "notes").mkdir()
    (tmp_path / "f.kit.tar").write_bytes(b"no tar")
    assert [(run.name, run.state) for run in list_runs(tmp_path)] == [
        ("a-complete", "complete"),
        ("b-stopped", "stopped"),
        ("c-failed", "failed"),
        ("d-killed", "unfinished"),
        ("e-damaged", "unreadable"),
        ("f.kit.tar", "unreadable"),
    ]


def test_no_directory_holds_no_runs(tmp_path: Path) -> None:
    """Before the first run there is nothing to list."""
    assert list_runs(tmp_path / "runs") == ()
