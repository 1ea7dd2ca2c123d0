"""What a stop request becomes, by how far the guest had come."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from kitbuild.errors import RunError, StoppedError
from kitbuild.progress import Silent
from kitbuild.run.follow import Stop, follow, raise_for

if TYPE_CHECKING:
    from pathlib import Path


class Guest:
    """Runs for some turns of a clock that the test turns, then ends."""

    def __init__(self, turns: int = 0, code: int = 10) -> None:
        self._turns, self._code = turns, code
        self.stops = 0

    def exit_code(self) -> int | None:
        self._turns -= 1
        return None if self._turns >= 0 else self._code

    def stop(self) -> None:
        self.stops += 1

    def kill(self) -> None:
        raise AssertionError("following kills nobody")

    def out_of_memory(self) -> bool:
        return False


@pytest.mark.parametrize(("turns", "stops"), [(1, 1), (3, 1), (4, 1), (5, 2), (40, 10)])
def test_unheard_stop_is_repeated(turns: int, stops: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A guest that does not end is asked again after some seconds, not at every turn."""
    clock = [0.0]
    monkeypatch.setattr("kitbuild.run.follow.time.monotonic", lambda: clock[0])

    def sleep(_seconds: float) -> None:
        clock[0] += 1.0

    guest = Guest(turns)
    follow(guest, tmp_path, progress=Silent(), stop=Stop(requested=True), sleep=sleep)
    assert guest.stops == stops


def ended(run_dir: Path, code: int, told: dict[str, Any] | None, *, requested: bool) -> None:
    if told is not None:
        (run_dir / "exit.json").write_text(json.dumps({"exit_code": code, "message": "the fact"} | told))
    raise_for(code, Guest(), run_dir, stop=Stop(requested=requested))


def test_stop_after_a_step_is_resumable(tmp_path: Path) -> None:
    """Exit 10: there is a checkpoint."""
    with pytest.raises(StoppedError, match="the fact"):
        ended(tmp_path, 10, {"steps_done": 3}, requested=True)


@pytest.mark.parametrize(("code", "told"), [(10, {"steps_done": 0}), (143, None)])
def test_stop_before_the_first_step_is_an_interruption(code: int, told: dict[str, Any] | None, tmp_path: Path) -> None:
    """Exit 130: nothing was done, and there is nothing to resume."""
    with pytest.raises(KeyboardInterrupt):
        ended(tmp_path, code, told, requested=True)


def test_killed_by_somebody_else(tmp_path: Path) -> None:
    """The same end without a request is a failed run, not the user's Ctrl-C."""
    with pytest.raises(RunError, match=r"killed or crashed \(exit code 143\)"):
        ended(tmp_path, 143, None, requested=False)


def test_failure_while_stopping_is_told(tmp_path: Path) -> None:
    """A run that fails although it was asked to stop says how it failed."""
    with pytest.raises(RunError, match="the fact"):
        ended(tmp_path, 6, {"steps_done": 0}, requested=True)


def test_run_that_ended_before_it_heard(tmp_path: Path) -> None:
    """The last step was done when the request came: the run is complete."""
    ended(tmp_path, 0, {"steps_done": 9}, requested=True)
