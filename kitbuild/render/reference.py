"""The image of a job, by digest: what a tag means can change, what a digest means cannot."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Self

from kitbuild.errors import UsageError

# https://github.com/distribution/reference: [host[:port]/]path[:tag][@digest]
_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_REFERENCE = re.compile(
    rf"(?:(?P<host>[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?(?::[0-9]+)?)/)?(?P<path>{_PART}(?:/{_PART})*)"
    r"(?::(?P<tag>\w[\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?",
    re.ASCII,
)


@dataclass(frozen=True, kw_only=True)
class ImageReference:
    """An image in a registry (`host` None: Docker Hub), or, with neither host nor path, the local engine's own id."""

    host: str | None
    path: str | None
    tag: str | None
    digest: str | None
    config_digest: str | None = None
    manifest_digest: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """As written on a command line; exit 2 where it is none."""
        found = _REFERENCE.fullmatch(text)
        host = found["host"] if found else None
        registry = host is not None and ("." in host or ":" in host or host == "localhost")
        if found is None or (host and not registry and not re.fullmatch(_PART, host)):
            raise UsageError(
                f"--image {text!r} is not an image reference",
                hint="as `kitbuild image --push` takes it, with its digest: registry.example/team/name@sha256:…",
            )
        path = found["path"]
        if host and not registry:  # an organisation on Docker Hub
            host, path = None, f"{host}/{path}"
        return cls(host=host, path=path, tag=found["tag"], digest=found["digest"], manifest_digest=found["digest"])

    @classmethod
    def local(cls, engine_id: str, *, config_digest: str, manifest_digest: str) -> Self:
        """An image that only this machine's engine has."""
        digests = {"config_digest": config_digest, "manifest_digest": manifest_digest}
        return cls(host=None, path=None, tag=None, digest=engine_id, **digests)

    def at(self, manifest_digest: str, *, config_digest: str | None = None) -> Self:
        """The same place, by this digest."""
        return replace(self, digest=manifest_digest, manifest_digest=manifest_digest, config_digest=config_digest)

    @property
    def identity(self) -> dict[str, str]:
        """What the archive is to say of the image, as far as it is known."""
        found = {"config_digest": self.config_digest, "manifest_digest": self.manifest_digest}
        return {name: digest for name, digest in found.items() if digest is not None}

    @property
    def name(self) -> str:
        """`host/path`."""
        return f"{self.host}/{self.path}" if self.host else str(self.path)

    def __str__(self) -> str:
        """As engines and Kubernetes take it."""
        return f"{self.name}@{self.digest}" if self.path else str(self.digest)

    @property
    def enroot(self) -> str:
        """As pyxis and enroot take it: `#` after the host, and the digest in the place of a tag.

        Their import asks for `/manifests/<what stands after the colon>`
        (https://github.com/NVIDIA/enroot/blob/master/src/docker.sh); `@` would be read as a user's name.
        """
        return f"{self.host}#{self.path}:{self.digest}" if self.host else f"{self.path}:{self.digest}"
