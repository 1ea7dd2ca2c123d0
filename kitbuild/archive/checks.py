"""Step 5, verification: problems between the parts of one archive. Nothing here raises or trains."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from kitbuild.archive.documents import parse_json
from kitbuild.archive.safetensors import same_dtype, tensors
from kitbuild.archive.source import BLOB_PREFIX
from kitbuild.errors import Problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from kitbuild.archive.models import Exit, Manifest, Metrics, Tensor
    from kitbuild.archive.source import KitTar, Source

CHUNK_BYTES = 1 << 20
Found = dict[str, tuple[str, "Tensor"]]


def data_fingerprint(batches: Iterable[str]) -> str:
    """sha256 over the batch digests in step order, one a line; the guest computes the same."""
    return hashlib.sha256("\n".join(batches).encode()).hexdigest()


def document_problems(
    *,
    path: Path,
    manifest: Manifest,
    metrics: tuple[Metrics, ...],
    truncated: bool,
    exit_: Exit | None,
    lock_bytes: bytes | None,
    recipe_bytes: bytes | None,
) -> Iterator[Problem]:
    """What is wrong in and between manifest, lock, recipe, metrics and exit."""
    yield from _lock_problems(path, manifest, lock_bytes)
    yield from _recipe_problems(path, manifest, recipe_bytes)
    yield from _sequence_problems(path, metrics)
    if manifest.complete:
        yield from _complete_problems(path, manifest, metrics, truncated=truncated, exit_=exit_)


def _lock_problems(path: Path, manifest: Manifest, lock_bytes: bytes | None) -> Iterator[Problem]:
    where = f"{path}/lock.json"
    if lock_bytes is None:
        yield Problem(message="missing", file=where)
    else:
        sha256 = hashlib.sha256(lock_bytes).hexdigest()
        if sha256 != manifest.lock_sha256:
            yield Problem(message=f"sha256 is {sha256}, the manifest says {manifest.lock_sha256}", file=where)
        try:
            body = parse_json(lock_bytes)
        except ValueError as error:
            yield Problem(message=f"not JSON: {error}", file=where)
        else:
            if isinstance(body, dict):
                body.pop("content_sha256", None)
            if body != manifest.lock.model_dump(mode="json"):
                yield Problem(message="is not the lock in the manifest", file=where)
    expected = manifest.lock.content_sha256
    if manifest.content_sha256 != expected:
        text = f"is {manifest.content_sha256}, the lock's content gives {expected}"
        yield Problem(message=text, file=f"{path}/manifest.json", key="content_sha256")
    seed = manifest.lock.recipe.get("seed")
    if manifest.seed is not None and seed is not None and manifest.seed != seed:
        yield Problem(message=f"is {manifest.seed}, the lock has {seed}", file=f"{path}/manifest.json", key="seed")


def _recipe_problems(path: Path, manifest: Manifest, recipe_bytes: bytes | None) -> Iterator[Problem]:
    where = f"{path}/recipe.yaml"
    if recipe_bytes is None:
        yield Problem(message="missing", file=where)
        return
    sha256 = hashlib.sha256(recipe_bytes).hexdigest()
    if sha256 != manifest.lock.recipe_sha256:
        yield Problem(message=f"sha256 is {sha256}, the lock says {manifest.lock.recipe_sha256}", file=where)


def _sequence_problems(path: Path, metrics: tuple[Metrics, ...]) -> Iterator[Problem]:
    expected = 1
    for number, line in enumerate(metrics, start=1):
        if line.step != expected:
            text = f"step {line.step} where step {expected} was due"
            yield Problem(message=text, file=f"{path}/metrics.jsonl", line=number)
        expected = line.step + 1


def _complete_problems(
    path: Path, manifest: Manifest, metrics: tuple[Metrics, ...], *, truncated: bool, exit_: Exit | None
) -> Iterator[Problem]:
    """What a run that says it is complete must hold."""
    where = f"{path}/metrics.jsonl"
    if truncated:
        yield Problem(message="the last line is cut off, but the manifest says complete", file=where)
    if exit_ is None:
        yield Problem(message="missing, but the manifest says complete", file=f"{path}/exit.json")
    elif exit_.exit_code != 0:
        text = f"exit code {exit_.exit_code}, but the manifest says complete"
        yield Problem(message=text, file=f"{path}/exit.json")
    fingerprint = data_fingerprint(line.batch_sha256 for line in metrics)
    facts: tuple[tuple[str, object, object], ...] = (
        ("results.steps", manifest.results.steps, len(metrics)),
        ("data.fingerprint", manifest.data.fingerprint, fingerprint),
        ("results.loss_first", manifest.results.loss_first, metrics[0].loss if metrics else None),
        ("results.loss_last", manifest.results.loss_last, metrics[-1].loss if metrics else None),
    )
    for key, stated, computed in facts:
        if stated != computed:
            text = f"is {stated}, the metrics give {computed}"
            yield Problem(message=text, file=f"{path}/manifest.json", key=key)
    if not manifest.weights:
        yield Problem(message="no tensor is listed", file=f"{path}/manifest.json", key="weights")


def metrics_problems(source: Source, manifest: Manifest, data: bytes) -> Iterator[Problem]:
    """A complete run whose metrics.jsonl is not, to the byte, what was written (an older kitbuild kept no digest)."""
    sha256 = hashlib.sha256(data).hexdigest()
    if manifest.complete and manifest.results.metrics_sha256 not in (None, sha256):
        text = f"sha256 is {sha256}, the manifest says {manifest.results.metrics_sha256}"
        yield Problem(message=text, file=f"{source.path}/metrics.jsonl")


def blob_problems(tar: KitTar) -> Iterator[Problem]:
    """Carried files that are not what their name says."""
    for sha256 in tar.blobs():
        digest = hashlib.sha256()
        with tar.open_member(BLOB_PREFIX + sha256) as stream:
            while chunk := stream.read(CHUNK_BYTES):
                digest.update(chunk)
        if digest.hexdigest() != sha256:
            yield Problem(message=f"sha256 is {digest.hexdigest()}", file=f"{tar.path}/{BLOB_PREFIX}{sha256}")


def weight_problems(source: Source, manifest: Manifest) -> Iterator[Problem]:
    """Tensors in `model/` that are not the manifest's. An archive without `model/` carries digests only."""
    if not any(name.startswith("model/") for name in source.names()):
        return
    found: Found = {}
    for name in source.names():
        if name.startswith("model/") and name.endswith(".safetensors"):
            yield from _read_weights(source, name, found)
    yield from _tensor_problems(source, manifest, found)


def _read_weights(source: Source, file: str, found: Found) -> Iterator[Problem]:
    where = f"{source.path}/{file}"
    try:
        with source.open(file) as stream:
            for name, tensor in tensors(stream):
                if name in found:
                    yield Problem(message="is also in " + found[name][0], file=where, key=name)
                found[name] = (file, tensor)
    except ValueError as error:
        yield Problem(message=str(error), file=where)


def _tensor_problems(source: Source, manifest: Manifest, found: Found) -> Iterator[Problem]:
    """A tied weight may be listed under one name and stored under the other, so bytes count, not names alone."""
    stored = {(tensor.shape, tensor.sha256) for _, tensor in found.values()}
    listed = {(tensor.shape, tensor.sha256) for tensor in manifest.weights.values()}
    for name, tensor in sorted(manifest.weights.items()):
        if name not in found:
            if (tensor.shape, tensor.sha256) not in stored:
                yield Problem(message="is in no file", file=f"{source.path}/model", key=name)
            continue
        file, actual = found[name]
        where = f"{source.path}/{file}"
        if actual.shape != tensor.shape or not same_dtype(actual.dtype, tensor.dtype):
            text = f"is {actual.dtype} {list(actual.shape)}, the manifest says {tensor.dtype} {list(tensor.shape)}"
            yield Problem(message=text, file=where, key=name)
        elif actual.sha256 != tensor.sha256:
            text = f"sha256 is {actual.sha256}, the manifest says {tensor.sha256}"
            yield Problem(message=text, file=where, key=name)
    for name, (file, actual) in sorted(found.items()):
        if name not in manifest.weights and (actual.shape, actual.sha256) not in listed:
            yield Problem(message="is not in the manifest", file=f"{source.path}/{file}", key=name)
