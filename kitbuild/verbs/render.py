"""`kitbuild render …`: A locked image as a job for another system."""

from __future__ import annotations

from typing import Annotated

import typer

from kitbuild.verbs.options import ImageOption, Json, Output, RecipePath, context_of, present

app = typer.Typer(help="A locked image as a job for another system.", no_args_is_help=True)


@app.command("slurm")
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

    context, terminal = context_of(json_output=json_output, verbose=False)
    options = rendering.RenderOptions(image=image, inputs=inputs, out=out, output=output)
    present(terminal, "render", rendering.render_for_slurm(context, recipe, options, container=container))


@app.command("k8s")
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
    """Kubernetes objects. A TrainJob with its runtime, or an indexed Job with its Service."""
    from kitbuild.flow import rendering  # noqa: PLC0415

    context, terminal = context_of(json_output=json_output, verbose=False)
    options = rendering.RenderOptions(image=image, inputs=inputs, out=out, output=output)
    present(terminal, "render", rendering.render_for_k8s(context, recipe, options, kind=kind))


@app.command("compose")
def render_compose(
    recipe: RecipePath,
    *,
    image: ImageOption = None,
    inputs: Annotated[str | None, typer.Option("--inputs", metavar="DIR", help="Model and data.")] = None,
    out: Annotated[str | None, typer.Option("--out", metavar="DIR", help="The run directory.")] = None,
    output: Output = None,
    json_output: Json = False,
) -> None:
    """A Compose file. Several nodes of a recipe become several containers on this host."""
    from kitbuild.flow import rendering  # noqa: PLC0415

    context, terminal = context_of(json_output=json_output, verbose=False)
    options = rendering.RenderOptions(image=image, inputs=inputs, out=out, output=output)
    present(terminal, "render", rendering.render_for_compose(context, recipe, options))
