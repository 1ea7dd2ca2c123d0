"""What the parts of the test Hub say to each other: what it knows, a request, an answer, a refusal, a look-up."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal
from urllib.parse import parse_qs, unquote, urlsplit

from tests.hub.repos import GitRepo, UnknownRevisionError

if TYPE_CHECKING:
    from collections.abc import Mapping

RepoKind = Literal["model", "dataset", "kernel"]
KINDS: dict[str, RepoKind] = {"models": "model", "datasets": "dataset", "kernels": "kernel"}


@dataclass(kw_only=True)
class Repo:
    """A repository as the Hub knows it. `readers` holds the tokens that may read it when private or gated."""

    id: str
    kind: RepoKind
    git: GitRepo
    private: bool = False
    gated: bool = False
    readers: set[str] = field(default_factory=set)


@dataclass(frozen=True, kw_only=True)
class Organization:
    """A publisher."""

    name: str
    trusted_kernel_publisher: bool


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request as it came; `path` is raw, with its query. `origin` is `hub` or `lfs`."""

    origin: Literal["hub", "lfs"]
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes = b""

    @property
    def query(self) -> dict[str, list[str]]:
        return parse_qs(urlsplit(self.path).query)

    @property
    def token(self) -> str | None:
        scheme, _, token = self.headers.get("authorization", "").partition(" ")
        return token if scheme == "Bearer" and token else None


@dataclass(frozen=True, kw_only=True)
class Response:
    """An answer; Content-Length is added when it is sent."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(kw_only=True)
class State:
    """All that the Hub knows."""

    repos: dict[tuple[RepoKind, str], Repo] = field(default_factory=dict)
    moved: dict[tuple[RepoKind, str], str] = field(default_factory=dict)
    organizations: dict[str, Organization] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)
    page_size: int = 20
    url: str = ""
    lfs_url: str = ""


class RefusedError(Exception):
    """An error answer, raised where it is known."""

    def __init__(self, response: Response) -> None:
        super().__init__(response.status)
        self.response = response


def as_json(value: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    body = json.dumps(value).encode()
    return Response(status=status, headers={"Content-Type": "application/json", **(headers or {})}, body=body)


def error(status: int, message: str, code: str | None = None) -> RefusedError:
    headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})}
    if status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="Authentication required", charset="UTF-8"'
    return RefusedError(as_json({"error": message}, status=status, headers=headers))


def find_repo(state: State, request: Request, kind: RepoKind, parts: list[str]) -> tuple[Repo, list[str]]:
    """The repository that the path begins with, and what follows; a renamed one is a redirect."""
    names = [unquote("/".join(parts[:length])) for length in (2, 1) if len(parts) >= length]
    for name in names:
        new = state.moved.get((kind, name))
        if new is not None:
            location = request.path.replace(f"/{name}", f"/{new}", 1)
            raise RefusedError(Response(status=307, headers={"Location": location}))
        repo = state.repos.get((kind, name))
        if repo is not None and (not repo.private or request.token in repo.readers):
            return repo, parts[name.count("/") + 1 :]
    # The Hub does not tell a stranger whether a repository is private or missing.
    raise error(404 if request.token else 401, "Repository not found", "RepoNotFound")


def find_commit(repo: Repo, revision: str) -> str:
    try:
        return repo.git.resolve(revision)
    except UnknownRevisionError:
        raise error(404, f"Invalid rev id: {revision}", "RevisionNotFound") from None


def take_revision(parts: list[str]) -> tuple[str, list[str]]:
    """`refs/pr/1` arrives quoted as one part, or plain as three."""
    if parts[:2] == ["refs", "pr"]:
        return "/".join(parts[:3]), parts[3:]
    return unquote(parts[0]) if parts else "main", parts[1:]
