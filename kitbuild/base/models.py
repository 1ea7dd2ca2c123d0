"""A finished base as data: what a lock holds of it. Imports nothing of kitbuild."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, StringConstraints

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]


class Closed(BaseModel):
    """Closed and frozen, as everywhere."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Upstream(Closed):
    """What a base was built from."""

    name: str
    digest: Digest | None


class SystemPackage(Closed):
    """A distribution package in the base; `sha256` of its archive where the base records it."""

    name: str
    version: str
    architecture: str
    sha256: Sha256 | None = None


class LockedBase(Closed):
    """A finished base image, by digest, and the facts read from it."""

    name: str
    manifest_digest: Digest
    config_digest: Digest
    diff_ids: tuple[Digest, ...]
    dockerfile_sha256: Sha256 | None
    upstream: Upstream | None
    python: str
    interpreter: str
    glibc: str
    architecture: Literal["amd64", "arm64"]
    cuda: str | None
    packages: tuple[SystemPackage, ...]
