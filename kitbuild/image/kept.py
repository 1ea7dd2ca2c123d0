"""Step 3, looked after: what was made for a lock and need not be made again, and what of the rest can go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kitbuild.base import bases
from kitbuild.guest_files import guest_sha256
from kitbuild.image.content import parts
from kitbuild.image.layers import LAYERS, layer_key
from kitbuild.image.local import ENVIRONMENTS, RECORDS
from kitbuild.image.pyc import PYC
from kitbuild.lock.sdists import RECORDS as BUILT
from kitbuild.store.gc import DAY_SECONDS, Freed, drop_folders, drop_records

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from kitbuild.lock.models import Lock
    from kitbuild.store import Store


def made_for(locks: Iterable[Lock], store: Store) -> set[str]:
    """sha256 of every layer and every compiled module that these locks' images are made of."""
    wanted = {guest_sha256()}
    found: set[str] = set()
    for lock in locks:
        wanted |= {wheel.sha256 for wheel in lock.wheels}
        found |= set(_layers(lock, store))
    return found | {record["blob"] for record in store.records(PYC).values() if record.get("source") in wanted}


def _layers(lock: Lock, store: Store) -> Iterator[str]:
    # All but the last, which has the lock in it: some kilobytes, and made from the others' records.
    for part in parts(lock, recipe=b"", store=store, baked=_baked(lock))[:-1]:
        record = store.record(LAYERS, layer_key(part, lock.base.config_digest))
        if record is not None:
            yield record["sha256"]


def _baked(lock: Lock) -> frozenset[str]:
    """Nothing where the lock does not say, as one that a test made up: what is kept too little is made again."""
    return frozenset((lock.recipe.get("image") or {}).get("bake") or ())


def named_bases(store: Store) -> set[str]:
    """sha256 of all that the bases are made of which a name means here: a built one cannot be made again."""
    found: set[str] = set()
    for named in store.records(bases.NAMES).values():
        record = store.record(bases.BASES, named["manifest"].removeprefix("sha256:"))
        found |= {record["config"], *record["layers"]} if record else set()
    return found


def drop_environments(store: Store, locks: Collection[str], *, min_age_seconds: float = DAY_SECONDS) -> Freed:
    """Remove environments of `--engine local` that no lock (by sha256) in `locks` has, and that no run used of late."""
    roots = {key: record for key, record in store.records(RECORDS).items() if record.get("lock") in locks}
    kept = {*roots, *(str(record["environment"]) for record in roots.values())}
    freed = drop_folders(store, ENVIRONMENTS, kept, min_age_seconds=min_age_seconds)
    left = {path.name for path in (store.root / ENVIRONMENTS).glob("[!.]*")}
    drop_records(store, RECORDS, lambda key, _record: key not in left)
    return freed


def drop_dead_records(store: Store) -> int:
    """Forget what was made of blobs that are gone; returns how many facts that were."""

    def gone(*sha256s: Any) -> bool:
        return not all(store.has(str(sha256)) for sha256 in sha256s)

    return (
        drop_records(store, LAYERS, lambda _key, record: gone(record["sha256"]))
        + drop_records(store, PYC, lambda _key, record: gone(record["blob"]))
        + drop_records(store, BUILT, lambda _key, record: gone(record["sha256"]))
        + drop_records(store, bases.BASES, lambda _key, record: gone(record["config"], *record["layers"]))
    )
