"""Files of the test Hub: `resolve`, its two kinds of redirect, and byte ranges."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from tests.hub.protocol import (
    KINDS,
    RefusedError,
    Repo,
    RepoKind,
    Request,
    Response,
    State,
    error,
    find_commit,
    find_repo,
    take_revision,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.hub.repos import Entry

RANGE = re.compile(r"bytes=(\d*)-(\d*)")


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
