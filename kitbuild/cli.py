"""The command line: verbs, printing, exits. Nothing else prints or exits.

Steps are imported inside the verbs: `kitbuild check` answers in under half a second.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import typer.core

from kitbuild import __version__
from kitbuild.errors import KitbuildError, UsageError
from kitbuild.terminal import Terminal
from kitbuild.verbs import archive, base, image, render, store
from kitbuild.verbs.options import (
    ArchivePath,
    Host,
    Json,
    RecipePath,
    Report,
    Tolerance,
    Verbose,
    context_of,
    present,
    stop_on_signal,
)

INTERRUPTED = 130

app = typer.Typer(
    name="kitbuild",
    help="Reproducible training: recipe → lock → image → run → archive → compare.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


app.add_typer(image.app, name="image")
app.add_typer(archive.app, name="archive")
app.add_typer(base.app, name="base")
app.add_typer(store.app, name="store")
app.add_typer(render.app, name="render")


def main() -> NoReturn:
    """Run the command line; the one place where an error becomes an exit code."""
    signal.signal(signal.SIGTERM, _interrupt)
    _print_anything()
    terminal = Terminal(verbose=False, json_output="--json" in sys.argv[1:])
    try:
        code = app(standalone_mode=False, prog_name="kitbuild")
    except KitbuildError as error:
        terminal.error(error)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the last handler: a bug is reported, never shown raw
        _usage_or_bug(error, terminal)
    if code == INTERRUPTED:  # typer, too, makes this of Ctrl-C
        terminal.interrupted(INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def _print_anything() -> None:
    """A terminal without `→`, or a file name that is not text, is no reason to fail."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _interrupt(_signal: int, _frame: Any) -> None:
    raise KeyboardInterrupt


def _usage_or_bug(error: Exception, terminal: Terminal) -> NoReturn:
    message = getattr(error, "format_message", None)
    if message is not None:  # click's UsageError and its children: a wrong flag or argument
        context = getattr(error, "ctx", None)
        if type(error).__name__ == "NoArgsIsHelpError" and context and not terminal.json_output:
            sys.stderr.write(f"{context.get_help()}\n")
            sys.exit(UsageError.exit_code)
        hint = f"{context.command_path} --help" if context else "kitbuild --help"
        terminal.error(UsageError(message() or "wrong usage", hint=hint))
        sys.exit(UsageError.exit_code)
    terminal.error(
        KitbuildError(
            f"this is a bug in kitbuild: {type(error).__name__}: {error}",
            hint=f"please report it with {_bug_report(error)}",
        )
    )
    sys.exit(KitbuildError.exit_code)


def _bug_report(error: Exception) -> str:
    """Where the traceback is; itself where not even a temporary file can be written."""
    import tempfile  # noqa: PLC0415
    import traceback  # noqa: PLC0415

    text = f"kitbuild {__version__}\n{sys.argv}\n{''.join(traceback.format_exception(error))}"
    try:
        with tempfile.NamedTemporaryFile("wb", prefix="kitbuild-bug-", suffix=".txt", delete=False) as report:
            report.write(text.encode(errors="backslashreplace"))
    except OSError:
        return f"this:\n{text}"
    return report.name


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,  # noqa: FBT002
) -> None:
    if version:
        sys.stdout.write(f"kitbuild {__version__}\n")
        raise typer.Exit


@app.command()
def init(
    name: Annotated[str, typer.Argument(help="The recipe's name; NAME.yaml is written here.")] = "my-run",
    *,
    json_output: Json = False,
) -> None:
    """Write a starter recipe, commented."""
    from kitbuild.recipe import starter  # noqa: PLC0415

    name = name.removesuffix(".yaml")
    path = Path(f"{name}.yaml")
    text = starter(name)
    try:
        with path.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise UsageError(f"{path} is there already", hint="choose another name: kitbuild init NAME") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    terminal = Terminal(verbose=False, json_output=json_output)
    terminal.result("init", {"path": str(path)}, f"wrote {path}\nnext: kitbuild check {path}")


@app.command()
def check(
    recipe: RecipePath,
    *,
    launch: Annotated[
        bool, typer.Option("--launch", help="Show what Accelerate, DeepSpeed and FSDP are told, too.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Check all that can be known without the network."""
    from kitbuild.flow import locking  # noqa: PLC0415

    report = locking.check(recipe, os.environ, launch=launch)
    terminal = Terminal(verbose=False, json_output=json_output)
    terminal.result("check", report.as_json(), report.text())


@app.command()
def lock(
    recipe: RecipePath,
    *,
    only_check: Annotated[
        bool, typer.Option("--check", help="Exit 3 unless the lock is current; write nothing.")
    ] = False,
    update: Annotated[
        list[str] | None,
        typer.Option("--update", metavar="NAME", help="Move this package, repository or `base`; repeat for more."),
    ] = None,
    upgrade: Annotated[bool, typer.Option("--upgrade", help="Move everything to the newest that fits.")] = False,
    diff: Annotated[
        Path | None, typer.Option("--diff", metavar="OLD", help="Say how the lock differs from OLD.")
    ] = None,
    pylock: Annotated[
        Path | None, typer.Option("--pylock", metavar="F", help="Write the wheels as a pylock.toml (PEP 751) too.")
    ] = None,
    json_output: Json = False,
    verbose: Verbose = False,
) -> None:
    """Resolve a recipe to what cannot move; write the lock beside it."""
    from kitbuild.flow import locking  # noqa: PLC0415

    context, terminal = context_of(json_output=json_output, verbose=verbose)
    result = locking.lock(
        context,
        recipe,
        only_check=only_check,
        update=frozenset(update or ()),
        upgrade=upgrade,
        diff=diff,
        pylock=pylock,
    )
    present(terminal, "lock", result)


@app.command()
def fetch(
    recipe: RecipePath,
    *,
    bundle: Annotated[
        Path | None, typer.Option("--bundle", metavar="F", help="Write everything into one file for another machine.")
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--from", metavar="F", help="Take everything from such a file; no network.")
    ] = None,
    inputs: Annotated[
        Path | None,
        typer.Option(
            "--inputs", metavar="DIR", help="Copy model and data into DIR too, as a rendered job mounts them."
        ),
    ] = None,
    json_output: Json = False,
    verbose: Verbose = False,
) -> None:
    """Fill the store with all that the lock names."""
    from kitbuild.flow import building  # noqa: PLC0415

    context, terminal = context_of(json_output=json_output, verbose=verbose)
    present(terminal, "fetch", building.fetch(context, recipe, bundle=bundle, source=source, inputs=inputs))


@app.command()
def run(
    recipe: RecipePath,
    *,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where run directories go.")] = Path("runs"),
    engine: Annotated[
        str, typer.Option("--engine", help="docker, or local: the same guest in a locked environment.")
    ] = "docker",
    python: Annotated[
        Path | None,
        typer.Option(
            "--python", metavar="PATH", help="With --engine local: this Python's packages, recorded but not locked."
        ),
    ] = None,
    resume: Annotated[Path | None, typer.Option("--resume", metavar="RUN", help="Go on with a stopped run.")] = None,
    host: Host = None,
    json_output: Json = False,
    verbose: Verbose = False,
) -> None:
    """Train in the image, with no network; keep the archive. An image that is missing is built first."""
    from kitbuild.flow import running  # noqa: PLC0415
    from kitbuild.run.follow import Stop  # noqa: PLC0415

    context, terminal = context_of(json_output=json_output, verbose=verbose, host=host)
    options = running.RunOptions(out=out, engine=engine, python=python, resume=resume, host=host)
    finished = running.run(context, recipe, options, stop=stop_on_signal(Stop()))
    present(terminal, "run", finished)


@app.command()
def bench(
    recipe: RecipePath,
    *,
    attention: Annotated[
        list[str] | None, typer.Option("--attention", help="eager, sdpa, flex_attention, …; repeat for more.")
    ] = None,
    liger: Annotated[list[str] | None, typer.Option("--liger", help="off, all, recipe, or one option's name.")] = None,
    length: Annotated[list[int] | None, typer.Option("--length", help="train.max_length; repeat for more.")] = None,
    micro: Annotated[list[int] | None, typer.Option("--micro", help="batch.micro; repeat for more.")] = None,
    checkpointing: Annotated[str | None, typer.Option("--checkpointing", help="on, off or both.")] = None,
    packing: Annotated[str | None, typer.Option("--packing", help="on, off or both.")] = None,
    rows: Annotated[str, typer.Option("--rows", help="full, or varied: their median is a quarter.")] = "full",
    steps: Annotated[int, typer.Option("--steps", help="Optimizer steps a cell; the first three are not timed.")] = 12,
    repeats: Annotated[
        int, typer.Option("--repeats", help="Fresh processes a cell; two show whether bits repeat.")
    ] = 2,
    tune: Annotated[bool, typer.Option("--tune", help="Search the fastest for the recipe's global batch.")] = False,
    apply: Annotated[bool, typer.Option("--apply", help="With --tune: write it into the recipe.")] = False,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where rows and figures go.")] = Path("bench"),
    engine: Annotated[str, typer.Option("--engine", help="docker or local.")] = "docker",
    python: Annotated[
        Path | None,
        typer.Option("--python", metavar="PATH", help="With --engine local: this Python, recorded but not locked."),
    ] = None,
    json_output: Json = False,
    verbose: Verbose = False,
) -> None:
    """Time the recipe in other settings. Each cell runs in fresh processes; --tune finds the fastest."""
    from kitbuild.bench import Grid  # noqa: PLC0415
    from kitbuild.flow import benching, running  # noqa: PLC0415
    from kitbuild.run.follow import Stop  # noqa: PLC0415

    context, terminal = context_of(json_output=json_output, verbose=verbose)
    where = running.RunOptions(out=out, engine=engine, python=python, resume=None)
    wanted = Grid(
        attention=tuple(attention or ()),
        liger=tuple(liger or ()),
        lengths=tuple(length or ()),
        micro=tuple(micro or ()),
        checkpointing=benching.switch("--checkpointing", checkpointing),
        packing=benching.switch("--packing", packing),
    )
    options = benching.BenchOptions(run=where, steps=steps, repeats=repeats, rows=rows)
    stop = stop_on_signal(Stop())
    found = (
        benching.tune(context, recipe, wanted, options, apply=apply, stop=stop)
        if tune
        else benching.bench(context, recipe, wanted, options, stop=stop)
    )
    present(terminal, "bench", found)


@app.command()
def reproduce(
    archive: ArchivePath,
    *,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where run directories go.")] = Path("runs"),
    engine: Annotated[str, typer.Option("--engine", help="docker or local.")] = "docker",
    python: Annotated[
        Path | None,
        typer.Option("--python", metavar="PATH", help="With --engine local: this Python, recorded but not locked."),
    ] = None,
    tolerance: Tolerance = None,
    report: Report = None,
    host: Host = None,
    json_output: Json = False,
    verbose: Verbose = False,
) -> None:
    """Run an archive again from its lock, and compare."""
    from kitbuild.flow import reproducing, running  # noqa: PLC0415
    from kitbuild.run.follow import Stop  # noqa: PLC0415

    context, terminal = context_of(json_output=json_output, verbose=verbose, host=host)
    options = running.RunOptions(out=out, engine=engine, python=python, resume=None, host=host)
    again = reproducing.reproduce(
        context, archive, options, tolerance=tolerance, report=report, stop=stop_on_signal(Stop())
    )
    present(terminal, "reproduce", again)


@app.command()
def compare(
    left: Annotated[Path, typer.Argument(metavar="A", help="A run directory or a packed archive.")],
    right: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    *,
    report: Report = None,
    tolerance: Tolerance = None,
    json_output: Json = False,
) -> None:
    """IDENTICAL, or the first step that differs and why."""
    from kitbuild.flow import archives  # noqa: PLC0415

    context, terminal = context_of(json_output=json_output, verbose=False)
    verdict = archives.compare(context, left, right, report=report, tolerance=tolerance)
    present(terminal, "compare", verdict)


@app.command()
def doctor(*, json_output: Json = False) -> None:
    """What this machine has of what kitbuild needs."""
    from kitbuild.flow import upkeep  # noqa: PLC0415

    context, terminal = context_of(json_output=json_output, verbose=False)
    report = upkeep.doctor(context)
    present(terminal, "doctor", report)


@app.command()
def schema(*, json_output: Json = False) -> None:
    """Print the recipe's JSON Schema, for editors."""
    import json  # noqa: PLC0415

    from kitbuild.recipe import schema as recipe_schema  # noqa: PLC0415

    found = recipe_schema()
    terminal = Terminal(verbose=False, json_output=json_output)
    terminal.result("schema", {"recipe": found}, json.dumps(found, indent=2, sort_keys=True))


@app.command()
def stack(*, json_output: Json = False) -> None:
    """The tested package sets."""
    from kitbuild.flow import upkeep  # noqa: PLC0415

    terminal = Terminal(verbose=False, json_output=json_output)
    present(terminal, "stack", upkeep.stack())
