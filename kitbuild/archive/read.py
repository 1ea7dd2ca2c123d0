"""Step 5: read an archive into one value, with all that is wrong with it.

    archive = read(path)                # cheap: documents only
    archive = read(path, weights=True)  # also the digest of every tensor in model/

`verify` is the second as a list of problems; `check` raises them, exit 7.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kitbuild.archive.checks import blob_problems, document_problems, metrics_problems, weight_problems
from kitbuild.archive.documents import parse_exit, parse_lock, parse_manifest, parse_metrics
from kitbuild.archive.kit import read_kit
from kitbuild.archive.models import MANIFEST_FORMAT, Exit, Manifest, Metrics
from kitbuild.archive.seal import SEAL_FILE, Seal, document_digests, file_problems, parse_seal
from kitbuild.archive.source import KIT_FILE, REPEATS_PREFIX, KitTar, Source, open_source, read_document
from kitbuild.archive.tar_bytes import byte_problems
from kitbuild.errors import LockError, Problem, UsageError, VerificationError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DOCUMENTS = ("manifest.json", "lock.json", "recipe.yaml", "exit.json", "metrics.jsonl")


@dataclass(frozen=True, kw_only=True)
class Archive:
    """A run as it was written.

    `truncated`: the run was cut off while it wrote a line of metrics. `sha256` is of archive.json and so names every
    byte; None for a run that an older kitbuild made or that was killed.
    """

    path: Path
    source: Source
    manifest: Manifest
    manifest_found: bool
    metrics: tuple[Metrics, ...]
    truncated: bool
    exit: Exit | None
    has_weights: bool
    seal: Seal | None
    sha256: str | None
    problems: tuple[Problem, ...]

    @property
    def finished(self) -> bool:
        """Whether the run did all that it set out to do."""
        return self.manifest.complete and self.exit is not None and self.exit.exit_code == 0

    def repeat(self, name: str) -> Archive:
        """One of the repeats that it keeps."""
        place = self.source.below(f"{REPEATS_PREFIX}{name}")
        return _from_source(place, self.path / REPEATS_PREFIX / name, weights=True)

    @classmethod
    def read(cls, path: Path, *, weights: bool = False) -> Archive:
        """The archive at `path`, a run directory or a `.kit.tar`."""
        return read(path, weights=weights)


def read(path: Path, *, weights: bool = False) -> Archive:
    """Read a run directory or a `.kit.tar`; `weights` also checks the bytes of `model/`."""
    try:
        return _from_source(open_source(path), path, weights=weights)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror or error}", hint="check the path and who may read it"
        ) from error


def _from_source(source: Source, path: Path, *, weights: bool) -> Archive:
    documents = {name: read_document(source, name) for name in DOCUMENTS}
    seal_bytes = read_document(source, SEAL_FILE)
    seal, seal_wrong = parse_seal(seal_bytes, file=f"{path}/{SEAL_FILE}")
    manifest = _manifest(path, documents, seal)
    lines = documents["metrics.jsonl"] or b""
    metrics, problems, truncated = parse_metrics(lines, file=f"{path}/metrics.jsonl")
    exit_ = parse_exit(documents["exit.json"], file=f"{path}/exit.json") if documents["exit.json"] is not None else None
    found = [*problems]
    if documents["manifest.json"] is None:
        found.append(Problem(message="missing: the run was killed or is not over", file=f"{path}/manifest.json"))
    else:
        found += document_problems(
            path=path, manifest=manifest, metrics=metrics, truncated=truncated, exit_=exit_,
            lock_bytes=documents["lock.json"], recipe_bytes=documents["recipe.yaml"],
        )  # fmt: skip
        found = found or [*metrics_problems(source, manifest, lines)]
    if weights and manifest.weights:
        found += weight_problems(source, manifest)
    found += [*seal_wrong, *_sealed(source, manifest, documents, seal, found, deep=weights)]
    if manifest.files is not None and seal_bytes is None:
        text = "missing: the run was killed while it was recorded, or the file was removed"
        found.append(Problem(message=text, file=f"{path}/{SEAL_FILE}"))
    return Archive(
        path=path, source=source, manifest=manifest, manifest_found=documents["manifest.json"] is not None,
        metrics=metrics, truncated=truncated, exit=exit_,
        has_weights=any(name.startswith("model/") for name in source.names()), seal=seal,
        sha256=hashlib.sha256(seal_bytes).hexdigest() if seal_bytes is not None else None, problems=tuple(found),
    )  # fmt: skip


def _sealed(
    source: Source,
    manifest: Manifest,
    documents: dict[str, bytes | None],
    seal: Seal | None,
    found: list[Problem],
    *,
    deep: bool,
) -> Iterator[Problem]:
    """The files against the list; what has a problem already is not told twice."""
    if seal is None:
        return
    told = frozenset(problem.file or "" for problem in found)
    yield from document_digests(seal, documents, path=source.path, told=told)
    if deep:
        yield from file_problems(source, seal, read=DOCUMENTS, told=told, manifest=manifest)


def verify(archive: Archive) -> tuple[Problem, ...]:
    """Everything wrong with it: weights and carried files too."""
    again = read(archive.path, weights=True)
    packed = _packed_problems(again, again.source) if isinstance(again.source, KitTar) else ()
    names = sorted({name.split("/")[1] for name in again.source.names() if name.startswith(REPEATS_PREFIX)})
    repeats = [problem for name in names for problem in again.repeat(name).problems]
    return (*again.problems, *repeats, *packed)


def _packed_problems(archive: Archive, tar: KitTar) -> Iterator[Problem]:
    """Of the packed file beside the run in it."""
    kit = read_kit(tar)
    if kit.format != 1:
        yield from byte_problems(tar.path, tar.members)
        if kit.archive_sha256 != archive.sha256:
            text = f"{SEAL_FILE} has sha256 {archive.sha256}, {KIT_FILE} says {kit.archive_sha256}"
            yield Problem(message=text, file=str(tar.path))
    yield from blob_problems(tar)


def check(archive: Archive) -> None:
    """Raise every problem at once, exit 7."""
    problems = verify(archive)
    if problems:
        raise VerificationError(
            f"{archive.path} does not verify: {len(problems)} problem{'' if len(problems) == 1 else 's'}",
            problems=problems,
            hint="do not rely on this archive; take it again from where it came",
        )


def _manifest(path: Path, documents: dict[str, bytes | None], seal: Seal | None) -> Manifest:
    """The manifest, or for a run that was killed what its lock alone tells."""
    data, lock_bytes = documents["manifest.json"], documents["lock.json"]
    if data is not None:
        try:
            return parse_manifest(data, file=f"{path}/manifest.json")
        except LockError as error:
            changed = [*document_digests(seal, {"manifest.json": data}, path=path, told=())] if seal else []
            if not changed:
                raise
            raise VerificationError(str(changed[0]), problems=changed, hint="the archive is damaged") from error
    if lock_bytes is None:
        raise UsageError(f"{path} is not a run: it has no manifest.json", hint="`kitbuild archive list` shows the runs")
    lock = parse_lock(lock_bytes, file=f"{path}/lock.json")
    body: dict[str, Any] = {"format": MANIFEST_FORMAT, "name": lock.name, "lock_sha256": lock.sha256}
    return Manifest(**body, lock=lock, content_sha256=lock.content_sha256)
