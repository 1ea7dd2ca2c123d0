"""`kitbuild image …`: Images: built, and read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from kitbuild.verbs.options import Json, RecipePath, Verbose, context_of, present


class _ImageVerbs(typer.core.TyperGroup):
    """`kitbuild image RECIPE` is `kitbuild image build RECIPE`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, "--help"}:
            args = ["build", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_ImageVerbs,
    help="Build an image (`kitbuild image RECIPE`), or read one.",
    no_args_is_help=True,
)


@app.command("build")
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

    context, terminal = context_of(json_output=json_output, verbose=verbose)
    built = building.image(context, recipe, tag=tag, push=push, output=output)
    terminal.result("image", built.as_json(), built.text())


@app.command("inspect")
def image_inspect(
    reference: Annotated[str, typer.Argument(metavar="REF", help="An image in the engine, in a registry, or a file.")],
    *,
    show: Annotated[
        str | None, typer.Option("--show", metavar="NAME", help="Print lock, recipe, sbom, provenance or content.")
    ] = None,
    json_output: Json = False,
    verbose: Verbose = False,
) -> None:
    """What an image says of itself. Lock, recipe, SBOM, provenance, each checked against the image's digests."""
    from kitbuild.flow import inspecting  # noqa: PLC0415

    context, terminal = context_of(json_output=json_output, verbose=verbose)
    present(terminal, "image-inspect", inspecting.inspect(context, reference, show=show))
