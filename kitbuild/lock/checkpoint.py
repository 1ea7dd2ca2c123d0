"""Step 2: which files of a model are its weights, and whose code it runs. Pure; the two JSON files are read by callers.

transformers takes the file that config.json names, else model.safetensors, else the shards of its index
(`_get_resolved_checkpoint_files` in modeling_utils.py). A repository may hold the same weights in other forms too
(`consolidated.safetensors`); nobody reads those.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kitbuild.errors import ResolveError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_INDEX_SUFFIX = ".safetensors.index.json"


def weight_files(names: Collection[str], read: Callable[[str], bytes], *, name: str) -> tuple[str, ...]:
    """The weights among `names`, the index included. ResolveError (4) where there are none, or a shard is missing."""
    config = _json("config.json", read, name=name) if "config.json" in names else {}
    explicit = config.get("transformers_weights")
    first = explicit if isinstance(explicit, str) else SINGLE if SINGLE in names else INDEX
    if first not in names:
        raise _no_weights(names, first if isinstance(explicit, str) else f"{SINGLE} and no {INDEX}", name=name)
    if not first.endswith(_INDEX_SUFFIX):
        return (first,)
    told = _json(first, read, name=name).get("weight_map")
    shards = sorted({str(shard) for shard in told.values()}) if isinstance(told, dict) else []
    if not shards:
        raise ResolveError(f"model {name}: {first} names no file", hint="save the model again with `save_pretrained`")
    missing = [shard for shard in shards if shard not in names]
    if missing:
        some = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")  # noqa: PLR2004
        raise ResolveError(
            f"model {name} lacks {len(missing)} of {len(shards)} files that {first} names: {some}",
            hint="the upload is incomplete; take another revision, or tell who published it",
        )
    return (first, *shards)


def code_of(name: str, data: bytes) -> Iterator[tuple[str, str | None, str]]:
    """(where, repository, file) of each class in `auto_map`: `module.Class`, or of another place `org/repo--module.Class`."""
    try:
        loaded = json.loads(data)
    except (ValueError, RecursionError):
        return  # its own reader says what is wrong with it
    auto_map = loaded.get("auto_map") if isinstance(loaded, dict) else None
    for key, value in sorted(auto_map.items()) if isinstance(auto_map, dict) else ():
        for reference in value if isinstance(value, list) else [value]:
            if isinstance(reference, str):
                repo, _, inside = reference.rpartition("--")
                yield f"{name}: {key}", repo or None, f"{inside.partition('.')[0]}.py"


def _json(path: str, read: Callable[[str], bytes], *, name: str) -> Mapping[str, Any]:
    try:
        loaded = json.loads(read(path))
    except (ValueError, RecursionError) as error:
        raise ResolveError(
            f"model {name}: {path} is not JSON: {error}", hint="the upload is damaged; take another revision"
        ) from error
    return loaded if isinstance(loaded, dict) else {}


def _no_weights(names: Collection[str], wanted: str, *, name: str) -> ResolveError:
    others = sorted(path for path in names if path.endswith(".safetensors") and "/" not in path)
    if others:
        return ResolveError(
            f"model {name} has no {wanted}",
            hint=f"it has {', '.join(others[:3])}, which transformers does not load; save it with `save_pretrained`",
        )
    return ResolveError(
        f"model {name} has no {wanted}",
        hint="pickled weights can run code when they are loaded; convert them with `save_pretrained` first",
    )
