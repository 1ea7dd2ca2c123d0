"""Bases in the store: a configuration, uncompressed layers, and the facts read from them.

Layers are kept uncompressed, so that the manifest digest is a function of the configuration and the layers'
content, wherever the base came from. Records: `bases/<manifest digest>`, `base-names/<hash of name>`.
"""

from __future__ import annotations

import hashlib
from typing import IO, TYPE_CHECKING, Any

from kitbuild.base import oci
from kitbuild.base.facts import read_facts
from kitbuild.base.models import LockedBase, Upstream
from kitbuild.errors import VerificationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from kitbuild.progress import Progress
    from kitbuild.store import Store

    LayerOpener = Callable[[], AbstractContextManager[IO[bytes]]]

BASES = "bases"
NAMES = "base-names"


def layers(store: Store, base: LockedBase) -> tuple[tuple[str, Path], ...]:
    """(digest, uncompressed tar) of each layer, bottom first; an error where one is not in the store."""
    return tuple((digest, store.require(_hex(digest), name=f"a layer of {base.name}")) for digest in base.diff_ids)


def config(store: Store, base: LockedBase) -> bytes:
    """The configuration's bytes."""
    return store.require(_hex(base.config_digest), name=f"the configuration of {base.name}").read_bytes()


def manifest(store: Store, base: LockedBase) -> bytes:
    """The manifest's bytes; their digest is `base.manifest_digest`."""
    sizes = [(digest, path.stat().st_size) for digest, path in layers(store, base)]
    return oci.manifest_bytes(config(store, base), sizes)


def held(store: Store, base: LockedBase) -> bool:
    """Whether every byte of the base is in the store."""
    return all(store.has(_hex(digest)) for digest in (base.config_digest, *base.diff_ids))


def recorded(store: Store, manifest_digest: str) -> LockedBase | None:
    """The base with this manifest digest, where the store has all of it."""
    record = store.record(BASES, _hex(manifest_digest))
    base = LockedBase.model_validate(record["facts"]) if record else None
    return base if base and held(store, base) else None


def add(
    store: Store,
    *,
    name: str,
    config: bytes,
    openers: Sequence[LayerOpener],
    progress: Progress,
    origin: Upstream | None = None,
) -> LockedBase:
    """Put a base into the store: each layer's tar is checked against its diff_id; facts are read and recorded.

    `openers` give the uncompressed layers, bottom first; only those that the store lacks are opened.
    """
    diff_ids = oci.diff_ids_of(config)
    if len(diff_ids) != len(openers):
        raise VerificationError(
            f"{name} names {len(diff_ids)} layers and has {len(openers)}", hint="push or save the base again"
        )
    paths = []
    for position, (digest, opener) in enumerate(zip(diff_ids, openers, strict=True), start=1):
        if not store.has(_hex(digest)):
            title = f"{name}: layer {position} of {len(openers)}"
            with opener() as stream, progress.activity(title, total=None, unit="bytes") as advance:
                store.add_chunks(_counted(stream, advance), name=title, expected=_hex(digest))
        paths.append(store.path(_hex(digest)))
    store.add_bytes(config, name=f"configuration of {name}")
    base = read_facts(name=name, config=config, layers=paths, origin=origin)
    record(store, base)
    return base


def record(store: Store, base: LockedBase) -> None:
    """Write down what is known of a base whose bytes are in the store."""
    value = {
        "config": _hex(base.config_digest),
        "layers": [_hex(digest) for digest in base.diff_ids],
        "facts": base.model_dump(mode="json"),
    }
    store.write_record(BASES, _hex(base.manifest_digest), value)


def take(store: Store, base: LockedBase) -> None:
    """Record a base that a lock describes and whose bytes came without a record, once they give the lock's digests."""
    if not held(store, base) or recorded(store, base.manifest_digest):
        return
    if (
        oci.diff_ids_of(config(store, base)) != base.diff_ids
        or oci.digest_of(manifest(store, base)) != base.manifest_digest
    ):
        raise VerificationError(
            f"the lock's base {base.name} is not {base.manifest_digest}: its layers give another manifest",
            hint="the lock was put together by hand; lock anew",
        )
    record(store, base)


def remember_name(store: Store, base: LockedBase, *, definition: str | None = None, origin: str | None = None) -> None:
    """Let `base.name` mean this base. `definition`: what it was made from; `origin`: its registry's digest."""
    value = {"name": base.name, "manifest": base.manifest_digest, "definition": definition, "origin": origin}
    store.write_record(NAMES, _name_key(base.name), value)


def named(store: Store, name: str) -> dict[str, Any] | None:
    """What `remember_name` wrote last for this name."""
    found: dict[str, Any] | None = store.record(NAMES, _name_key(name))
    return found


def _counted(stream: IO[bytes], advance: Callable[[float], None]) -> Any:
    for chunk in oci.chunks(stream):
        yield chunk
        advance(len(chunk))


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")


def _name_key(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:32]
