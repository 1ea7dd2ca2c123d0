"""The command line: what is printed where, and what each ending exits with. No engine, no network."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer

from kitbuild import cli
from kitbuild.errors import LockError, StoppedError
from kitbuild.flow import running, upkeep
from kitbuild.lock.files import write_lock
from kitbuild.recipe import read
from kitbuild.run.follow import Stop
from kitbuild.verbs import options
from tests.archive.factory import DATA, Run, lock_body
from tests.base import made
from tests.image.kit import make_lock, new_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REPOSITORY = Path(__file__).resolve().parents[1]
NO_ENGINE = "unix:///nonexistent/engine.sock"


@dataclass(frozen=True, kw_only=True)
class Called:
    """What came of a call."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one object on stdout."""
        assert self.out.count("\n") == 1, self.out
        loaded: dict[str, Any] = json.loads(self.out)
        return loaded


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with a store beside it and no engine."""
    monkeypatch.setenv("KITBUILD_HOME", str(tmp_path / "store"))
    monkeypatch.setenv("DOCKER_HOST", NO_ENGINE)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


@pytest.fixture
def call(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Called]]:
    """`kitbuild` in this process, as `main` runs it."""
    assert home
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def run(*arguments: str) -> Called:
        monkeypatch.setattr(sys, "argv", ["kitbuild", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Called(code=ended.value.code, out=captured.out, err=captured.err)

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def start(*arguments: str, cwd: Path, **environ: str) -> Called:
    """`kitbuild` as a program of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "kitbuild", *arguments],
        cwd=cwd,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY), "DOCKER_HOST": NO_ENGINE, **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    return Called(code=done.returncode, out=done.stdout.decode(), err=done.stderr.decode())


def locked(work: Path, name: str = "one") -> Path:
    """A recipe with a current lock; what the lock names is in the store of `home`."""
    recipe = work / f"{name}.yaml"
    recipe.write_bytes((REPOSITORY / "recipes/tiny-cpu.yaml").read_bytes().replace(b"data/", b"data-"))
    (work / "data-tiny-tokenizer").mkdir()
    (work / "data-tiny-tokenizer/tokenizer.json").write_text("{}")
    for part in ("train", "heldout"):
        (work / f"data-commands-{part}.jsonl").write_text("{}\n")
    loaded = read(recipe)
    write_lock(recipe, make_lock(new_store(work.parent / "store"), name=name, recipe_sha256=loaded.sha256))
    return recipe


def verbs() -> list[tuple[str, ...]]:
    """Every command, `archive verify` as two words."""

    def below(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        for name, child in getattr(command, "commands", {}).items():
            yield (*words, name)
            yield from below(child, (*words, name))

    return [(), *below(typer.main.get_command(cli.app), ())]


@pytest.mark.parametrize("words", verbs(), ids=" ".join)
def test_every_verb_has_help(words: tuple[str, ...], call: Callable[..., Called]) -> None:
    """`--help` says how it is called, on stdout, exit 0."""
    called = call(*words, "--help")
    assert called.code == 0
    assert called.out.startswith(f"Usage: {' '.join(('kitbuild', *words))} ")
    assert called.err == ""


def test_no_summary_is_cut(call: Callable[..., Called], monkeypatch: pytest.MonkeyPatch) -> None:
    """In 80 columns each line of a list of verbs is a whole sentence."""
    monkeypatch.setenv("COLUMNS", "80")
    groups = {words[:-1] for words in verbs() if words}
    told = {words: call(*words, "--help").out for words in groups}
    assert all("Commands:" in text for text in told.values())
    assert [line for text in told.values() for line in text.splitlines()[1:] if line.endswith("...")] == []


def test_every_command_takes_json() -> None:
    """Each verb that does something has `--json`."""
    groups = {("archive",), ("base",), ("image",), ("render",), ("store",), ()}
    root = typer.main.get_command(cli.app)
    for words in verbs():
        if words in groups:
            continue
        command: Any = root
        for word in words:
            command = command.commands[word]
        assert any("--json" in parameter.opts for parameter in command.params), words


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # the SDK leaves the socket that failed
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_results_are_one_object(home: Path, call: Callable[..., Called]) -> None:
    """With `--json`, each command that needs no engine prints one object that names its schema, and no other word."""
    locked(home)
    run = Run().write(home / "runs" / "a")
    Run().write(home / "runs" / "b")
    calls: dict[str, tuple[str, ...]] = {
        "init": ("init", "two"),
        "check": ("check", "one.yaml"),
        "lock": ("lock", "one.yaml", "--check"),
        "compare": ("compare", "runs/a", "runs/b", "--report", "r.html"),
        "archive-verify": ("archive", "verify", str(run)),
        "archive-list": ("archive", "list"),
        "archive-show": ("archive", "show", str(run)),
        "stack": ("stack",),
        "doctor": ("doctor",),
        "schema": ("schema",),
        "store-verify": ("store", "verify"),
        "store-gc": ("store", "gc", str(home)),
    }
    for command, words in calls.items():
        called = call(*words, "--json")
        assert called.code == 0, called
        assert called.json["schema"] == f"kitbuild.{command}/1"
        assert called.err == "", command
    gc.collect()


def test_packed_and_unpacked_by_command(home: Path, call: Callable[..., Called]) -> None:
    """`archive pack` and `archive unpack` say where the result is, each in one object."""
    store = new_store(home.parent / "store")
    for data in (DATA, b"{}"):
        store.add_bytes(data)
    base = made.add(store).model_dump(mode="json")
    Run(lock=lock_body(base=base)).write(home / "runs" / "a")
    packed = call("archive", "pack", "runs/a", "--json").json
    assert packed["schema"] == "kitbuild.archive-pack/1"
    assert Path(packed["path"]) == home / "runs" / "a.kit.tar"
    assert Path(packed["path"]).stat().st_size == packed["bytes"]
    unpacked = call("archive", "unpack", "runs/a.kit.tar", "again", "--json").json
    assert unpacked["schema"] == "kitbuild.archive-unpack/1"
    assert (home / unpacked["path"] / "manifest.json").is_file()


def test_fields_of_lock_and_compare(home: Path, call: Callable[..., Called]) -> None:
    """What programs may rely on in the two verbs that they read most."""
    locked(home)
    Run().write(home / "a")
    other = Run()
    other.change_step(3, loss=(9.0).hex())
    other.write(home / "b")
    found = call("lock", "one.yaml", "--check", "--json").json
    assert (found["lock_path"], found["changed"], len(found["lock_sha256"])) == ("one.lock.json", False, 64)
    different = call("compare", "a", "b", "--json")
    assert different.code == 8
    assert different.json["verdict"] == "DIFFERENT"
    assert different.json["first_difference"]["step"] == 3
    assert isinstance(different.json["causes"], list)
    assert call("compare", "a", "a", "--json").json["verdict"] == "IDENTICAL"


def test_unfinished_archive_is_not_trained_again(home: Path, call: Callable[..., Called]) -> None:
    """`reproduce` of a run that failed or was stopped is exit 9 at once: no training could give it a verdict."""
    Run(manifest={"complete": False}, exit={"exit_code": 10}).write(home / "a")
    called = call("reproduce", "a")
    assert (called.code, called.out) == (9, "")
    assert called.err == (
        "error: a is unfinished: nothing could be compared with it\n"
        "hint: finish it with `kitbuild run RECIPE --resume a`, or train anew with `kitbuild run RECIPE`\n"
    )
    Run().write(home / "b")
    assert "is unfinished" not in call("reproduce", "b").err


def test_failure_is_one_object(home: Path, call: Callable[..., Called]) -> None:
    """With `--json`, what went wrong is an object on stdout too, problems located."""
    (home / "r.yaml").write_text("kitbuild: 1\nname: r\nsead: 1\n")
    called = call("check", "r.yaml", "--json")
    assert (called.code, called.err) == (2, "")
    assert called.json["schema"] == "kitbuild.error/1"
    assert (called.json["code"], called.json["exit_code"]) == ("recipe", 2)
    assert ("r.yaml", 3, "sead") in {(item["file"], item["line"], item["key"]) for item in called.json["problems"]}


def test_failure_for_people_is_on_stderr(home: Path, call: Callable[..., Called]) -> None:
    """A fact, then a hint; nothing on stdout, which holds results only."""
    locked(home)
    (home / "one.lock.json").unlink()
    called = call("lock", "one.yaml", "--check")
    assert (called.code, called.out) == (3, "")
    assert called.err == "error: one.lock.json does not exist\nhint: kitbuild lock one.yaml\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("chek",), "error: No such command 'chek'."),
        (("check", "--jso", "x"), "error: No such option: --jso"),
        (("check",), "error: Missing argument 'RECIPE'."),
        (("archive", "sho"), "error: No such command 'sho'."),
        (("store", "gc"), "error: Missing argument"),
        (("init", "a", "b"), "error: Got unexpected extra argument"),
        (("run", "r.yaml", "--engine", "podman2"), "error: --engine podman2 is not known"),
        (("run", "r.yaml", "--python", "/usr/bin/python3"), "error: --python goes with --engine local"),
        (("compare", "a", "b", "--tolerance", "lots"), "error: "),
        (("init", "../x"), "error: '../x' cannot name a recipe"),
        (("check", "none.yaml"), "error: none.yaml cannot be used"),
        (("base", "build", "cpu9"), "error: 'cpu9' is not a target"),
        (("archive", "list", "nowhere"), "error: nowhere is not a folder"),
        (("archive", "unpack", "nowhere"), "error: nowhere does not exist"),
        (("archive", "unpack", "."), "error: . is a directory, not a packed archive"),
        (("archive", "verify", "nowhere"), "error: nowhere does not exist"),
        (("compare", "a", "b"), "error: a does not exist"),
        (("reproduce", "nowhere"), "error: nowhere does not exist"),
        (
            ("image", "inspect", str(REPOSITORY / "recipes/tiny-cpu.yaml")),
            f"error: {REPOSITORY}/recipes/tiny-cpu.yaml is a recipe, not an image",
        ),
        (("archive", "pack", "a", "--include", "some"), "error: --include some is not known"),
    ],
)
def test_wrong_call_is_exit_2_with_a_hint(words: tuple[str, ...], expected: str, call: Callable[..., Called]) -> None:
    """What is wrong, and where to look."""
    called = call(*words)
    assert (called.code, called.out) == (2, "")
    assert called.err.startswith(expected)
    assert "hint: " in called.err


@pytest.mark.parametrize("words", [(), ("archive",), ("base",), ("store",)], ids=" ".join)
def test_no_verb_shows_the_help(words: tuple[str, ...], call: Callable[..., Called]) -> None:
    """A group without a verb is a wrong call that is answered with the verbs."""
    called = call(*words)
    assert (called.code, called.out) == (2, "")
    assert called.err.startswith("Usage: kitbuild")
    assert "Commands:" in called.err
    assert call(*words, "--json").code == 2


def test_version(call: Callable[..., Called]) -> None:
    """`--version` prints one line and ends well."""
    called = call("--version")
    assert (called.code, called.err) == (0, "")
    assert called.out.startswith("kitbuild 0.")


def test_init_overwrites_nothing(home: Path, call: Callable[..., Called]) -> None:
    """A recipe that is there stays as it is."""
    (home / "mine.yaml").write_text("mine")
    called = call("init", "mine")
    assert (called.code, called.err.splitlines()[0]) == (2, "error: mine.yaml is there already")
    assert (home / "mine.yaml").read_text() == "mine"


def test_init_where_nothing_can_be_written(call: Callable[..., Called], monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit 2 that names the file; /proc takes no files from anybody."""
    monkeypatch.chdir("/proc")
    called = call("init", "mine")
    assert called.code == 2
    assert called.err.startswith("error: mine.yaml cannot be written: ")


@pytest.mark.parametrize("words", [("store", "verify"), ("lock", "one.yaml"), ("doctor",), ("run", "one.yaml")])
def test_store_that_cannot_be_used(
    words: tuple[str, ...], home: Path, call: Callable[..., Called], monkeypatch: pytest.MonkeyPatch
) -> None:
    """KITBUILD_HOME below a file: exit 4, and the variable to set."""
    locked(home)
    (home / "file").write_text("")
    monkeypatch.setenv("KITBUILD_HOME", str(home / "file" / "below"))
    called = call(*words)
    assert (called.code, called.out) == (4, "")
    assert f"error: the store {home / 'file' / 'below'} cannot be used" in called.err
    assert "KITBUILD_HOME" in called.err


def test_check_needs_no_store(home: Path, call: Callable[..., Called], monkeypatch: pytest.MonkeyPatch) -> None:
    """`check` touches nothing but the recipe and its lock."""
    locked(home)
    monkeypatch.setenv("KITBUILD_HOME", "/proc/none")
    called = call("check", "one.yaml")
    assert called.code == 0
    assert "lock     one.lock.json, current" in called.out


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_run_without_an_engine(home: Path, call: Callable[..., Called]) -> None:
    """Exit 6, as for all that stops a run, before anything slow; no run directory left, and what to do instead."""
    locked(home)
    called = call("run", "one.yaml", "--json")
    assert called.code == 6
    assert called.json["code"] == "run"
    assert not (home / "runs").exists()
    gc.collect()


def test_stopped_run_is_exit_10_with_its_directory(
    home: Path, call: Callable[..., Called], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the guest ended with is the exit code; the object says which directory to resume."""
    assert home
    error = StoppedError("stopped on request after step 3 of 9", hint="resume with kitbuild run --resume RUN")
    error.details["run_dir"] = "runs/x"

    def stopped(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(running, "run", stopped)
    called = call("run", "one.yaml", "--json")
    assert called.code == 10
    assert (called.json["exit_code"], called.json["run_dir"]) == (10, "runs/x")


def test_bug_asks_to_be_reported(call: Callable[..., Called], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Exit 1, one sentence, the traceback in a file of its own and not on the terminal."""

    def broken() -> None:
        raise ZeroDivisionError("nine by zero → \udce9")

    monkeypatch.setattr(upkeep, "stack", broken)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    called = call("stack")
    (report,) = tmp_path.glob("kitbuild-bug-*.txt")
    assert (called.code, called.out) == (1, "")
    assert called.err.startswith("error: this is a bug in kitbuild: ZeroDivisionError: nine by zero")
    assert called.err.endswith(f"hint: please report it with {report}\n")
    assert "Traceback" not in called.err
    assert "Traceback" in report.read_text()
    assert "def broken" not in call("stack", "--json").out


def test_bug_without_a_place_for_its_report(call: Callable[..., Called], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no file can be written, the report itself is the hint."""

    def broken() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(upkeep, "stack", broken)
    monkeypatch.setattr("tempfile.tempdir", "/proc/none")
    called = call("stack")
    assert called.code == 1
    assert "Traceback" in called.err


def test_ctrl_c_is_130(call: Callable[..., Called], monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, no traceback; one object for programs."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(upkeep, "stack", interrupted)
    called = call("stack")
    assert (called.code, called.out) == (130, "")
    assert called.err.strip() == "interrupted; nothing was left half-written"
    told = call("stack", "--json")
    assert (told.code, told.json["schema"], told.json["exit_code"]) == (130, "kitbuild.error/1", 130)


def test_sigterm_is_130(call: Callable[..., Called], monkeypatch: pytest.MonkeyPatch) -> None:
    """A polite kill ends a command as Ctrl-C does."""

    def slow() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    monkeypatch.setattr(upkeep, "stack", slow)
    assert call("stack").code == 130


def test_signals_stop_a_run_only_while_it_is_followed() -> None:
    """Before the guest runs, Ctrl-C ends at once; then the first asks for a checkpoint and a later one ends."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    stop = Stop()
    try:
        options.stop_on_signal(stop)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        stop.following = True
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested
        signal.raise_signal(signal.SIGINT)  # the same keypress reaches a process more than once
        stop.since -= 2
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


ENCODINGS = {
    "ascii": {"PYTHONIOENCODING": "ascii"},
    "strict ascii": {"PYTHONIOENCODING": "ascii:strict"},
    "C locale": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "latin": {"PYTHONIOENCODING": "latin-1"},
}


@pytest.mark.parametrize("environ", ENCODINGS.values(), ids=ENCODINGS)
@pytest.mark.parametrize("words", [("check", "one.yaml"), ("--help",), ("chek\udce9→",)], ids=["check", "help", "bad"])
def test_terminal_without_unicode(words: tuple[str, ...], environ: dict[str, str], home: Path) -> None:
    """`→` and `×` are printed as well as can be; nothing fails for them."""
    locked(home)
    done = subprocess.run(
        [sys.executable, "-m", "kitbuild", *(os.fsencode(word) if "\udce9" in word else word for word in words)],
        cwd=home,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY), **environ},
        capture_output=True,
        check=False,
    )
    assert done.returncode == (2 if words[0].startswith("chek") else 0), done.stderr
    assert b"Traceback" not in done.stderr
    assert b"bug" not in done.stderr


@pytest.mark.parametrize("words", [("check", "one.yaml"), ("check", "none.yaml", "--json"), ("schema",)], ids=" ".join)
def test_reader_that_stopped(words: tuple[str, ...], home: Path) -> None:
    """`kitbuild … | head -0` ends quietly, with the code that it would have had."""
    locked(home)
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "kitbuild", *words],
        cwd=home,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY)},
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (2 if "none.yaml" in words else 0, b"")


def test_as_a_program(home: Path) -> None:
    """`python -m kitbuild` is the same command line, under its own name."""
    called = start("--help", cwd=home)
    assert called.code == 0
    assert called.out.startswith("Usage: ")
    assert start("check", "none.yaml", cwd=home).code == 2


def test_errors_reach_main_from_any_depth(call: Callable[..., Called], monkeypatch: pytest.MonkeyPatch) -> None:
    """A helper raises; only `main` exits."""

    def stale() -> None:
        raise LockError("x.lock.json is stale", hint="kitbuild lock x.yaml")

    monkeypatch.setattr(upkeep, "stack", stale)
    assert call("stack").code == 3
    assert call("stack", "--json").json["exit_code"] == 3
