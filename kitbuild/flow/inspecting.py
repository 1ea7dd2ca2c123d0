"""What an image says of itself, wherever it is: `kitbuild image inspect`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kitbuild.errors import ImageError, UsageError
from kitbuild.flow.context import Context, Result
from kitbuild.image.documents import DOCUMENTS, Told, from_archive, from_engine, from_registry
from kitbuild.lock.files import parse_lock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kitbuild.lock.models import Lock


def inspect(context: Context, reference: str, *, show: str | None) -> Result:
    """A file, else the engine's image of this name, else a registry's."""
    if show is not None and show not in DOCUMENTS:
        raise UsageError(f"--show {show} is none of the documents", hint=f"one of {', '.join(DOCUMENTS)}")
    told = _find(context, reference)
    if show is not None:
        text = told.documents[show].decode()
        return Result(fields={"reference": reference, "name": show, "text": text}, lines=(text.rstrip("\n"),))
    lock = parse_lock(told.documents["lock"], name=f"the lock in {reference}")
    return Result(fields=_fields(told, lock), lines=tuple(_lines(told, lock)))


def _find(context: Context, reference: str) -> Told:
    path = Path(reference)
    if path.suffix in {".yaml", ".yml"} and path.is_file():
        raise UsageError(
            f"{reference} is a recipe, not an image", hint=f"`kitbuild image {reference}` prints its image"
        )
    if path.is_file():
        return from_archive(path)
    try:
        client = context.client()
    except ImageError as error:
        context.progress.note(f"{error.message}: asking the registry")
    else:
        told = from_engine(client, reference)
        if told is not None:
            return told
        context.progress.note(f"{reference} is not in the engine: asking the registry")
    try:
        return from_registry(reference, store=context.store, environ=context.environ, progress=context.progress)
    except ImageError as error:
        listed = "`docker images 'kitbuild/*'` lists what the engine has"
        raise ImageError(error.message, hint=f"{listed}; {error.hint}" if error.hint else listed) from error


def _fields(told: Told, lock: Lock) -> dict[str, Any]:
    return {
        "reference": told.reference,
        "place": told.place,
        "image_id": told.config_digest,
        "manifest_digest": told.manifest_digest,
        "lock_sha256": lock.sha256,
        "content_sha256": told.labels["org.kitbuild.content"],
        "labels": dict(told.labels),
        "layers": [{"name": name, "digest": digest} for name, digest in told.layers],
        "lock": json.loads(told.documents["lock"]),
        "recipe": told.documents["recipe"].decode(),
        "sbom": json.loads(told.documents["sbom"]),
        "provenance": json.loads(told.documents["provenance"]),
    }


def _lines(told: Told, lock: Lock) -> Iterator[str]:
    files = len(json.loads(told.documents["content"])["files"])
    yield f"{told.reference}  {told.config_digest}  ({told.place})"
    if told.manifest_digest is not None:
        yield f"  manifest   {told.manifest_digest}"
    yield f"  lock       {lock.name} {lock.sha256}"
    yield f"  base       {lock.base.name} @ {lock.base.manifest_digest}"
    yield f"  holds      {len(lock.base.packages)} system packages, {len(lock.wheels)} wheels, {files} files of ours"
    for kernel in lock.kernels:
        yield f"  kernel     {kernel.repo} @ {kernel.commit} ({kernel.variant})"
    for name, digest in told.layers:
        yield f"  layer      {digest[7:19]}  {name}"
    yield f"  documents  {', '.join(DOCUMENTS)}: kitbuild image inspect {told.reference} --show NAME"
