"""Names of images, taken apart as an engine does. https://github.com/distribution/reference."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Self

from kitbuild.errors import UsageError

_REFERENCE = re.compile(
    r"^(?P<repository>[a-z0-9]+(?:[._/-]+[a-z0-9]+)*)(?::(?P<tag>\w[\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?$"
)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """`[host/]repository[:tag][@digest]`, taken apart as the engine does."""

    host: str
    repository: str
    tag: str | None
    digest: str | None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Take a reference apart; what is none is a usage error."""
        first, slash, rest = text.partition("/")
        has_host = bool(slash) and (first == "localhost" or bool(set(first) & set(".:")))
        host, remainder = (first, rest) if has_host else ("docker.io", text)
        match = _REFERENCE.match(remainder)
        if match is None:
            raise UsageError(f"{text!r} is no image reference", hint="write [host/]repository[:tag][@sha256:…]")
        repository = match["repository"]
        if host == "docker.io" and "/" not in repository:
            repository = f"library/{repository}"
        return cls(host=host, repository=repository, tag=match["tag"], digest=match["digest"])

    @property
    def target(self) -> str:
        """What a manifest is asked for by."""
        return self.digest or self.tag or "latest"

    @property
    def familiar(self) -> str:
        """The repository as the engine lists it: Docker Hub goes without saying."""
        repository = f"{self.host}/{self.repository}"
        return repository.removeprefix("docker.io/").removeprefix("library/")

    def at(self, digest: str) -> Self:
        """The same repository's image of this digest."""
        return replace(self, tag=None, digest=digest)

    @property
    def base_url(self) -> str:
        """Plain HTTP on this machine only, as the engine has it."""
        local = re.match(r"^(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?$", self.host)
        host = "registry-1.docker.io" if self.host == "docker.io" else self.host
        return f"{'http' if local else 'https'}://{host}/v2/{self.repository}"

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        return f"{self.host}/{self.repository}{tag}" + (f"@{self.digest}" if self.digest else "")
