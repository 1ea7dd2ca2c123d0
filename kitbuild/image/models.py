"""Step 3, its values: what a base is to it, what it makes, what an engine has of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from kitbuild.base import bases
from kitbuild.base.oci import digest_of
from kitbuild.errors import VerificationError
from kitbuild.store import sha256_file

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from kitbuild.base.models import LockedBase
    from kitbuild.store import Store


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One uncompressed tar. `digest` names the blob and is its diff id too."""

    name: str
    digest: str
    size: int
    path: Path


@dataclass(frozen=True, kw_only=True)
class Base:
    """A finished base: the bytes of its OCI config, and its layers uncompressed, lowest first."""

    config: bytes
    layers: tuple[Layer, ...]

    @classmethod
    def stored(cls, locked: LockedBase, store: Store) -> Self:
        """The locked base, from the store."""
        layers = tuple(
            Layer(name=f"base-{index}", digest=digest, size=path.stat().st_size, path=path)
            for index, (digest, path) in enumerate(bases.layers(store, locked))
        )
        return cls(config=bases.config(store, locked), layers=layers)

    @property
    def config_digest(self) -> str:
        """What a lock names it by."""
        return digest_of(self.config)


@dataclass(frozen=True, kw_only=True)
class Image:
    """A whole image: the base's layers, then ours."""

    config: bytes
    manifest: bytes
    layers: tuple[Layer, ...]
    tag: str
    content_sha256: str | None = None
    lock_sha256: str | None = None

    @property
    def config_digest(self) -> str:
        """The image id of engines with the classic store."""
        return digest_of(self.config)

    @property
    def manifest_digest(self) -> str:
        """The image id of engines with the containerd store, and of registries."""
        return digest_of(self.manifest)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """An image in an engine: the engine's id of it, and the layers (by digest) that were not sent."""

    engine_id: str
    reused: tuple[str, ...]
    sent_bytes: int


def refuse_damaged(layers: Iterable[Layer]) -> None:
    """Exit 7 where a layer in the store is not what its name says."""
    for layer in layers:
        if sha256_file(layer.path)[0] != layer.digest.removeprefix("sha256:"):
            raise VerificationError(
                f"layer {layer.name} in the store is damaged ({layer.path})",
                hint="remove it with `kitbuild store verify --repair`, and try again",
            )
