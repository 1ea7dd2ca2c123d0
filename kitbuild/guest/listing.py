"""Phase 1: `/kit/content.json`, the image's own list of its files. Standard library only."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from kitbuild.errors import Problem, VerificationError

if TYPE_CHECKING:
    from pathlib import Path


def read_listing(path: Path, sha256: str | None = None) -> tuple[dict[str, str], dict[str, str]]:
    """Files and links of content.json, which is taken only byte for byte as kitbuild writes it (else ValueError)."""
    data = path.read_bytes()
    if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
        raise ValueError("it is not the one of this image")
    content = json.loads(data)
    if not isinstance(content, dict) or {*content} != {"version", "files", "links"} or content["version"] != 1:
        raise ValueError("it is no list of files of version 1")
    if data != json.dumps(content, indent=0, sort_keys=True).encode() + b"\n":
        raise ValueError("it is not as kitbuild wrote it")
    return content["files"], content["links"]


def check_lock(listing: Path, lock: bytes) -> None:
    """One wrong byte of the lock is told as that, before it is taken for another kind of lock."""
    try:
        listed = json.loads(listing.read_bytes())["files"]["/kit/lock.json"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # Verification tells what is wrong with the list.
    if listed != hashlib.sha256(lock).hexdigest():
        problem = Problem(message="is not the file that was locked", file="/kit/lock.json")
        raise VerificationError(
            "/kit/lock.json differs: it was edited or damaged",
            hint="nothing was trained; build the image again",
            problems=[problem],
        )
