"""The Hub's HTTP API as pure answers: a request in, a `Response` out. `server` carries them.

Shapes, headers and error codes are those that huggingface_hub reads
(https://github.com/huggingface/huggingface_hub/blob/main/src/huggingface_hub/utils/_http.py).
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.hub.protocol import (
    KINDS,
    RefusedError,
    Repo,
    RepoKind,
    Request,
    Response,
    State,
    as_json,
    error,
    find_commit,
    find_repo,
    take_revision,
)
from tests.hub.resolve import cached_file, file, lfs_object

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.hub.repos import Entry

TRUE = ("true", "True", "1")


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
