"""Step 5, `kit.json`: what a packed file says of itself, first among its members."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kitbuild.archive.documents import parse_json
from kitbuild.archive.source import KIT_FILE, KIT_FORMAT, KitTar
from kitbuild.errors import LockError, VerificationError
from kitbuild.lock.models import canonical

if TYPE_CHECKING:
    from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Kit:
    """What `kit.json` says; `archive_sha256` is of the run's archive.json, None where it has none."""

    run: str
    include: str
    weights: bool
    archive_sha256: str | None = None
    format: int = KIT_FORMAT

    def to_bytes(self) -> bytes:
        """The one way to write it, with its own digest."""
        body: dict[str, Any] = {
            "format": self.format,
            "run": self.run,
            "include": self.include,
            "weights": self.weights,
            "archive_sha256": self.archive_sha256,
        }
        body["sha256"] = hashlib.sha256(canonical(body)).hexdigest()
        return (json.dumps(body, indent=1, sort_keys=True) + "\n").encode()


def read_kit(tar: KitTar) -> Kit:
    """The checked `kit.json` of a `.kit.tar`; a newer format is exit 3."""
    with tar.open_member(KIT_FILE) as stream:
        data = stream.read()
    try:
        body = parse_json(data)
    except ValueError as error:
        raise VerificationError(f"{tar.path}: {KIT_FILE} is not JSON: {error}", hint="the file is damaged") from error
    version = body.get("format") if isinstance(body, dict) else None
    if isinstance(version, int) and version > KIT_FORMAT:
        raise LockError(
            f"{tar.path}: format {version} is newer than this kitbuild reads ({KIT_FORMAT})",
            hint="use a newer kitbuild",
        )
    kit = _kit(body, tar.path)
    if version != 1 and kit.to_bytes() != data:
        raise VerificationError(f"{tar.path}: {KIT_FILE} is not as it was packed", hint="the file is damaged")
    return kit


def _kit(body: object, path: Path) -> Kit:
    if not isinstance(body, dict):
        raise VerificationError(f"{path}: {KIT_FILE} is malformed", hint="the file is damaged")
    match body:
        case {"format": 1, "run": str(run), "include": str(include), "weights": bool(weights)} if (
            _NAME.fullmatch(run) and "sha256" not in body
        ):
            return Kit(run=run, include=include, weights=weights, format=1)
        case {
            "format": 2,
            "run": str(run),
            "include": str(include),
            "weights": bool(weights),
            "archive_sha256": None | str() as archive,
        } if _NAME.fullmatch(run) and (archive is None or _SHA256.fullmatch(archive)):
            return Kit(run=run, include=include, weights=weights, archive_sha256=archive)
        case _:
            raise VerificationError(f"{path}: {KIT_FILE} is malformed", hint="the file is damaged")
