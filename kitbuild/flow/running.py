"""image → run → archive."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kitbuild import archive as archives
from kitbuild import recipe as recipes
from kitbuild.errors import ImageError, InterruptedRunError, KitbuildError, RunError, UsageError
from kitbuild.flow import resuming
from kitbuild.flow.building import build, fetch_all
from kitbuild.flow.context import Context, Result
from kitbuild.flow.locking import ensure_lock
from kitbuild.run.follow import has_checkpoint, say_for_it, steps_recorded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kitbuild.lock.models import Lock
    from kitbuild.recipe import LoadedRecipe
    from kitbuild.run.follow import Stop

ENGINES = ("docker", "local")
LINE = 60
RESUME = "kitbuild run --resume RUN"
"""As the guest says it, which knows neither recipe nor directory."""
ANOTHERS = "this node's part of the run is complete; what was trained is in the archive of the first node"
REMOTE = (
    "the engine is on another machine, which has no directory of this one: model and data are copied there for this run"
    " (image.bake in the recipe sends them once, with the image), and the run directory is copied back at its end"
)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where and how to run."""

    out: Path
    engine: str
    python: Path | None
    resume: Path | None
    measure: bool = False
    """For a benchmark: nothing is saved, and the rate of matrix products is measured beside."""
    host: str | None = None

    def __post_init__(self) -> None:
        if self.host is not None and self.engine != "docker":
            raise UsageError("--host goes with --engine docker", hint="the local engine is this machine")
        if self.engine not in ENGINES:
            raise UsageError(f"--engine {self.engine} is not known", hint=f"one of {', '.join(ENGINES)}")
        if self.python is not None and self.engine != "local":
            raise UsageError("--python goes with --engine local", hint="in a container the Python is the locked one")
        if self.python is not None and not (self.python.is_file() and os.access(self.python, os.X_OK)):
            raise UsageError(
                f"--python {self.python} is not a program", hint="the path of a Python, as bin/python in a venv"
            )


@contextlib.contextmanager
def run_errors() -> Iterator[None]:
    """An engine or image that a run lacks is a failed run: exit 6, where `kitbuild image` has 5."""
    try:
        yield
    except ImageError as error:
        failed = RunError(error.message, hint=error.hint, problems=error.problems)
        failed.details |= error.details
        raise failed from error


@run_errors()
def run(context: Context, path: Path, options: RunOptions, *, stop: Stop) -> Result:
    """`kitbuild run`: build what is missing, train, and read the archive back."""
    loaded = recipes.read(path)
    _refuse_without_engine(context, options)
    lock = ensure_lock(context, loaded)
    run_dir = resuming.resumed(options.resume, lock, here=_here(context, options)) if options.resume else None
    fetch_for(context, lock, loaded, options)
    return train(context, lock, loaded.content, options, run_dir=run_dir, stop=stop, recipe_path=path)


def _here(context: Context, options: RunOptions) -> bool:
    """Whether the run directory is where the guest writes; of another machine's engine only what was copied back is here."""
    if options.engine == "local":
        return True
    from kitbuild.run.remote_engine import is_remote  # noqa: PLC0415 - docker-py is slow to import

    return not is_remote(context.client())


def _refuse_without_engine(context: Context, options: RunOptions) -> None:
    """Told before anything slow."""
    if options.engine == "docker":
        context.client()


def fetch_for(context: Context, lock: Lock, loaded: LoadedRecipe, options: RunOptions) -> None:
    """What this way of running needs: no base without a container, no wheels with a Python of the user's own."""
    in_container = options.engine == "docker"
    fetch_all(context, lock, loaded, base=in_container, wheels=options.python is None)


def train(
    context: Context,
    lock: Lock,
    recipe: bytes,
    options: RunOptions,
    *,
    stop: Stop,
    run_dir: Path | None = None,
    recipe_path: Path | None = None,
) -> Result:
    """One run of a lock in a run directory of its own (or, resumed, in its old one)."""
    began = time.monotonic()
    _refuse_without_engine(context, options)
    place = run_dir or archives.new_run_dir(options.out.absolute(), lock.name)
    resume = run_dir is not None
    try:
        if options.engine == "docker":
            _in_container(context, lock, recipe, place, options, resume=resume, stop=stop)
        else:
            _locally(context, lock, recipe, place, options, resume=resume, stop=stop)
    except BaseException as error:
        _drop_if_empty(place)
        told = _ended_at_once(place, error, stop)
        if not isinstance(told, KitbuildError):
            raise
        told.details["run_dir"] = str(place) if place.exists() else None
        if RESUME in (told.hint or ""):
            told.hint = resume_hint(place, options, recipe_path)
        if told is error:
            raise
        raise told from error
    archive = archives.read(place)
    summary = archives.show(archive)
    return Result(
        fields={
            "run_dir": str(place),
            "exit_code": 0,
            "seconds": round(time.monotonic() - began, 3),
            "archive_sha256": archive.sha256,
        },
        lines=(
            *((ANOTHERS,) if _another_nodes(archive) else summary_lines(summary)),
            *shown_lines(archive.manifest.results.evaluate),
            f"archive: {place}",
        ),
    )


def _ended_at_once(run_dir: Path, error: BaseException, stop: Stop) -> BaseException:
    """Of a second Ctrl-C while a run stopped: where the run is and what is left of it, for the user and the archive."""
    if not (isinstance(error, KeyboardInterrupt) and stop.requested and steps_recorded(run_dir)):
        return error
    text = f"ended at once, after step {steps_recorded(run_dir)}: what came after the last checkpoint is lost"
    told = InterruptedRunError(text, hint=f"resume with {RESUME}" if has_checkpoint(run_dir) else "start a new run")
    say_for_it(run_dir, told)
    return told


def _another_nodes(archive: archives.Archive) -> bool:
    """Whether the first of several nodes recorded the steps, elsewhere."""
    nodes = archive.manifest.launch.get("nodes")
    return archive.finished and not archive.metrics and isinstance(nodes, int) and nodes > 1


def resume_hint(run_dir: Path, options: RunOptions, recipe: Path | None) -> str:
    """The line that goes on with a stopped run, for a shell in the current folder."""
    words = ["--resume", str(_from_here(run_dir))]
    if options.engine != "docker":
        words += ["--engine", options.engine]
    if options.host is not None:
        words += ["--host", options.host]
    if options.python is not None:
        words += ["--python", str(options.python)]
    if recipe is None:
        line = f"kitbuild run RECIPE {shlex.join(words)}"
        return f"reproduce again starts anew; with the recipe and lock that the archive is of, `{line}` goes on"
    return f"resume with `{shlex.join(['kitbuild', 'run', str(recipe), *words])}`"


def _from_here(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _in_container(
    context: Context, lock: Lock, recipe: bytes, run_dir: Path, options: RunOptions, *, resume: bool, stop: Stop
) -> None:
    from kitbuild.image import verify_image  # noqa: PLC0415 - docker-py is slow to import
    from kitbuild.run.docker_engine import container_spec, run_container  # noqa: PLC0415
    from kitbuild.run.remote_engine import is_remote, run_remote  # noqa: PLC0415

    built = build(context, lock, recipe=recipe)
    verify_image(context.client(), str(built.engine_id), expected=built.image.content_sha256)
    spec = container_spec(
        lock, image=built.identity(), run_dir=run_dir, store=context.store, resume=resume, measure=options.measure
    )
    if is_remote(context.client()):
        context.progress.note(REMOTE)
        run_remote(spec, run_dir, client=context.client(), progress=context.progress, stop=stop, resume=resume)
        return
    context.progress.note(f"equal to: {spec.command_line()}")
    run_container(spec, run_dir, client=context.client(), progress=context.progress, stop=stop)


def _locally(
    context: Context, lock: Lock, recipe: bytes, run_dir: Path, options: RunOptions, *, resume: bool, stop: Stop
) -> None:
    from kitbuild.image.compilers import HostCompiler  # noqa: PLC0415 - beside its one use
    from kitbuild.image.local import find_python, materialise  # noqa: PLC0415
    from kitbuild.run.local_engine import run_local  # noqa: PLC0415

    given = options.python.absolute() if options.python else None
    python = given or find_python(lock.base.python, context.environ)
    root = materialise(
        lock,
        recipe=recipe,
        python=python,
        wheels=given is None,
        store=context.store,
        compiler=HostCompiler(python),
        progress=context.progress,
    )
    run_local(
        lock,
        root=root,
        python=python if given else root / "opt/kit/bin/python",
        locked=given is None,
        run_dir=run_dir,
        store=context.store,
        environ=context.environ,
        resume=resume,
        measure=options.measure,
        progress=context.progress,
        stop=stop,
    )


def _drop_if_empty(run_dir: Path) -> None:
    """A run that never started leaves no directory."""
    if run_dir.is_dir() and not any(run_dir.iterdir()):
        run_dir.rmdir()


def summary_lines(summary: archives.Summary) -> tuple[str, ...]:
    """What a user wants to see first: did it learn."""
    where = "" if summary.device is None else f" on {summary.device}"
    lines = [f"{summary.steps} steps{where}, {summary.state}"]
    if summary.loss_first is not None and summary.loss_last is not None:
        lines.append(f"training loss {summary.loss_first:.4f} → {summary.loss_last:.4f}")
    held_out = []
    if summary.loss_before is not None and summary.loss_after is not None:
        held_out.append(f"loss {summary.loss_before:.4f} → {summary.loss_after:.4f}")
    if summary.exact_match_before is not None and summary.exact_match_after is not None:
        held_out.append(f"exact match {summary.exact_match_before:.1%} → {summary.exact_match_after:.1%}")
    if held_out:
        lines.append(f"held-out {', '.join(held_out)}")
    return tuple(lines)


def shown_lines(evaluate: dict[str, Any] | None) -> tuple[str, ...]:
    """A few held-out questions and the trained model's answers to them."""
    after = (evaluate or {}).get("after")
    shown = after.get("shown") if isinstance(after, dict) else None
    return tuple(_shown(item) for item in shown if isinstance(item, dict)) if isinstance(shown, list) else ()


def _shown(item: dict[str, Any]) -> str:
    prompt, answer, expected = (_one_line(item.get(name)) for name in ("prompt", "answer", "expected"))
    right = item.get("right", answer == expected)
    return f'"{prompt}" → {answer or "(nothing)"} ' + ("✓" if right else f"✗ (expected: {expected})")


def _one_line(text: object) -> str:
    """As a terminal may show it: what a model says can hold anything."""
    found = " ".join("".join(sign if sign.isprintable() else " " for sign in str(text or "")).split())
    return found if len(found) <= LINE else found[: LINE - 1] + "…"
