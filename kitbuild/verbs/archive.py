"""`kitbuild archive …`: Archived runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kitbuild.verbs.options import ArchivePath, Json, context_of, present

app = typer.Typer(help="Archived runs: verify, list, show, pack, unpack.", no_args_is_help=True)


@app.command("verify")
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

    _, terminal = context_of(json_output=json_output, verbose=False)
    present(terminal, "archive-verify", archives.archive_verify(path, expected=expected))


@app.command("list")
def archive_list(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER")] = Path("runs"), *, json_output: Json = False
) -> None:
    """The runs in a folder."""
    from kitbuild.flow import archives  # noqa: PLC0415

    _, terminal = context_of(json_output=json_output, verbose=False)
    present(terminal, "archive-list", archives.archive_list(folder))


@app.command("show")
def archive_show(path: ArchivePath, *, json_output: Json = False) -> None:
    """What a run was and what came of it."""
    from kitbuild.flow import archives  # noqa: PLC0415

    _, terminal = context_of(json_output=json_output, verbose=False)
    present(terminal, "archive-show", archives.archive_show(path))


@app.command("repeats")
def archive_repeats(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory that keeps them.")],
    runs: Annotated[list[Path], typer.Argument(metavar="REPEAT...", help="Further runs of the same recipe.")],
    *,
    json_output: Json = False,
) -> None:
    """Keep repeats of a run in it, for `--tolerance repeats`. They show how far equal runs stray."""
    from kitbuild.flow import archives  # noqa: PLC0415

    _, terminal = context_of(json_output=json_output, verbose=False)
    present(terminal, "archive-repeats", archives.archive_repeats(path, runs))


@app.command("pack")
def archive_pack(
    path: ArchivePath,
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="X.KIT.TAR", help="Else beside the run.")
    ] = None,
    include: Annotated[str, typer.Option("--include", help="local: what has no upstream; all: everything.")] = "local",
    weights: Annotated[bool, typer.Option("--weights", help="The trained weights too.")] = False,
    json_output: Json = False,
) -> None:
    """One file from which a stranger can reproduce the run."""
    from kitbuild.flow import archives  # noqa: PLC0415

    context, terminal = context_of(json_output=json_output, verbose=False)
    present(
        terminal, "archive-pack", archives.archive_pack(context, path, output=output, include=include, weights=weights)
    )


@app.command("unpack")
def archive_unpack(
    path: ArchivePath,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER")] = Path("runs"),
    *,
    json_output: Json = False,
) -> None:
    """Unpack an archive into a folder. What it carries goes into the store, verified."""
    from kitbuild.flow import archives  # noqa: PLC0415

    context, terminal = context_of(json_output=json_output, verbose=False)
    present(terminal, "archive-unpack", archives.archive_unpack(context, path, folder))
