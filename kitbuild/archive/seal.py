"""Step 5, archive.json: the list of an archive's files that the guest writes last, held against the files.

Each file stands there with size and sha256. For weights it is the header's sha256: each tensor behind it has a digest
in the manifest. The list has a digest of itself and one way to be written, so that no byte of it changes unseen, and
its own sha256 names the whole archive. A run that an older kitbuild made has none.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kitbuild.archive.documents import parse_json
from kitbuild.errors import LockError, Problem
from kitbuild.lock.models import Sha256, canonical

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from kitbuild.archive.models import Manifest
    from kitbuild.archive.source import Source, Stream

SEAL_FILE = "archive.json"
SEAL_FORMAT = 1
CHUNK_BYTES = 1 << 20
# Left out of a packed archive as a whole, unless it was packed with its weights.
WEIGHT_FOLDERS = ("model/", "adapter/")
# Nothing may be added to these; beside them a user may keep what he likes.
CLOSED_FOLDERS = (*WEIGHT_FOLDERS, "logs/")


class Closed(BaseModel):
    """Frozen, strict, without other keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class SealedFile(Closed):
    """One file; exactly one of the digests."""

    size: Annotated[int, Field(ge=0)]
    sha256: Sha256 | None = None
    header_sha256: Sha256 | None = None


class Seal(Closed):
    """A whole archive.json; `sha256` is of the canonical JSON of the rest."""

    format: Literal[1]
    files: dict[str, SealedFile]
    sha256: Sha256


def parse_seal(data: bytes | None, *, file: str) -> tuple[Seal | None, tuple[Problem, ...]]:
    """The list, and what is wrong with it itself; a newer format is exit 3."""
    if data is None:
        return None, ()
    try:
        body = parse_json(data)
        newer = isinstance(body, dict) and isinstance(body.get("format"), int) and body["format"] > SEAL_FORMAT
        if newer and _intact(body, data):
            raise LockError(
                f"{file}: format {body['format']} is newer than this kitbuild reads ({SEAL_FORMAT})",
                hint="use a newer kitbuild",
            )
        seal = Seal.model_validate(body)
    except ValidationError as error:
        item = error.errors()[0]
        return None, (Problem(message=item["msg"], file=file, key=".".join(str(part) for part in item["loc"])),)
    except ValueError as error:
        return None, (Problem(message=f"not JSON: {error}", file=file),)
    if not _intact(body, data):
        return seal, (Problem(message="is not as it was written", file=file),)
    return seal, ()


def _intact(body: dict[str, object], data: bytes) -> bool:
    """Whether these bytes are the one way to write what has this digest."""
    rest = {key: value for key, value in body.items() if key != "sha256"}
    written = (json.dumps(body, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()
    return data == written and body.get("sha256") == hashlib.sha256(canonical(rest)).hexdigest()


def document_digests(
    seal: Seal, documents: Mapping[str, bytes | None], *, path: object, told: Collection[str]
) -> Iterator[Problem]:
    """Documents that were read already, against the list; `told` are files that have a problem of their own."""
    for name, data in documents.items():
        place, listed = f"{path}/{name}", seal.files.get(name)
        if data is not None and place not in told:
            yield from _difference(place, listed, len(data), hashlib.sha256(data).hexdigest())


def file_problems(
    source: Source, seal: Seal, *, read: Collection[str], told: Collection[str], manifest: Manifest
) -> Iterator[Problem]:
    """All other files: changed, missing or added."""
    there = set(source.names())
    for name, listed in sorted(seal.files.items()):
        place = f"{source.path}/{name}"
        if place in told or (name in read and name in there):
            continue
        if name not in there:
            if not _left_out(name, there):
                yield Problem(message=f"missing, {SEAL_FILE} lists it", file=place)
            continue
        with source.open(name) as stream:
            header = _is_weights(name) and bool(manifest.weights)
            yield from _difference(place, listed, stream.size, _digest(stream, header=header), header=header)
    for name in sorted(there - set(seal.files)):
        if name.startswith(CLOSED_FOLDERS):
            yield Problem(message=f"was added: {SEAL_FILE} does not list it", file=f"{source.path}/{name}")


def _left_out(name: str, there: set[str]) -> bool:
    """A folder of weights that is not there at all."""
    folder = next((folder for folder in WEIGHT_FOLDERS if name.startswith(folder)), None)
    return folder is not None and not any(other.startswith(folder) for other in there)


def _is_weights(name: str) -> bool:
    """Whether the manifest has its tensors."""
    return name.startswith("model/") and name.endswith(".safetensors") and name.count("/") == 1


def _difference(
    place: str, listed: SealedFile | None, size: int, sha256: str, *, header: bool = False
) -> Iterator[Problem]:
    if listed is None:
        yield Problem(message=f"{SEAL_FILE} does not list it", file=place)
        return
    expected = listed.header_sha256 if header else listed.sha256
    if size != listed.size:
        yield Problem(message=f"has {size} bytes, {SEAL_FILE} says {listed.size}", file=place)
    elif sha256 != expected:
        what = "sha256 of the header" if header else "sha256"
        yield Problem(message=f"{what} is {sha256}, {SEAL_FILE} says {expected}", file=place)


def _digest(stream: Stream, *, header: bool) -> str:
    """Of the whole file, or of what comes before the tensors."""
    digest, left = hashlib.sha256(), stream.size
    stream.seek(0)
    if header:
        start = stream.read(8)
        digest.update(start)
        left = int.from_bytes(start, "little")
    while left > 0 and (chunk := stream.read(min(left, CHUNK_BYTES))):
        digest.update(chunk)
        left -= len(chunk)
    return digest.hexdigest()
