"""Where words go: results to stdout, the rest to stderr, bars only on a terminal."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kitbuild.errors import LockError, Problem
from kitbuild.terminal import Terminal

REPOSITORY = Path(__file__).resolve().parents[1]


def talk(terminal: Terminal) -> None:
    """Everything that a step may say."""
    terminal.note("a decision")
    with terminal.activity("Fetching", total=2e6, unit="bytes") as outer:
        outer(1e6)
        with terminal.activity("Hashing", total=None, unit="files") as inner:
            inner(1)
            terminal.detail("one file")
        terminal.note("another decision")
        outer(1e6)
    terminal.detail("nothing runs")


@pytest.mark.parametrize(
    ("verbose", "expected"),
    [(False, ""), (True, "a decision\nFetching …\nanother decision\n")],
    ids=["quiet", "verbose"],
)
@pytest.mark.parametrize("json_output", [False, True], ids=["text", "json"])
def test_no_terminal(*, verbose: bool, json_output: bool, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In a pipe or a log there are no bars; notes only when they are asked for, on stderr."""
    terminal = Terminal(verbose=verbose, json_output=json_output)
    talk(terminal)
    terminal.result("x", {"a": 1}, "done\n\n")
    captured = capsys.readouterr()
    assert captured.err == expected
    assert captured.out == ('{"a": 1, "schema": "kitbuild.x/1"}\n' if json_output else "done\n")


def test_a_log_hears_once_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    """With -v in a log, each activity that goes on says every minute how far it is, and no more often."""
    now = [0.0]
    terminal = Terminal(verbose=True, json_output=False, clock=lambda: now[0])
    with terminal.activity("bench", total=4, unit="cells") as cells, terminal.activity("run", total=None, unit=""):
        for second in range(0, 150, 10):
            now[0] = float(second)
            terminal.detail(f"step {second}")
        cells(1)
        cells(1)
    with terminal.activity("Fetching", total=2e6, unit="bytes") as fetched:
        now[0] += 60
        fetched(1e6)
    told = ["bench …", "run: step 60", "run: step 120", "bench: 1/4 cells", "Fetching …", "Fetching: 1.0 MB/2.0 MB"]
    assert capsys.readouterr().err.splitlines() == told


def test_empty_result_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """No stray newline."""
    Terminal(verbose=False, json_output=False).result("x", {}, "")
    assert capsys.readouterr().out == ""


def test_error_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    """A fact, each problem with its place and hint, then what to do."""
    problems = [Problem(message="is wrong", file="r.yaml", line=3, hint="use 42"), Problem(message="is missing")]
    Terminal(verbose=False, json_output=False).error(LockError("it is stale", hint="lock again", problems=problems))
    assert capsys.readouterr() == (
        "",
        "error: it is stale\nr.yaml:3: is wrong\n  hint: use 42\nis missing\nhint: lock again\n",
    )


def test_markup_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets in names are printed as they are."""
    terminal = Terminal(verbose=True, json_output=False)
    terminal.note("liger[bold]")
    terminal.result("x", {}, "[red]/home/[u]")
    assert capsys.readouterr() == ("[red]/home/[u]\n", "liger[bold]\n")


PROGRAM = """
from kitbuild.terminal import Terminal
from tests.test_terminal import talk
import time
terminal = Terminal(verbose=False, json_output={json})
with terminal.activity("Fetching [all]", total=2e6, unit="bytes") as advance:
    terminal.note("liger[bold] → x")
    terminal.detail("step 3/20 · loss 1.25")
    advance(1e6)
    with terminal.activity("Hashing", total=40, unit="files") as inner:
        inner(12)
        terminal.detail("inner detail")
        time.sleep(0.3)
    time.sleep(0.3)
talk(terminal)
terminal.result("x", {{"a": 1}}, "done")
"""


def on_a_terminal(program: str) -> tuple[str, str]:
    """stdout, and what a person sees of stderr."""
    master, slave = pty.openpty()
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY), "TERM": "xterm", "COLUMNS": "120"}
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environ, stdin=slave, stdout=subprocess.PIPE, stderr=slave
    ) as process:
        os.close(slave)
        seen = b""
        while True:
            try:
                data = os.read(master, 65536)
            except OSError:  # the other end is closed
                break
            if not data:
                break
            seen += data
        out = process.stdout.read().decode() if process.stdout else ""
    os.close(master)
    assert process.returncode == 0, seen.decode()
    return out, seen.decode()


def test_bars_on_a_terminal() -> None:
    """Titles, amounts and details are drawn on stderr; stdout has the result alone."""
    out, seen = on_a_terminal(PROGRAM.format(json=False))
    assert out == "done\n"
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen)
    for words in ("Fetching [all]", "1.0 MB/2.0 MB", "step 3/20 · loss 1.25", "12/40 files", "inner detail"):
        assert words in plain
    assert "liger[bold] → x" in plain
    assert seen.rstrip("\r\n").endswith("\x1b[?25h") or "\x1b[?25h" in seen  # the cursor is back


def test_json_on_a_terminal() -> None:
    """The object is one line on stdout, however much is drawn; decisions are not told."""
    out, seen = on_a_terminal(PROGRAM.format(json=True))
    assert out == '{"a": 1, "schema": "kitbuild.x/1"}\n'
    assert "liger[bold]" not in seen
