"""Which lock it is: digests of its content, with and without what follows from the number of processes."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

OF_THE_WORLD = (
    "gradient_accumulation_steps",
    "ddp_backend",
    "save_on_each_node",
)  # arguments that follow from the number of processes


def identity_sha256(raw: Mapping[str, Any]) -> str:
    """What a resumed run has to have in common with what it was: with virtual ranks, not the number of processes."""
    given = raw["recipe"].get("determinism")
    return any_world_sha256(raw) if isinstance(given, dict) and given.get("virtual_ranks") else content_sha256(raw)


def content_sha256(raw: Mapping[str, Any]) -> str:
    """Digest of all of a lock but what names it (the host computes the same)."""
    body = {key: value for key, value in raw.items() if key not in ("recipe_sha256", "name", "content_sha256")}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def any_world_sha256(raw: Mapping[str, Any]) -> str:
    """Likewise, less what follows from the number of processes."""
    recipe = {**raw["recipe"], "launch": {**raw["recipe"]["launch"], "nodes": None, "processes_per_node": None}}
    given = raw["defaults"]["arguments"]
    arguments = {name: value for name, value in given.items() if name not in OF_THE_WORLD}
    defaults = {**raw["defaults"], "arguments": arguments}
    return content_sha256({**raw, "recipe": recipe, "defaults": defaults, "launch": None})
