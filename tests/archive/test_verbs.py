"""What `compare` and the `archive` verbs print."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kitbuild.errors import UsageError, VerificationError
from kitbuild.flow.archives import archive_list, archive_show, archive_verify, compare
from kitbuild.flow.context import Context
from kitbuild.progress import Silent
from tests.archive.factory import Run
from tests.image.kit import new_store

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context(environ={}, store=new_store(tmp_path / "store"), progress=Silent())


def failed() -> Run:
    exit_ = {"exit_code": 6, "message": "out of memory at step 1", "hint": "halve train.per_device_train_batch_size"}
    return Run(steps=[], exit=exit_, manifest={"complete": False, "device": None, "results": None})


def test_a_report_that_was_written_is_named(context: Context, tmp_path: Path) -> None:
    """After the verdict, as a line of its own; without `--report` there is none."""
    run, page = Run().write(tmp_path / "run"), tmp_path / "page.html"
    assert compare(context, run, run, report=page, tolerance=None).lines[-1] == f"wrote {page}"
    assert page.is_file()
    assert "wrote" not in compare(context, run, run, report=None, tolerance=None).text()


def test_a_recipe_is_not_compared(context: Context, tmp_path: Path) -> None:
    """Exit 2 on either side."""
    run, recipe = Run().write(tmp_path / "run"), tmp_path / "x.yaml"
    recipe.write_text("kitbuild: 1\n")
    for pair in ((recipe, run), (run, recipe)):
        with pytest.raises(UsageError, match=r"x\.yaml is neither a run directory nor a \.kit\.tar"):
            compare(context, *pair, report=None, tolerance=None)


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    """Its own message and hint come first, and no device that was never found is named."""
    lines = archive_show(failed().write(tmp_path / "run")).lines
    assert lines[:4] == (
        "run",
        "0 steps, failed",
        "error: out of memory at step 1",
        "hint: halve train.per_device_train_batch_size",
    )
    assert not any("None" in line for line in lines)


def test_a_complete_run_has_no_error(tmp_path: Path) -> None:
    """Nothing is said of what did not happen."""
    result = archive_show(Run().write(tmp_path / "run"))
    assert (result.fields["error"], result.fields["hint"]) == (None, None)
    assert not any(line.startswith(("error", "hint")) for line in result.lines)


def test_a_list_is_a_table(tmp_path: Path) -> None:
    """When, how far, what was learned; a run that failed has its reason."""
    Run().write(tmp_path / "a-good")
    failed().write(tmp_path / "b-failed")
    (tmp_path / "c.kit.tar").write_bytes(b"no tar")
    head, good, bad, damaged = archive_list(tmp_path).lines
    assert head.split("  ")[0] == "run"
    assert good.split() == [
        "a-good",
        "2026-01-01",
        "00:00",
        "complete",
        "5",
        "2.8750",
        "→",
        "2.3750",
        "0.0%",
        "→",
        "75.0%",
    ]
    assert bad.split()[:4] == ["b-failed", "2026-01-01", "00:00", "failed"]
    assert bad.endswith("(out of memory at step 1)")
    assert "unreadable" in damaged
    assert head.index("state") == good.index("complete") == bad.index(" failed") + 1 == damaged.index("unreadable")


def test_an_empty_folder_has_no_table(tmp_path: Path) -> None:
    """One plain line."""
    assert archive_list(tmp_path).lines == ("no runs",)


def test_each_problem_is_told_once(tmp_path: Path) -> None:
    """The message counts; the problems say what."""
    run = Run().write(tmp_path / "run")
    (run / "recipe.yaml").write_text("other")
    with pytest.raises(VerificationError) as caught:
        archive_verify(run)
    assert caught.value.message == f"{run} does not verify: 1 problem"
    assert [problem.file for problem in caught.value.problems] == [f"{run}/recipe.yaml"]
