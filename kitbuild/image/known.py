"""Step 3, remembered: the digests of a lock's image and where it was pushed, so that a job can name it by digest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kitbuild.image.models import Image
    from kitbuild.lock.models import Lock
    from kitbuild.store import Store

_KIND = "images"


@dataclass(frozen=True, kw_only=True)
class KnownImage:
    """An image that was made here. `engine_id`: the engine's own id of it, where it was loaded."""

    manifest_digest: str
    config_digest: str
    engine_id: str | None
    pushed: tuple[str, ...]


def remember_image(store: Store, lock: Lock, image: Image, *, engine_id: str | None, pushed: str | None) -> None:
    """Write it down; what was known of the same image stays, the latest push first."""
    before = known_image(store, lock)
    same = before is not None and before.manifest_digest == image.manifest_digest
    earlier = before.pushed if before and same else ()
    value = {
        "manifest_digest": image.manifest_digest,
        "config_digest": image.config_digest,
        "engine_id": engine_id or (before.engine_id if before and same else None),
        "pushed": [*([pushed] if pushed else []), *(one for one in earlier if one != pushed)],
    }
    store.write_record(_KIND, lock.sha256, value)


def known_image(store: Store, lock: Lock) -> KnownImage | None:
    """What `remember_image` wrote of this very lock."""
    record = store.record(_KIND, lock.sha256)
    return KnownImage(**{**record, "pushed": tuple(record["pushed"])}) if record else None
