"""The whole flow in one place: recipe → lock → image → run → archive → compare.

Each function takes the previous step's value and returns its own. The CLI prints what they return; a program
may call them as well.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kitbuild.errors import ImageError, LockError, UsageError
from kitbuild.lock.files import check_current, check_maker, lock_path, read_lock, write_lock

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import docker

    from kitbuild.archive import Archive
    from kitbuild.compare import Tolerance, Verdict
    from kitbuild.image import Image
    from kitbuild.lock.models import Lock
    from kitbuild.progress import Progress
    from kitbuild.recipe import LoadedRecipe
    from kitbuild.run.follow import Stop
    from kitbuild.store import Store


@dataclass(kw_only=True)
class Context:
    """The effects that the steps need: the store, the environment, the engine, where progress goes."""

    environ: Mapping[str, str]
    store: Store
    progress: Progress
    seconds: dict[str, float] = field(default_factory=dict)
    _client: docker.DockerClient | None = None

    def client(self) -> docker.DockerClient:
        """The engine, asked for only when one is needed; exit 5 where none answers."""
        if self._client is None:
            from kitbuild.image.engine import connect  # noqa: PLC0415 - docker-py takes a third of a second

            self._client = connect(self.environ)
        return self._client


@dataclass(frozen=True, kw_only=True)
class Built:
    """An image in the engine, and how it came there."""

    lock: Lock
    image: Image
    engine_id: str
    reused: frozenset[str]
    seconds: float

    def identity(self) -> dict[str, Any]:
        """What the archive says of the image."""
        return {
            "config_digest": self.image.config_digest,
            "manifest_digest": self.image.manifest_digest,
            "engine_id": self.engine_id,
        }
