"""Following a run through its files, and what its end becomes."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import pytest

from kitbuild.errors import (
    KitbuildError,
    Problem,
    RecipeError,
    RunError,
    StoppedError,
    VerificationError,
)
from kitbuild.run.follow import Stop, describe, follow, raise_for, read_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class Guest:
    """Plays a script: at each turn a status (or raw bytes, or nothing) is written; after the last one it ends."""

    def __init__(self, run_dir: Path, script: list[Any], code: int = 0, *, out_of_memory: bool = False) -> None:
        self._run_dir, self._script, self._code, self._oom = run_dir, list(script), code, out_of_memory
        self.stops = 0
        self.after_stop: list[Any] | None = None

    def exit_code(self) -> int | None:
        if not self._script:
            return self._code
        status = self._script.pop(0)
        if isinstance(status, bytes):
            (self._run_dir / "status.json").write_bytes(status)
        elif status is not None:
            (self._run_dir / "status.json").write_text(json.dumps(status))
        return None

    def stop(self) -> None:
        self.stops += 1

    def kill(self) -> None:
        raise AssertionError("following kills nobody")

    def out_of_memory(self) -> bool:
        return self._oom


class Told:
    """Keeps what is reported."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.details: list[str] = []
        self.advances: list[float] = []

    def note(self, message: str) -> None:
        self.notes.append(message)

    def detail(self, text: str) -> None:
        self.details.append(text)

    @contextlib.contextmanager
    def activity(self, title: str, *, total: float | None, unit: str) -> Iterator[Callable[[float], None]]:
        assert (title, total, unit) == ("run", None, "")
        yield self.advances.append


def played(guest: Guest, run_dir: Path, told: Told, stop: Stop | None = None) -> int:
    return follow(guest, run_dir, progress=told, stop=stop or Stop(), sleep=lambda _seconds: None)


def test_phases_and_steps_are_shown(tmp_path: Path) -> None:
    """Each phase once with its message, each step with its numbers, the advance in steps."""
    told = Told()
    status = {"phase": "train", "steps": 20, "loss": 1.25, "tokens_per_second": 5678.4, "seconds_left": 83.9}
    script = [
        None,
        {"phase": "verify", "message": "every locked file"},
        {"phase": "verify", "message": "every locked file"},
        {"phase": "load"},
        status | {"step": 1, "message": "step 1"},
        status | {"step": 4},
        status | {"step": 4},
    ]
    assert played(Guest(tmp_path, script, 0), tmp_path, told) == 0
    assert told.details == [
        "verify: every locked file",
        "load",
        "train: step 1",
        "step 1/20 · loss 1.2500 · 5,678 tokens/s · 1:23 left",
        "step 4/20 · loss 1.2500 · 5,678 tokens/s · 1:23 left",
    ]
    assert told.advances == [1, 3]
    assert told.notes == []


@pytest.mark.parametrize(
    "status", [b"", b"{", b"[1]", b"null", b"\xff", {}, {"phase": "train", "step": None}, {"phase": None, "step": 0}]
)
def test_status_that_says_nothing(status: Any, tmp_path: Path) -> None:
    """A file that is half there, empty or of another shape does not end the run."""
    told = Told()
    assert played(Guest(tmp_path, [status, status], 3), tmp_path, told) == 3
    assert told.advances == []


def test_stop_is_passed_on_once(tmp_path: Path) -> None:
    """However long the guest takes to save, it is asked once, and the user is told."""
    told, stop = Told(), Stop(requested=True)
    guest = Guest(tmp_path, [None] * 5, 10)
    assert played(guest, tmp_path, told, stop) == 10
    assert guest.stops == 1
    assert told.notes == ["stopping: a checkpoint is saved at the end of this step (once more ends the run at once)"]


def test_following_is_known_to_the_signal_handler(tmp_path: Path) -> None:
    """True only while there is a guest, also when following ends by an error."""
    stop, seen = Stop(), []
    guest = Guest(tmp_path, [None, None], 0)
    follow(guest, tmp_path, progress=Told(), stop=stop, sleep=lambda _seconds: seen.append(stop.following))
    assert seen == [True, True]
    assert not stop.following

    def interrupted(_seconds: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        follow(Guest(tmp_path, [None], 0), tmp_path, progress=Told(), stop=stop, sleep=interrupted)
    assert not stop.following


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({"step": 3, "steps": 9}, "step 3/9"),
        ({"step": 3, "steps": 9, "loss": 2}, "step 3/9 · loss 2.0000"),
        ({"step": 3, "steps": 9, "loss": "0x1p0"}, "step 3/9"),
        ({"step": 3, "steps": 9, "tokens_per_second": 0, "seconds_left": 0}, "step 3/9 · 0:00 left"),
        ({"step": 3, "steps": 9, "seconds_left": 3725}, "step 3/9 · 62:05 left"),
    ],
)
def test_line_of_a_step(status: dict[str, Any], expected: str) -> None:
    """What is known is shown; what is not is left out."""
    assert expected == describe(status)


def left(run_dir: Path, code: int, **fields: Any) -> None:
    """exit.json as the guest leaves it."""
    told = {"schema": "kitbuild.exit/1", "exit_code": code, "message": "the fact", "hint": "the hint", "problems": []}
    (run_dir / "exit.json").write_text(json.dumps(told | fields))


def test_code_0_is_no_error(tmp_path: Path) -> None:
    """A run that ended well raises nothing."""
    left(tmp_path, 0)
    raise_for(0, Guest(tmp_path, []), tmp_path)


@pytest.mark.parametrize("text", [None, "{", '{"exit_code": 6}'])
def test_code_0_without_the_guests_word(text: str | None, tmp_path: Path) -> None:
    """A program that ends well but is not the guest (`--python /bin/true`) has not trained: exit 6."""
    if text is not None:
        (tmp_path / "exit.json").write_text(text)
    with pytest.raises(RunError, match="ended without a word of how it went"):
        raise_for(0, Guest(tmp_path, []), tmp_path)


@pytest.mark.parametrize(
    ("code", "kind"),
    [(1, KitbuildError), (2, RecipeError), (6, RunError), (7, VerificationError), (10, StoppedError)],
)
def test_guest_code_is_ours(code: int, kind: type[KitbuildError], tmp_path: Path) -> None:
    """The guest's exit code, words and problems are passed on as they are."""
    left(tmp_path, code, problems=[{"message": "is missing", "file": "/inputs/model/x", "unknown": 1}])
    with pytest.raises(KitbuildError) as raised:
        raise_for(code, Guest(tmp_path, []), tmp_path)
    assert type(raised.value) is kind
    assert raised.value.exit_code == code
    expected = "the hint" if code != 7 else "nothing was trained; remove what is damaged with `kitbuild store verify"
    assert (raised.value.message, str(raised.value.hint)[: len(expected)]) == ("the fact", expected)
    assert raised.value.problems == (Problem(message="is missing", file="/inputs/model/x"),)


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        ("the traceback is in logs/rank-0.log of the run directory", "the traceback is in RUN/logs/rank-0.log"),
        ("please report it, with logs/guest.log", "please report it, with RUN/logs/guest.log"),
        ("see /other/logs/guest.log", "see /other/logs/guest.log"),
        ("free space for the run directory", "free space for the run directory"),
    ],
)
def test_hint_names_a_log_by_its_path(hint: str, expected: str, tmp_path: Path) -> None:
    """The guest knows no path of the host."""
    left(tmp_path, 6, hint=hint)
    with pytest.raises(RunError) as raised:
        raise_for(6, Guest(tmp_path, []), tmp_path)
    assert raised.value.hint == expected.replace("RUN", str(tmp_path))


def test_error_without_a_hint_points_to_the_log(tmp_path: Path) -> None:
    """There is always something to do next."""
    left(tmp_path, 6, hint=None)
    with pytest.raises(RunError) as raised:
        raise_for(6, Guest(tmp_path, []), tmp_path)
    assert raised.value.hint == f"see {tmp_path}/logs/guest.log"


def test_killed_without_a_word(tmp_path: Path) -> None:
    """137 and no exit.json: exit 6, the code is told."""
    with pytest.raises(RunError) as raised:
        raise_for(137, Guest(tmp_path, []), tmp_path)
    assert raised.value.message == "the run was killed or crashed (exit code 137) before it could say why"


@pytest.mark.parametrize("before", [0, 10])
def test_exit_file_of_an_earlier_run_is_not_believed(before: int, tmp_path: Path) -> None:
    """A resumed run that is killed does not end with what the first one said."""
    left(tmp_path, before)
    with pytest.raises(RunError, match="before it could say why"):
        raise_for(137, Guest(tmp_path, []), tmp_path)


def test_out_of_memory_is_named(tmp_path: Path) -> None:
    """What the engine knows about memory comes first, with what to lower."""
    left(tmp_path, 6, steps_done=12)
    with pytest.raises(RunError) as raised:
        raise_for(137, Guest(tmp_path, [], out_of_memory=True), tmp_path)
    assert raised.value.message == "the run was ended by the system: out of memory (at step 12)"
    hint = "give the machine more memory; or lower batch.micro or train.max_length in a new run"
    assert raised.value.hint == hint


@pytest.mark.parametrize("out_of_memory", [False, True])
def test_what_a_killed_guest_could_not_say(*, out_of_memory: bool, tmp_path: Path) -> None:
    """exit.json is written for it, with the steps that are recorded; the next thing to do is told."""
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"step": 2}\n{"st')
    (tmp_path / "status.json").write_text('{"phase": "train"}')
    (tmp_path / "checkpoints/checkpoint-1").mkdir(parents=True)
    (tmp_path / "checkpoints/checkpoint-1/kit.json").write_text("{}")
    with pytest.raises(RunError) as raised:
        raise_for(137, Guest(tmp_path, [], out_of_memory=out_of_memory), tmp_path)
    assert f"kitbuild run RECIPE --resume {tmp_path}" in str(raised.value.hint)
    told = read_json(tmp_path / "exit.json")
    assert told.pop("message") == raised.value.message
    assert ("out of memory (at step 2)" in raised.value.message) is out_of_memory
    assert told.pop("hint") == raised.value.hint
    assert told == {
        "schema": "kitbuild.exit/1",
        "exit_code": 6,
        "code": "run",
        "problems": [],
        "phase": "train",
        "steps_done": 2,
        "steps": None,
    }


def test_what_a_guest_said_stays(tmp_path: Path) -> None:
    """A guest whose worker was ended for memory has told so itself."""
    left(tmp_path, 6, steps_done=12)
    before = (tmp_path / "exit.json").read_bytes()
    with pytest.raises(RunError, match="out of memory"):
        raise_for(6, Guest(tmp_path, [], out_of_memory=True), tmp_path)
    assert (tmp_path / "exit.json").read_bytes() == before


@pytest.mark.parametrize("text", ["", "[]", '"x"', "{", "\udcff"])
def test_what_is_no_object_reads_as_nothing(text: str, tmp_path: Path) -> None:
    """A file of the guest's may be missing, half-written or strange."""
    path = tmp_path / "x.json"
    assert read_json(path) == {}
    path.write_bytes(text.encode(errors="surrogateescape"))
    assert read_json(path) == {}
