"""`kitbuild base …`: Finished base images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kitbuild.verbs.options import Json, Verbose, context_of, present

app = typer.Typer(help="Finished base images, referred to by digest.", no_args_is_help=True)


@app.command("bootstrap")
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

    context, terminal = context_of(json_output=json_output, verbose=verbose)
    present(terminal, "base-bootstrap", bases.base_bootstrap(context, target, push=push, output=output))


@app.command("build")
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
    """Build a finished base from Dockerfile.TARGET. It is shared by digest from then on."""
    from kitbuild.flow import bases  # noqa: PLC0415

    context, terminal = context_of(json_output=json_output, verbose=verbose)
    present(terminal, "base-build", bases.base_build(context, target, upstream=upstream, push=push, output=output))
