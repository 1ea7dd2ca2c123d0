"""`kitbuild store …`: The content-addressed store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kitbuild.verbs.options import Json, context_of, present

app = typer.Typer(help="The content-addressed store.", no_args_is_help=True)


@app.command("verify")
def store_verify(
    *,
    repair: Annotated[bool, typer.Option("--repair", help="Remove what is damaged.")] = False,
    json_output: Json = False,
) -> None:
    """Hash every file in the store."""
    from kitbuild.flow import upkeep  # noqa: PLC0415

    context, terminal = context_of(json_output=json_output, verbose=False)
    present(terminal, "store-verify", upkeep.store_verify(context, repair=repair))


@app.command("gc")
def store_gc(
    folders: Annotated[list[Path], typer.Argument(help="Folders whose locks are kept.")], *, json_output: Json = False
) -> None:
    """Remove what no lock in FOLDERS names."""
    from kitbuild.flow import upkeep  # noqa: PLC0415

    context, terminal = context_of(json_output=json_output, verbose=False)
    present(terminal, "store-gc", upkeep.store_gc(context, tuple(folders)))
