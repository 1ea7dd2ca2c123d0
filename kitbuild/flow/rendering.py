"""lock + image reference → a job for Slurm, Kubernetes or Compose. No network, no engine; nothing is started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kitbuild import recipe as recipes
from kitbuild.errors import ImageError, LockError, UsageError
from kitbuild.flow.context import Context, Result
from kitbuild.image.known import known_image
from kitbuild.lock.files import check_current, lock_path, read_lock
from kitbuild.render import ImageReference, Job, render_compose, render_job, render_slurm, render_trainjob
from kitbuild.render.k8s import KINDS
from kitbuild.render.slurm import CONTAINERS

if TYPE_CHECKING:
    from pathlib import Path

    from kitbuild.lock.models import Lock

_FILES = (".sqsh", ".sif")


@dataclass(frozen=True, kw_only=True)
class RenderOptions:
    """What the user says of the place; None where the place has a default."""

    image: str | None
    inputs: str | None
    out: str | None
    output: Path | None


def render_for_slurm(context: Context, path: Path, options: RenderOptions, *, container: str) -> Result:
    """`kitbuild render slurm`."""
    if container not in CONTAINERS:
        raise UsageError(f"--container {container} is not known", hint=f"one of {', '.join(CONTAINERS)}")
    lock = _current_lock(path)
    image: ImageReference | str | None = None
    if container == "none":
        if options.image is not None:
            raise UsageError("--image does not go with --container none", hint="the locked files are run as they are")
    elif options.image is not None and options.image.endswith(_FILES):
        image = options.image
    else:
        image = _image(context, lock, path, options.image)
    text = render_slurm(
        Job.of(lock, recipe=str(path)),
        container=container,
        image=image,
        inputs=options.inputs or "inputs",
        out=options.out or "runs",
    )
    return _result(text, options, system="slurm", kind=container, image=image)


def render_for_k8s(context: Context, path: Path, options: RenderOptions, *, kind: str) -> Result:
    """`kitbuild render k8s`."""
    if kind not in KINDS:
        raise UsageError(f"--kind {kind} is not known", hint=f"one of {', '.join(KINDS)}")
    lock = _current_lock(path)
    image = _image(context, lock, path, options.image)
    render = render_trainjob if kind == "trainjob" else render_job
    text = render(Job.of(lock, recipe=str(path)), image=image, inputs=options.inputs, out=options.out)
    return _result(text, options, system="k8s", kind=kind, image=image)


def render_for_compose(context: Context, path: Path, options: RenderOptions) -> Result:
    """`kitbuild render compose`; an image that was never pushed serves on this machine."""
    lock = _current_lock(path)
    image = _image(context, lock, path, options.image, local=True)
    job = Job.of(lock, recipe=str(path))
    text = render_compose(job, image=image, inputs=options.inputs or "inputs", out=options.out or "out")
    return _result(text, options, system="compose", kind=None, image=image)


def _current_lock(path: Path) -> Lock:
    """The lock beside the recipe; what is rendered is of a lock that somebody has, so none is made here."""
    loaded = recipes.read(path)
    lock = read_lock(path)
    if lock is None:
        raise LockError(
            f"{lock_path(path)} does not exist", hint=f"kitbuild image {path} --push REF makes it, and the image"
        )
    check_current(loaded, lock)
    return lock


def _image(context: Context, lock: Lock, path: Path, given: str | None, *, local: bool = False) -> ImageReference:
    """By digest: from `--image`, else from the last push of this lock's image, else (`local`) this machine's own."""
    known = known_image(context.store, lock)
    push = f"kitbuild image {path} --push REGISTRY/NAME:TAG"
    if given is not None:
        named = ImageReference.parse(given)
        if named.digest is not None:
            if known is not None and known.manifest_digest == named.digest:
                return named.at(named.digest, config_digest=known.config_digest)
            return named
        if known is None:
            raise ImageError(
                f"--image {given} has no digest, and this lock's image was not built here, so it is not known",
                hint=f"NAME@sha256:…, as `{push} --json` prints it (manifest_digest)",
            )
        return named.at(known.manifest_digest, config_digest=known.config_digest)
    if known is None:
        raise ImageError(f"no image of {lock_path(path)} was built here", hint=f"{push}, or give --image NAME@sha256:…")
    if known.pushed:
        return ImageReference.parse(known.pushed[0]).at(known.manifest_digest, config_digest=known.config_digest)
    if local and known.engine_id is not None:
        return ImageReference.local(
            known.engine_id, config_digest=known.config_digest, manifest_digest=known.manifest_digest
        )
    raise ImageError(
        f"the image of {lock_path(path)} was built here, but never pushed to a registry",
        hint=f"{push}, or give --image NAME@sha256:…",
    )


def _result(
    text: str, options: RenderOptions, *, system: str, kind: str | None, image: ImageReference | str | None
) -> Result:
    if options.output is not None:
        try:
            options.output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{options.output} cannot be written: {error.strerror}") from error
    fields = {
        "system": system,
        "kind": kind,
        "image": None if image is None else str(image),
        "path": None if options.output is None else str(options.output),
        "text": text,
    }
    return Result(fields=fields, lines=(text if options.output is None else f"wrote {options.output}",))
