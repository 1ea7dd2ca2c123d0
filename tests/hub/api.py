"""The Hub's HTTP API as pure answers: a request in, a `Response` out. `server` carries them.

Shapes, headers and error codes are those that huggingface_hub reads
(https://github.com/huggingface/huggingface_hub/blob/main/src/huggingface_hub/utils/_http.py).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import parse_qs, quote, unquote, urlsplit

from tests.hub.repos import Entry, GitRepo, UnknownRevisionError

if TYPE_CHECKING:
    from collections.abc import Mapping

RepoKind = Literal["model", "dataset", "kernel"]
KINDS: dict[str, RepoKind] = {"models": "model", "datasets": "dataset", "kernels": "kernel"}
RANGE = re.compile(r"bytes=(\d*)-(\d*)")
TRUE = ("true", "True", "1")


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


def answer(state: State, request: Request) -> Response:
    """The one entry: an answer, or the refusal that was raised on the way."""
    try:
        if request.token is not None and request.token not in state.tokens:
            raise error(401, "Invalid credentials in Authorization header")
        return route(state, request, urlsplit(request.path).path.strip("/").split("/"))
    except RefusedError as refused:
        return refused.response


def route(state: State, request: Request, parts: list[str]) -> Response:
    """By the raw path, so that a quoted slash stays inside its part."""
    match parts:
        case _ if request.origin == "lfs":
            return lfs_object(state, request, parts)
        case ["api", "whoami-v2"]:
            return whoami(state, request)
        case ["api", "organizations", name, "overview"]:
            return organization(state, unquote(name))
        case ["api", "resolve-cache", kind, *rest] if kind in KINDS:
            return cached_file(state, request, KINDS[kind], rest)
        case ["api", kind, *rest] if kind in KINDS and rest:
            return repo_api(state, request, KINDS[kind], rest)
    return file(state, request, parts)


def whoami(state: State, request: Request) -> Response:
    if request.token is None:
        raise error(401, "Invalid username or password.")
    name = state.tokens[request.token]
    auth = {"type": "access_token", "accessToken": {"displayName": "test", "role": "read"}}
    return as_json({"type": "user", "id": name, "name": name, "fullname": name, "orgs": [], "auth": auth})


def organization(state: State, name: str) -> Response:
    found = state.organizations.get(name)
    if found is None:
        raise error(404, "Organization not found")
    trusted = {"trustedKernelPublisher": True} if found.trusted_kernel_publisher else {}
    return as_json({"name": name, "fullname": name, "avatarUrl": "", "isVerified": False, "numUsers": 1, **trusted})


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


def repo_api(state: State, request: Request, kind: RepoKind, parts: list[str]) -> Response:
    repo, rest = find_repo(state, request, kind, parts)
    verb, rest = (rest[0], rest[1:]) if rest else ("revision", ["main"])
    if verb == "refs":
        return refs(repo, request)
    revision, rest = take_revision(rest)
    sha = find_commit(repo, revision)
    path = unquote("/".join(rest))
    if verb == "revision":
        return info(repo, request, sha)
    if verb == "tree":
        return tree(state, repo, request, sha, path)
    if verb == "paths-info" and request.method == "POST":
        return paths_info(repo, request, sha)
    if verb == "commits":
        return as_json([commit_json(commit.sha, commit.title, commit.seconds) for commit in repo.git.log(sha)])
    raise error(404, "Sorry, we can't find the page you are looking for.")


def refs(repo: Repo, request: Request) -> Response:
    found = repo.git.refs()

    def items(names: Mapping[str, str], prefix: str) -> list[dict[str, str]]:
        return [{"name": name, "ref": f"{prefix}{name}", "targetCommit": sha} for name, sha in names.items()]

    pulls = [{"name": f"refs/pr/{n}", "ref": f"refs/pr/{n}", "targetCommit": sha} for n, sha in found.pulls.items()]
    value: dict[str, Any] = {"branches": items(found.branches, "refs/heads/"), "tags": items(found.tags, "refs/tags/")}
    value["converts"] = []
    if "include_prs" in request.query:
        value["pullRequests"] = pulls
    return as_json(value)


def date(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def commit_json(sha: str, title: str, seconds: int) -> dict[str, Any]:
    return {"id": sha, "title": title, "message": "", "date": date(seconds), "authors": [{"user": "hub"}]}


def info(repo: Repo, request: Request, sha: str) -> Response:
    log = repo.git.log(sha)
    blobs = request.query.get("blobs", ["false"])[0] in TRUE
    siblings = [sibling(entry, blobs=blobs) for entry in repo.git.tree(sha) if entry.kind == "file"]
    value: dict[str, Any] = {
        "_id": repo.id,
        "id": repo.id,
        "author": repo.id.partition("/")[0],
        "sha": sha,
        "lastModified": date(log[0].seconds),
        "createdAt": date(log[-1].seconds),
        "private": repo.private,
        "gated": "manual" if repo.gated else False,
        "disabled": False,
        "downloads": 0,
        "likes": 0,
    }
    if repo.kind != "kernel":
        value |= {"tags": [], "siblings": siblings}
    if repo.kind == "model":
        value["modelId"] = repo.id
    return as_json(value)


def sibling(entry: Entry, *, blobs: bool) -> dict[str, Any]:
    if not blobs:
        return {"rfilename": entry.path}
    described = describe(entry)
    lfs = described.get("lfs")
    facts = {"rfilename": entry.path, "blobId": entry.oid, "size": entry.size}
    return facts | ({"lfs": {"sha256": lfs["oid"], **lfs}} if lfs else {})


def describe(entry: Entry) -> dict[str, Any]:
    value: dict[str, Any] = {"type": entry.kind, "oid": entry.oid, "size": entry.size, "path": entry.path}
    if entry.lfs:
        value["lfs"] = {"oid": entry.lfs.sha256, "size": entry.lfs.size, "pointerSize": entry.lfs.pointer_size}
    return value


def expanded(repo: Repo, sha: str, entry: Entry, *, expand: bool) -> dict[str, Any]:
    if not expand:
        return describe(entry)
    last = repo.git.log(sha, entry.path)[0]
    return describe(entry) | {"lastCommit": {"id": last.sha, "title": last.title, "date": date(last.seconds)}}


def tree(state: State, repo: Repo, request: Request, sha: str, path: str) -> Response:
    query = request.query
    recursive = query.get("recursive", ["false"])[0] in TRUE
    expand = query.get("expand", ["false"])[0] in TRUE
    prefix = f"{path}/" if path else ""
    below = [entry for entry in repo.git.tree(sha) if entry.path.startswith(prefix)]
    if path and not below:
        raise error(404, f"{path} does not exist on {sha}", "EntryNotFound")
    wanted = [entry for entry in below if recursive or "/" not in entry.path[len(prefix) :]]
    start = int(query.get("cursor", ["0"])[0])
    end = start + state.page_size
    headers = {"X-Repo-Commit": sha}
    if end < len(wanted):
        address = urlsplit(request.path).path
        flags = f"recursive={str(recursive).lower()}&expand={str(expand).lower()}"
        headers["Link"] = f'<{state.url}{address}?{flags}&cursor={end}>; rel="next"'
    return as_json([expanded(repo, sha, entry, expand=expand) for entry in wanted[start:end]], headers=headers)


def paths_info(repo: Repo, request: Request, sha: str) -> Response:
    if request.headers.get("content-type", "").startswith("application/json"):
        asked = json.loads(request.body)
        paths, expand = asked["paths"], bool(asked.get("expand"))
    else:
        form = parse_qs(request.body.decode())
        paths, expand = form.get("paths", []), form.get("expand", ["false"])[0] in TRUE
    wanted = {path.strip("/") for path in paths}
    found = [entry for entry in repo.git.tree(sha) if entry.path in wanted]
    return as_json([expanded(repo, sha, entry, expand=expand) for entry in found])


def find_file(state: State, request: Request, kind: RepoKind, parts: list[str]) -> tuple[Repo, str, Entry]:
    repo, rest = find_repo(state, request, kind, parts)
    if rest[:1] == ["resolve"]:
        rest = rest[1:]
    revision, rest = take_revision(rest)
    sha = find_commit(repo, revision)
    if repo.gated and request.token not in repo.readers:
        raise error(403 if request.token else 401, f"Access to {repo.kind} {repo.id} is restricted.", "GatedRepo")
    path = unquote("/".join(rest))
    for entry in repo.git.tree(sha):
        if entry.path == path and entry.kind == "file":
            return repo, sha, entry
    missing = error(404, "Entry not found", "EntryNotFound").response
    raise RefusedError(Response(status=404, headers={**missing.headers, "X-Repo-Commit": sha}, body=missing.body))


def file(state: State, request: Request, parts: list[str]) -> Response:
    """`[datasets/|kernels/]ID/resolve/REV/PATH`: never the bytes, always a redirect, as the Hub answers today."""
    kind: RepoKind = KINDS.get(parts[0], "model")
    rest = parts[1:] if parts[0] in KINDS else parts
    if "resolve" not in rest:
        raise error(404, "Sorry, we can't find the page you are looking for.")
    repo, sha, entry = find_file(state, request, kind, rest)
    if entry.lfs is None:
        location = f"/api/resolve-cache/{kind}s/{repo.id}/{sha}/{quote(entry.path)}"
        headers = {"X-Repo-Commit": sha, "X-Linked-Size": str(entry.size), "X-Linked-Etag": f'"{entry.oid}"'}
        return Response(status=307, headers={**headers, "Location": location})
    name = quote(f'inline; filename="{entry.path.rpartition("/")[2]}"')
    headers = {
        "X-Repo-Commit": sha,
        "X-Linked-Size": str(entry.lfs.size),
        "X-Linked-Etag": f'"{entry.lfs.sha256}"',
        "Accept-Ranges": "bytes",
        "Location": f"{state.lfs_url}/repos/{kind}s/{repo.id}/{entry.lfs.sha256}?response-content-disposition={name}",
    }
    return Response(status=302, headers=headers)


def cached_file(state: State, request: Request, kind: RepoKind, parts: list[str]) -> Response:
    """The second half of `resolve` for a small file."""
    repo, sha, entry = find_file(state, request, kind, parts)
    headers = {"X-Repo-Commit": sha, "ETag": f'"{entry.oid}"', "Content-Type": "application/octet-stream"}
    return ranged(request, repo.git.blob(entry), headers)


def lfs_object(state: State, request: Request, parts: list[str]) -> Response:
    """The other origin. Like a signed storage address it refuses a token that was meant for the Hub."""
    if "authorization" in request.headers:
        raise error(400, "Only one auth mechanism allowed")
    for repo in state.repos.values():
        path = repo.git.lfs_folder / parts[-1]
        if path.is_file():
            headers = {"ETag": f'"{parts[-1]}"', "Content-Type": "application/octet-stream"}
            return ranged(request, path.read_bytes(), headers)
    raise error(404, "NoSuchKey")


def ranged(request: Request, data: bytes, headers: Mapping[str, str]) -> Response:
    headers = {**headers, "Accept-Ranges": "bytes"}
    found = RANGE.fullmatch(request.headers.get("range", ""))
    if found is None or not (found[1] or found[2]):
        return Response(headers=headers, body=data)
    start = int(found[1]) if found[1] else max(0, len(data) - int(found[2]))
    end = min(int(found[2]), len(data) - 1) if found[1] and found[2] else len(data) - 1
    if start > end:
        return Response(status=416, headers={**headers, "Content-Range": f"bytes */{len(data)}"})
    headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
    return Response(status=206, headers=headers, body=data[start : end + 1])
