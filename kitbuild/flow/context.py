"""The effects that the steps need, made once and passed in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    import docker

    from kitbuild.progress import Progress
    from kitbuild.store import Store


@dataclass(kw_only=True)
class Context:
    """The store, the environment, the engine, where progress goes."""

    environ: Mapping[str, str]
    store: Store
    progress: Progress
    _client: list[docker.DockerClient] = field(default_factory=list)

    def client(self) -> docker.DockerClient:
        """The engine, asked for only when one is needed; exit 5 where none answers."""
        if not self._client:
            from kitbuild.image.engine import connect  # noqa: PLC0415 - docker-py takes a third of a second

            self._client.append(connect(self.environ))
        return self._client[0]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a verb returns: fields for programs, lines for people."""

    fields: Mapping[str, Any]
    lines: tuple[str, ...]
    exit_code: int = 0

    def as_json(self) -> Mapping[str, Any]:
        """The fields of the verb's JSON object."""
        return self.fields

    def text(self) -> str:
        """What is printed without `--json`."""
        return "\n".join(self.lines)
