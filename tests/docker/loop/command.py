"""The command line as a user runs it: a process, its exit code, its one JSON object."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

CHECKOUT = Path(__file__).parents[3]
ERROR_KEYS = {"schema", "code", "exit_code", "message", "hint", "problems"}
PROBLEM_KEYS = {"file", "line", "column", "key", "message", "hint"}
CODES = {1: "unexpected", 2: "recipe", 3: "lock", 4: "resolve", 5: "image", 6: "run", 7: "verification", 10: "stopped"}
TIMEOUT_SECONDS = 600


def _listens_to_ctrl_c() -> None:
    # A job that a shell put into the background inherits "ignore": https://docs.python.org/3/library/signal.html
    signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass(frozen=True, kw_only=True)
class Kitbuild:
    """The program in one environment: `kit("lock", recipe)` is the JSON of a success."""

    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    within: tuple[str, ...] = ()
    """Words before the command: a program that starts it."""

    def given(self, **variables: str | None) -> Kitbuild:
        """The same with other variables; None removes one."""
        joined = {**self.environ, **variables}
        return replace(self, environ={key: value for key, value in joined.items() if value is not None})

    def start(self, *arguments: object) -> Running:
        """Start it in a process group of its own, as a shell does."""
        command = [*self.within, sys.executable, "-m", "kitbuild", *map(str, arguments)]
        process = subprocess.Popen(
            command,
            env={**self.environ, "PYTHONPATH": str(CHECKOUT)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=_listens_to_ctrl_c,  # noqa: PLW1509 - one thread forks here, and nothing is locked
        )
        return Running(process)

    def ends(self, *arguments: object) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        return self.start(*arguments).end()

    def __call__(self, *arguments: object, exit_code: int = 0) -> dict[str, Any]:
        """The object of a command that ends with `exit_code` and gives a result."""
        code, out, err = self.ends(*arguments, "--json")
        assert (exit_code, "") == (code, err), f"{arguments}: exit {code}\n{out}\n{err}"
        return one_object(out)

    def fails(self, exit_code: int, *arguments: object) -> dict[str, Any]:
        """The error of a command that fails with `exit_code`: one object, well formed, and nothing else."""
        code, out, err = self.ends(*arguments, "--json")
        assert (exit_code, "") == (code, err), f"{arguments}: exit {code}\n{out}\n{err}"
        return checked_error(one_object(out), exit_code)

    def says(self, exit_code: int, *arguments: object) -> str:
        """What a person reads on stderr of a command that fails: one error line, no traceback, nothing on stdout."""
        code, out, err = self.ends(*arguments)
        assert (exit_code, "") == (code, out), f"{arguments}: exit {code}\n{out}\n{err}"
        assert "Traceback" not in err
        assert sum(line.startswith("error: ") for line in err.splitlines()) == 1, err
        return err


@dataclass(frozen=True)
class Running:
    """A command that was started."""

    process: subprocess.Popen[str]

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Ctrl-C in the terminal: to the whole process group."""
        os.killpg(self.process.pid, number)

    def end(self, *, timeout_seconds: float = TIMEOUT_SECONDS) -> tuple[int, str, str]:
        """Wait for it; exit code, stdout, stderr."""
        try:
            out, err = self.process.communicate(timeout=timeout_seconds)
        except BaseException:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()
            raise
        return self.process.returncode, out, err


def one_object(out: str) -> dict[str, Any]:
    """The single line of JSON on stdout."""
    (line,) = out.splitlines()
    value = json.loads(line)
    assert isinstance(value, dict)
    return value


def checked_error(error: dict[str, Any], exit_code: int) -> dict[str, Any]:
    """`kitbuild.error/1` with all its fields."""
    assert error["schema"] == "kitbuild.error/1"
    assert error.keys() >= ERROR_KEYS
    assert error["exit_code"] == exit_code
    assert error["code"] in {CODES.get(exit_code), "usage"} or exit_code == 130
    assert error["message"]
    assert "Traceback" not in error["message"]
    assert all(problem.keys() == PROBLEM_KEYS for problem in error["problems"])
    return error


def eventually(what: str, found: Callable[[], object], *, seconds: float = 120.0) -> Any:
    """The first true answer."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if answer := found():
            return answer
        time.sleep(0.05)
    raise AssertionError(f"{what}: not within {seconds:g} s")
