"""What verbs share: their common options, the effects that they pass to the flow, and how a result is printed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kitbuild.terminal import Terminal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kitbuild.flow.context import Context, Result

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


def context_of(*, json_output: bool, verbose: bool, host: str | None = None) -> tuple[Context, Terminal]:
    """Store, environment and engine for the flow, and where it reports to."""
    from kitbuild.flow.context import Context  # noqa: PLC0415
    from kitbuild.store import Store  # noqa: PLC0415

    terminal = Terminal(verbose=verbose, json_output=json_output)
    environ: Mapping[str, str] = os.environ
    if host is not None:
        from kitbuild.image.engine import engine_url  # noqa: PLC0415 - docker-py takes a third of a second

        environ = {**os.environ, "DOCKER_HOST": engine_url(host)}
    return Context(environ=environ, store=Store.open(os.environ), progress=terminal), terminal


def present(terminal: Terminal, command: str, result: Result) -> None:
    """Print a result; one that is no success is the exit code."""
    terminal.result(command, result.as_json(), result.text())
    if result.exit_code:
        raise typer.Exit(result.exit_code)


def stop_on_signal(stop: Any) -> Any:
    """While the guest runs, the first Ctrl-C or SIGTERM asks it for a checkpoint; any other ends at once."""

    def handler(_signal: int, _frame: Any) -> None:
        if not stop.following or (stop.requested and time.monotonic() - stop.since > 1):
            raise KeyboardInterrupt
        if not stop.requested:
            stop.requested, stop.since = True, time.monotonic()

    signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGTERM, handler)
    return stop
