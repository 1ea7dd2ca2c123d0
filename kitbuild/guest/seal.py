"""The last thing that a run writes: archive.json, every file with its digest, so that no byte changes unseen.

Weights are hashed tensor by tensor already (manifest.json), so of those files only the header is hashed again.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from kitbuild.guest import record

if TYPE_CHECKING:
    from pathlib import Path

NAME = "archive.json"
FORMAT = 1
# What a resumed run continues from, and what a watcher reads: neither is part of what a run was.
LEFT_OUT = ("checkpoints/", "status.json", NAME)
BLOCK_BYTES = 1 << 20


def write(out: Path) -> None:
    """List what is there; nothing may be written afterwards."""
    model = out / "model" if json.loads((out / "manifest.json").read_bytes())["weights"] else None
    listed = {path.relative_to(out).as_posix(): facts(path, header=path.parent == model) for path in files(out)}
    body = {"format": FORMAT, "files": listed}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    record.write_json(out / NAME, {**body, "sha256": hashlib.sha256(text.encode()).hexdigest()})


def files(out: Path) -> list[Path]:
    """Every regular file that is part of the archive."""
    found = (path for path in sorted(out.rglob("*")) if path.is_file() and not path.is_symlink())
    return [path for path in found if not path.relative_to(out).as_posix().startswith(LEFT_OUT)]


def facts(path: Path, *, header: bool) -> dict[str, Any]:
    """Size and digest; `header`: of weights, where the manifest has a digest of each tensor."""
    size, digest = path.stat().st_size, hashlib.sha256()
    weights = header and path.suffix == ".safetensors"
    with path.open("rb") as file:
        left = size
        if weights:
            start = file.read(8)
            digest.update(start)
            left = int.from_bytes(start, "little")
        while left > 0 and (block := file.read(min(left, BLOCK_BYTES))):
            digest.update(block)
            left -= len(block)
    return {"size": size, "header_sha256" if weights else "sha256": digest.hexdigest()}
