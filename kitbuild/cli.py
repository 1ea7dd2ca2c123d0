"""The command line: verbs, printing, exits. Nothing else prints or exits.

Steps are imported inside the verbs: `kitbuild check` answers in under half a second.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
import typer.core

from kitbuild import __version__
from kitbuild.errors import KitbuildError, UsageError
from kitbuild.terminal import Terminal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kitbuild.flow.context import Context, Result

INTERRUPTED = 130

app = typer.Typer(
    name="kitbuild",
    help="Reproducible training: recipe → lock → image → run → archive → compare.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class _ImageVerbs(typer.core.TyperGroup):
    """`kitbuild image RECIPE` is `kitbuild image build RECIPE`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, "--help"}:
            args = ["build", *args]
        return super().parse_args(ctx, args)


image_app = typer.Typer(
    cls=_ImageVerbs,
    help="Images: `kitbuild image RECIPE` builds, `kitbuild image inspect REF` reads.",
    no_args_is_help=True,
)
archive_app = typer.Typer(help="Archived runs: verify, list, show, pack, unpack.", no_args_is_help=True)
base_app = typer.Typer(help="Finished base images, referred to by digest.", no_args_is_help=True)
store_app = typer.Typer(help="The content-addressed store.", no_args_is_help=True)
render_app = typer.Typer(help="A locked image as a job for another system.", no_args_is_help=True)
app.add_typer(image_app, name="image")
app.add_typer(archive_app, name="archive")
app.add_typer(base_app, name="base")
app.add_typer(store_app, name="store")
app.add_typer(render_app, name="render")

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe, for example recipes/tiny-cpu.yaml.")]
ArchivePath = Annotated[Path, typer.Argument(metavar="ARCHIVE", help="A run directory, or a packed x.kit.tar.")]
ImageOption = Annotated[
    str | None,
    typer.Option("--image", metavar="REF", help="NAME@sha256:… in a registry, where not the last pushed from here."),
]
Host = Annotated[
    str | None,
    typer.Option("--host", metavar="USER@MACHINE", help="The engine there, by SSH; or a URL as DOCKER_HOST has it."),
]
Output = Annotated[Path | None, typer.Option("--output", "-o", metavar="F", help="Write to F instead of stdout.")]
Tolerance = Annotated[
    str | None,
    typer.Option(
        "--tolerance",
        metavar="T",
        help="For another device: loss=1e-3, loss=abs:0.01, repeats (those that the archive keeps), repeats:RUN,RUN.",
    ),
]
Report = Annotated[
    Path | None,
    typer.Option(
        "--report", metavar="F", help="Write a page with causes, charts and both manifests; it loads nothing."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say each decision and where it came from.")]


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


def _context(*, json_output: bool, verbose: bool, host: str | None = None) -> tuple[Context, Terminal]:
    from kitbuild.flow.context import Context  # noqa: PLC0415
    from kitbuild.store import Store  # noqa: PLC0415

    terminal = Terminal(verbose=verbose, json_output=json_output)
    environ: Mapping[str, str] = os.environ
    if host is not None:
        from kitbuild.image.engine import engine_url  # noqa: PLC0415 - docker-py takes a third of a second

        environ = {**os.environ, "DOCKER_HOST": engine_url(host)}
    return Context(environ=environ, store=Store.open(os.environ), progress=terminal), terminal


def _print(terminal: Terminal, command: str, result: Result) -> None:
    terminal.result(command, result.as_json(), result.text())
    if result.exit_code:
        raise typer.Exit(result.exit_code)


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
def check(recipe: RecipePath, *, json_output: Json = False) -> None:
    """Check all that can be known without the network."""
    from kitbuild.flow import locking  # noqa: PLC0415

    report = locking.check(recipe, os.environ)
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
    """Resolve a recipe to what cannot move, and write RECIPE's lock beside it."""
    from kitbuild.flow import locking  # noqa: PLC0415

    context, terminal = _context(json_output=json_output, verbose=verbose)
    result = locking.lock(
        context,
        recipe,
        only_check=only_check,
        update=frozenset(update or ()),
        upgrade=upgrade,
        diff=diff,
        pylock=pylock,
    )
    _print(terminal, "lock", result)


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

    context, terminal = _context(json_output=json_output, verbose=verbose)
    _print(terminal, "fetch", building.fetch(context, recipe, bundle=bundle, source=source, inputs=inputs))


@image_app.command("build")
def image(
    recipe: RecipePath,
    *,
    tag: Annotated[str | None, typer.Option("--tag", help="Another tag than kitbuild/<name>:<lock>.")] = None,
    push: Annotated[
        str | None, typer.Option("--push", metavar="REF", help="Push to this registry reference too.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="OCI.TAR", help="Write an OCI archive instead of loading it into the engine."),
    ] = None,
    json_output: Json = False,
    verbose: Verbose = False,
) -> None:
    """Build the image: lock if there is no lock, fetch, assemble, load."""
    from kitbuild.flow import building  # noqa: PLC0415

    context, terminal = _context(json_output=json_output, verbose=verbose)
    built = building.image(context, recipe, tag=tag, push=push, output=output)
    terminal.result("image", built.as_json(), built.text())


@image_app.command("inspect")
def image_inspect(
    reference: Annotated[str, typer.Argument(metavar="REF", help="An image in the engine, in a registry, or a file.")],
    *,
    show: Annotated[
        str | None, typer.Option("--show", metavar="NAME", help="Print lock, recipe, sbom, provenance or content.")
    ] = None,
    json_output: Json = False,
    verbose: Verbose = False,
) -> None:
    """What an image says of itself: lock, recipe, SBOM, provenance, each checked against the image's digests."""
    from kitbuild.flow import inspecting  # noqa: PLC0415

    context, terminal = _context(json_output=json_output, verbose=verbose)
    _print(terminal, "image-inspect", inspecting.inspect(context, reference, show=show))


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
    """Train: build the image if it is missing, start it with no network, follow it, keep the archive."""
    from kitbuild.flow import running  # noqa: PLC0415
    from kitbuild.run.follow import Stop  # noqa: PLC0415

    context, terminal = _context(json_output=json_output, verbose=verbose, host=host)
    options = running.RunOptions(out=out, engine=engine, python=python, resume=resume, host=host)
    finished = running.run(context, recipe, options, stop=_stop_on_signal(Stop()))
    _print(terminal, "run", finished)


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
    """Time the recipe in other settings, each cell in fresh processes; with --tune, find the fastest."""
    from kitbuild.bench import Grid  # noqa: PLC0415
    from kitbuild.flow import benching, running  # noqa: PLC0415
    from kitbuild.run.follow import Stop  # noqa: PLC0415

    context, terminal = _context(json_output=json_output, verbose=verbose)
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
    stop = _stop_on_signal(Stop())
    found = (
        benching.tune(context, recipe, wanted, options, apply=apply, stop=stop)
        if tune
        else benching.bench(context, recipe, wanted, options, stop=stop)
    )
    _print(terminal, "bench", found)


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

    context, terminal = _context(json_output=json_output, verbose=verbose, host=host)
    options = running.RunOptions(out=out, engine=engine, python=python, resume=None, host=host)
    again = reproducing.reproduce(
        context, archive, options, tolerance=tolerance, report=report, stop=_stop_on_signal(Stop())
    )
    _print(terminal, "reproduce", again)


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

    context, terminal = _context(json_output=json_output, verbose=False)
    verdict = archives.compare(context, left, right, report=report, tolerance=tolerance)
    _print(terminal, "compare", verdict)


@archive_app.command("verify")
def archive_verify(
    path: ArchivePath,
    *,
    expected: Annotated[
        str | None,
        typer.Option("--sha256", metavar="DIGEST", help="Fail unless the archive is the one of this digest."),
    ] = None,
    json_output: Json = False,
) -> None:
    """Check every byte of an archive against its list of files."""
    from kitbuild.flow import archives  # noqa: PLC0415

    _, terminal = _context(json_output=json_output, verbose=False)
    _print(terminal, "archive-verify", archives.archive_verify(path, expected=expected))


@archive_app.command("list")
def archive_list(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER")] = Path("runs"), *, json_output: Json = False
) -> None:
    """The runs in a folder."""
    from kitbuild.flow import archives  # noqa: PLC0415

    _, terminal = _context(json_output=json_output, verbose=False)
    _print(terminal, "archive-list", archives.archive_list(folder))


@archive_app.command("show")
def archive_show(path: ArchivePath, *, json_output: Json = False) -> None:
    """What a run was and what came of it."""
    from kitbuild.flow import archives  # noqa: PLC0415

    _, terminal = _context(json_output=json_output, verbose=False)
    _print(terminal, "archive-show", archives.archive_show(path))


@archive_app.command("repeats")
def archive_repeats(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory that keeps them.")],
    runs: Annotated[list[Path], typer.Argument(metavar="REPEAT...", help="Further runs of the same recipe.")],
    *,
    json_output: Json = False,
) -> None:
    """Keep repeats of a run in it, for `--tolerance repeats`: they show how far equal runs stray."""
    from kitbuild.flow import archives  # noqa: PLC0415

    _, terminal = _context(json_output=json_output, verbose=False)
    _print(terminal, "archive-repeats", archives.archive_repeats(path, runs))


@archive_app.command("pack")
def archive_pack(
    path: ArchivePath,
    *,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="X.KIT.TAR")] = None,
    include: Annotated[str, typer.Option("--include", help="local: what has no upstream; all: everything.")] = "local",
    weights: Annotated[bool, typer.Option("--weights", help="The trained weights too.")] = False,
    json_output: Json = False,
) -> None:
    """One file with which a stranger who has an engine can reproduce the run."""
    from kitbuild.flow import archives  # noqa: PLC0415

    context, terminal = _context(json_output=json_output, verbose=False)
    _print(
        terminal, "archive-pack", archives.archive_pack(context, path, output=output, include=include, weights=weights)
    )


@archive_app.command("unpack")
def archive_unpack(
    path: ArchivePath,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER")] = Path("runs"),
    *,
    json_output: Json = False,
) -> None:
    """Unpack an archive into a folder; what it carries goes into the store, verified."""
    from kitbuild.flow import archives  # noqa: PLC0415

    context, terminal = _context(json_output=json_output, verbose=False)
    _print(terminal, "archive-unpack", archives.archive_unpack(context, path, folder))


@base_app.command("bootstrap")
def base_bootstrap(
    target: Annotated[str, typer.Argument()] = "cpu",
    *,
    push: Annotated[str | None, typer.Option("--push", metavar="REF", help="Push it for others.")] = None,
    output: Annotated[Path | None, typer.Option("--output", metavar="F", help="Write an OCI archive.")] = None,
    json_output: Json = False,
    verbose: Verbose = False,
) -> None:
    """Make the CPU base from Debian packages."""
    from kitbuild.flow import bases  # noqa: PLC0415

    context, terminal = _context(json_output=json_output, verbose=verbose)
    _print(terminal, "base-bootstrap", bases.base_bootstrap(context, target, push=push, output=output))


@base_app.command("build")
def base_build(
    target: str,
    *,
    upstream: Annotated[
        str | None, typer.Option("--upstream", metavar="IMAGE", help="Another upstream than the Dockerfile's.")
    ] = None,
    push: Annotated[str | None, typer.Option("--push", metavar="REF", help="Push it for others.")] = None,
    output: Annotated[Path | None, typer.Option("--output", metavar="F", help="Write an OCI archive.")] = None,
    json_output: Json = False,
    verbose: Verbose = False,
) -> None:
    """Build a finished base from Dockerfile.TARGET; it is shared by digest from then on."""
    from kitbuild.flow import bases  # noqa: PLC0415

    context, terminal = _context(json_output=json_output, verbose=verbose)
    _print(terminal, "base-build", bases.base_build(context, target, upstream=upstream, push=push, output=output))


@render_app.command("slurm")
def render_slurm(
    recipe: RecipePath,
    *,
    container: Annotated[
        str, typer.Option("--container", help="pyxis, apptainer, or none: the locked environment without a container.")
    ] = "pyxis",
    image: ImageOption = None,
    inputs: Annotated[str | None, typer.Option("--inputs", metavar="DIR", help="Model and data on the nodes.")] = None,
    out: Annotated[str | None, typer.Option("--out", metavar="DIR", help="Where run directories go.")] = None,
    output: Output = None,
    json_output: Json = False,
) -> None:
    """An sbatch script. --image takes a .sqsh or .sif file too."""
    from kitbuild.flow import rendering  # noqa: PLC0415

    context, terminal = _context(json_output=json_output, verbose=False)
    options = rendering.RenderOptions(image=image, inputs=inputs, out=out, output=output)
    _print(terminal, "render", rendering.render_for_slurm(context, recipe, options, container=container))


@render_app.command("k8s")
def render_k8s(
    recipe: RecipePath,
    *,
    kind: Annotated[str, typer.Option("--kind", help="trainjob: Kubeflow Trainer; job: an indexed Job.")] = "trainjob",
    image: ImageOption = None,
    inputs: Annotated[
        str | None, typer.Option("--inputs", metavar="CLAIM", help="The volume claim with model and data.")
    ] = None,
    out: Annotated[str | None, typer.Option("--out", metavar="CLAIM", help="The volume claim for runs.")] = None,
    output: Output = None,
    json_output: Json = False,
) -> None:
    """Kubernetes objects: a TrainJob with its runtime, or an indexed Job with its Service."""
    from kitbuild.flow import rendering  # noqa: PLC0415

    context, terminal = _context(json_output=json_output, verbose=False)
    options = rendering.RenderOptions(image=image, inputs=inputs, out=out, output=output)
    _print(terminal, "render", rendering.render_for_k8s(context, recipe, options, kind=kind))


@render_app.command("compose")
def render_compose(
    recipe: RecipePath,
    *,
    image: ImageOption = None,
    inputs: Annotated[str | None, typer.Option("--inputs", metavar="DIR", help="Model and data.")] = None,
    out: Annotated[str | None, typer.Option("--out", metavar="DIR", help="The run directory.")] = None,
    output: Output = None,
    json_output: Json = False,
) -> None:
    """A Compose file; several nodes of a recipe become several containers on this host."""
    from kitbuild.flow import rendering  # noqa: PLC0415

    context, terminal = _context(json_output=json_output, verbose=False)
    options = rendering.RenderOptions(image=image, inputs=inputs, out=out, output=output)
    _print(terminal, "render", rendering.render_for_compose(context, recipe, options))


@store_app.command("verify")
def store_verify(
    *,
    repair: Annotated[bool, typer.Option("--repair", help="Remove what is damaged.")] = False,
    json_output: Json = False,
) -> None:
    """Hash every file in the store."""
    from kitbuild.flow import upkeep  # noqa: PLC0415

    context, terminal = _context(json_output=json_output, verbose=False)
    _print(terminal, "store-verify", upkeep.store_verify(context, repair=repair))


@store_app.command("gc")
def store_gc(
    folders: Annotated[list[Path], typer.Argument(help="Folders whose locks are kept.")], *, json_output: Json = False
) -> None:
    """Remove what no lock in FOLDERS names."""
    from kitbuild.flow import upkeep  # noqa: PLC0415

    context, terminal = _context(json_output=json_output, verbose=False)
    _print(terminal, "store-gc", upkeep.store_gc(context, tuple(folders)))


@app.command()
def doctor(*, json_output: Json = False) -> None:
    """What this machine has of what kitbuild needs."""
    from kitbuild.flow import upkeep  # noqa: PLC0415

    context, terminal = _context(json_output=json_output, verbose=False)
    report = upkeep.doctor(context)
    _print(terminal, "doctor", report)


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
    _print(terminal, "stack", upkeep.stack())


def _stop_on_signal(stop: Any) -> Any:
    """While the guest runs, the first Ctrl-C or SIGTERM asks it for a checkpoint; any other ends at once."""

    def handler(_signal: int, _frame: Any) -> None:
        if not stop.following or (stop.requested and time.monotonic() - stop.since > 1):
            raise KeyboardInterrupt
        if not stop.requested:
            stop.requested, stop.since = True, time.monotonic()

    signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGTERM, handler)
    return stop
