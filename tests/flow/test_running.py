"""What surrounds a run: its directory, a refusal before anything slow, resuming only its own."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kitbuild.archive import read, show
from kitbuild.errors import ImageError, InterruptedRunError, LockError, RunError, StoppedError, UsageError
from kitbuild.flow import resuming, running
from kitbuild.flow.context import Context
from kitbuild.flow.running import RunOptions, _another_nodes, shown_lines, summary_lines
from kitbuild.lock.models import Lock
from kitbuild.progress import Silent
from kitbuild.recipe import starter
from kitbuild.run.follow import Stop, followed
from tests.archive.factory import RECIPE, Run, lock_body
from tests.image.kit import new_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from kitbuild.archive import Summary
    from kitbuild.flow.context import Result


class Playing(Context):
    """A context whose engine is there, or is not."""

    def client(self) -> Any:
        if self.environ.get("ENGINE") == "none":
            raise ImageError("no container engine answers")
        return object()


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Playing(environ={}, store=new_store(tmp_path / "store"), progress=Silent())


LOCK = Lock.model_validate(lock_body())


def options(out: Path, **changes: Any) -> RunOptions:
    given: dict[str, Any] = {"out": out, "engine": "docker", "python": None, "resume": None}
    return RunOptions(**(given | changes))


def train(context: Context, out: Path) -> Result:
    return running.train(context, LOCK, RECIPE, options(out), stop=Stop())


def playing(monkeypatch: pytest.MonkeyPatch, act: Callable[[Path], None]) -> None:
    """`act` in place of building and running a container; it is given the run directory."""

    def run(*arguments: Any, **named: Any) -> None:
        act(next(item for item in (*arguments, *named.values()) if isinstance(item, Path)))

    monkeypatch.setattr(running, "_in_container", run)


def fill(run_dir: Path) -> None:
    """A finished run in a directory that is there."""
    made = Run().write(run_dir.parent / ".made")
    for item in made.iterdir():
        item.rename(run_dir / item.name)
    made.rmdir()


def test_finished_run_is_read_back(context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its directory, and whether it learned."""
    playing(monkeypatch, fill)
    result = train(context, tmp_path / "runs")
    run_dir = Path(result.fields["run_dir"])
    assert run_dir.parent == tmp_path / "runs"
    assert run_dir.name.startswith("tiny-")
    assert result.fields["exit_code"] == 0
    assert result.lines == (
        "5 steps on cpu, complete",
        "training loss 2.8750 → 2.3750",
        "held-out loss 2.0000 → 1.0000, exact match 0.0% → 75.0%",
        f"archive: {run_dir}",
    )


def test_failed_run_names_its_directory(context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run wrote before it failed is kept, and said where."""

    def fail(run_dir: Path) -> None:
        (run_dir / "exit.json").write_text("{}")
        raise RunError("out of memory")

    playing(monkeypatch, fail)
    with pytest.raises(RunError) as raised:
        train(context, tmp_path / "runs")
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert raised.value.details == {"run_dir": str(run_dir)}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"recipe": "a b.yaml"}, "resume with `kitbuild run 'a b.yaml' --resume RUN`"),
        (
            {"recipe": "a.yaml", "engine": "local", "python": Path("/bin/sh")},
            "resume with `kitbuild run a.yaml --resume RUN --engine local --python /bin/sh`",
        ),
        (
            {},
            "reproduce again starts anew; with the recipe and lock that the archive is of, `kitbuild run RECIPE --resume RUN` goes on",
        ),
    ],
)
def test_stopped_run_says_how_to_go_on(
    changes: dict[str, Any], expected: str, context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that works from here: the real recipe, engine and directory, short where that is below."""

    def stopped(run_dir: Path) -> None:
        (run_dir / "exit.json").write_text("{}")
        raise StoppedError("stopped on request", hint="resume with kitbuild run --resume RUN")

    playing(monkeypatch, stopped)
    monkeypatch.setattr(running, "_locally", running._in_container)
    place = tmp_path / "runs" / "x"
    place.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    path = Path(changes["recipe"]) if changes else None
    given = options(tmp_path / "runs", **{key: value for key, value in changes.items() if key != "recipe"})
    for here, shown in ((tmp_path, "runs/x"), (tmp_path / "elsewhere", str(place))):
        monkeypatch.chdir(here)
        with pytest.raises(StoppedError) as raised:
            running.train(context, LOCK, RECIPE, given, stop=Stop(), run_dir=place, recipe_path=path)
        assert raised.value.hint == expected.replace("RUN", shown)


def test_killed_worker_says_how_to_go_on(context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guest's own words of a resume, in whatever error, become the line that works from here."""

    def crashed(run_dir: Path) -> None:
        (run_dir / "exit.json").write_text("{}")
        raise RunError("worker 0 was killed", hint="resume with kitbuild run --resume RUN")

    playing(monkeypatch, crashed)
    (place := tmp_path / "x").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError) as raised:
        running.train(context, LOCK, RECIPE, options(tmp_path), stop=Stop(), run_dir=place, recipe_path=Path("a.yaml"))
    assert raised.value.hint == "resume with `kitbuild run a.yaml --resume x`"


@pytest.mark.parametrize(
    ("checkpoint", "hint"), [(True, "resume with `kitbuild run a.yaml --resume x`"), (False, "start a new run")]
)
def test_second_request_to_stop(
    *,
    checkpoint: bool,
    hint: str,
    context: Context,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ends the run at once, exit 130: its last step and the way on are told, to the user and in exit.json."""

    def interrupted(run_dir: Path) -> None:
        (run_dir / "metrics.jsonl").write_text("{}\n{}\n")
        if checkpoint:
            (run_dir / "checkpoints/checkpoint-1").mkdir(parents=True)
            (run_dir / "checkpoints/checkpoint-1/kit.json").write_text("{}")
        raise KeyboardInterrupt

    playing(monkeypatch, interrupted)
    (place := tmp_path / "x").mkdir()
    monkeypatch.chdir(tmp_path)
    stop = Stop(requested=True)
    with pytest.raises(InterruptedRunError) as raised:
        running.train(context, LOCK, RECIPE, options(tmp_path), stop=stop, run_dir=place, recipe_path=Path("a.yaml"))
    text = "ended at once, after step 2: what came after the last checkpoint is lost"
    assert (raised.value.exit_code, raised.value.message, raised.value.hint) == (130, text, hint)
    told = json.loads((place / "exit.json").read_bytes())
    assert (told["exit_code"], told["message"], told["steps_done"]) == (130, text, 2)


def test_request_to_end_before_a_step(context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing was trained, Ctrl-C is Ctrl-C."""

    def interrupted(_run_dir: Path) -> None:
        raise KeyboardInterrupt

    playing(monkeypatch, interrupted)
    with pytest.raises(KeyboardInterrupt):
        running.train(context, LOCK, RECIPE, options(tmp_path), stop=Stop(requested=True))


def test_answers_are_shown() -> None:
    """Right ones with a tick, wrong ones with what was expected; a model's line breaks and escapes reach no terminal."""
    shown = [
        {"prompt": "Lamp at\n80.", "answer": "light 80%", "expected": "light 80%", "right": True},
        {"prompt": "Off.", "answer": "\x1b[31m", "expected": "light off", "right": False},
        {"prompt": "Off.", "answer": "", "expected": "light off"},
        3,
    ]
    assert shown_lines({"before": None, "after": {"shown": shown}}) == (
        '"Lamp at 80." → light 80% ✓',
        '"Off." → [31m ✗ (expected: light off)',
        '"Off." → (nothing) ✗ (expected: light off)',
    )
    given: tuple[Any, ...] = (None, {}, {"after": None}, {"after": {"loss": "0x1p+0"}}, {"after": {"shown": "x"}})
    for evaluate in given:
        assert shown_lines(evaluate) == ()


@pytest.mark.parametrize("error", [RunError("the engine refused"), KeyboardInterrupt(), ZeroDivisionError()])
def test_run_that_never_started_leaves_no_directory(
    error: BaseException, context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after Ctrl-C while the image is built, or a bug."""

    def fail(_run_dir: Path) -> None:
        raise error

    playing(monkeypatch, fail)
    with pytest.raises(type(error)):
        train(context, tmp_path / "runs")
    assert list((tmp_path / "runs").iterdir()) == []
    assert getattr(error, "details", {"run_dir": None}) == {"run_dir": None}


def test_no_engine_is_told_before_a_directory_is_made(tmp_path: Path) -> None:
    """Nothing is done: no lock resolved, nothing fetched. For `run` it is exit 6, a run that failed."""
    context = Playing(environ={"ENGINE": "none"}, store=new_store(tmp_path / "store"), progress=Silent())
    with pytest.raises(ImageError, match="no container engine answers"):
        train(context, tmp_path / "runs")
    recipe = tmp_path / "new.yaml"
    recipe.write_text(starter("new"))
    with pytest.raises(RunError, match="no container engine answers"):
        running.run(context, recipe, options(tmp_path / "runs"), stop=Stop())
    assert {path.name for path in tmp_path.iterdir()} == {"store", "new.yaml"}


def test_resume_needs_a_run_of_the_same_lock(tmp_path: Path) -> None:
    """Another lock's run, or what is no run, is refused; its own is taken as it is."""
    own = checkpoint(Run().write(tmp_path / "own"))
    (own / "exit.json").write_text('{"exit_code": 10}')
    assert resuming.resumed(own, LOCK) == own
    other = Run(lock=lock_body(target="cuda129")).write(tmp_path / "other")
    with pytest.raises(UsageError, match="was started from another lock"):
        resuming.resumed(other, LOCK)
    with pytest.raises(UsageError, match="is not a run that can be resumed") as raised:
        resuming.resumed(tmp_path / "none", LOCK)
    assert "kitbuild archive list" in str(raised.value.hint)
    (own / "lock.json").write_text("{")
    with pytest.raises(LockError, match="is not JSON"):
        resuming.resumed(own, LOCK)


def checkpoint(run_dir: Path) -> Path:
    (run_dir / "checkpoints/checkpoint-1").mkdir(parents=True)
    (run_dir / "checkpoints/checkpoint-1/kit.json").write_text("{}")
    return run_dir


def test_a_refused_resume_says_what_differs(tmp_path: Path) -> None:
    """Seed, processes, data: by the names that `lock --diff` gives them, the recipe's own first."""
    given = {**LOCK.recipe, "seed": 7, "launch": {"nodes": 1, "processes_per_node": 2}}
    arguments = {**lock_body()["defaults"], "arguments": {"seed": {"value": 7, "origin": "kitbuild"}}}
    other = checkpoint(Run(lock=lock_body(recipe=given, defaults=arguments)).write(tmp_path / "other"))
    (other / "exit.json").write_text('{"exit_code": 10}')
    with pytest.raises(UsageError) as raised:
        resuming.resumed(other, LOCK)
    assert raised.value.message.startswith(f"{other} was started from another lock: recipe ")
    assert "seed 7 → 42" in raised.value.message
    assert "processes_per_node" in raised.value.message
    assert "arguments in force" not in raised.value.message


def test_virtual_ranks_go_on_with_any_number_of_processes(tmp_path: Path) -> None:
    """With virtual ranks another number of processes is the same run; without, or with another seed, it is not."""

    def body(processes: int, **changes: object) -> dict[str, object]:
        recipe = {**LOCK.recipe, "determinism": {"mode": "strict", "virtual_ranks": 2}, "seed": 42, **changes}
        return lock_body(recipe={**recipe, "launch": {"nodes": 1, "processes_per_node": processes}})

    own = checkpoint(Run(lock=body(1)).write(tmp_path / "own"))
    (own / "exit.json").write_text('{"exit_code": 10}')
    assert resuming.resumed(own, Lock.model_validate(body(2))) == own
    for other in (body(2, seed=43), body(2, determinism="strict")):
        with pytest.raises(UsageError, match="was started from another lock"):
            resuming.resumed(own, Lock.model_validate(other))


def test_a_resume_needs_a_checkpoint(tmp_path: Path) -> None:
    """What was unpacked has none, nor has a run that was killed early: told before an image is built."""
    own = Run(exit={"exit_code": 6}, manifest={"complete": False}).write(tmp_path / "own")
    (own / "checkpoints/checkpoint-1").mkdir(parents=True)
    with pytest.raises(UsageError, match="holds no checkpoint to go on from"):
        resuming.resumed(own, LOCK)
    assert resuming.resumed(own, LOCK, here=False) == own


def test_a_run_that_goes_on_is_not_resumed(tmp_path: Path) -> None:
    """Whether another kitbuild follows it or nobody does, the guest having outlived its kitbuild."""
    own = checkpoint(Run(exit=None).write(tmp_path / "own"))
    with followed(own), pytest.raises(RunError, match="another kitbuild follows the run"):
        resuming.resumed(own, LOCK)
    (own / "logs").mkdir(exist_ok=True)
    with (own / "logs/guest.log").open("a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        with pytest.raises(RunError, match="is still going on") as raised:
            resuming.resumed(own, LOCK)
    assert "docker stop own" in str(raised.value.hint)
    assert resuming.resumed(own, LOCK) == own


def test_a_read_only_run_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only file system is told by the directory's name (root may write whatever the mode says)."""
    own = checkpoint(Run(exit=None).write(tmp_path / "own"))
    monkeypatch.setattr("kitbuild.archive.runs.os.access", lambda *_: False)
    with pytest.raises(RunError, match=f"the run directory {own} is not writable"):
        resuming.resumed(own, LOCK)


def test_a_finished_run_is_not_resumed(tmp_path: Path) -> None:
    """The guest would write "failed" over an archive that is complete: refused, and every byte stays."""
    own = Run().write(tmp_path / "own")
    before = {path: path.read_bytes() for path in own.rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match="is finished: there is nothing to go on with"):
        resuming.resumed(own, LOCK)
    assert {path: path.read_bytes() for path in own.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": "podman"}, "--engine podman is not known"),
        ({"python": Path("/usr/bin/python3")}, "--python goes with --engine local"),
        ({"python": Path("/nonexistent"), "engine": "local"}, "--python /nonexistent is not a program"),
    ],
)
def test_options_that_do_not_go_together(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Refused when they are put together, before anything is done."""
    with pytest.raises(UsageError, match=message):
        options(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"steps": []}, ("0 steps on cpu, complete", "held-out loss 2.0000 → 1.0000, exact match 0.0% → 75.0%")),
        (
            {"manifest": {"results": {"steps": 5, "evaluate": None}}},
            ("5 steps on cpu, complete", "training loss 2.8750 → 2.3750"),
        ),
        ({"steps": [], "manifest": {"device": None, "results": None}}, ("0 steps, complete",)),
    ],
)
def test_summary_says_what_is_known(changes: dict[str, Any], expected: tuple[str, ...], tmp_path: Path) -> None:
    """Nothing is made up where there was no step or no evaluation."""
    summary: Summary = show(read(Run(**changes).write(tmp_path / "run")))
    assert expected == summary_lines(summary)


@pytest.mark.parametrize(
    ("nodes", "changes", "expected"), [(2, {"steps": []}, True), (2, {}, False), (1, {"steps": []}, False)]
)
def test_another_node_than_the_first_recorded_no_step(
    nodes: int, changes: dict[str, Any], *, expected: bool, tmp_path: Path
) -> None:
    """Of several nodes the first one's archive has the steps; the others say so."""
    run = Run(**changes, manifest={"launch": {"nodes": nodes}})
    assert expected is _another_nodes(read(run.write(tmp_path / "run")))
