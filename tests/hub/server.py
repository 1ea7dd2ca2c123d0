"""The test Hub as a running server: two origins, faults, a log of requests, and the calls that tests use."""

from __future__ import annotations

import os
import socket
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, ClassVar, Literal, Self
from urllib.parse import unquote

from tests.hub.api import answer
from tests.hub.faults import Faults
from tests.hub.protocol import Organization, Repo, RepoKind, Request, Response, State
from tests.hub.repos import GitRepo

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.hub.repos import Content


class HubServer:
    """A Hub on 127.0.0.1. Use it as a context manager; make repositories before or while it runs."""

    def __init__(self, root: Path, *, page_size: int = 20) -> None:
        self.root = root
        self.state = State(page_size=page_size)
        self.faults = Faults()
        self.requests: list[Request] = []
        self.stopping = threading.Event()
        self._servers: list[ThreadingHTTPServer] = []

    @property
    def url(self) -> str:
        """The endpoint: what HF_ENDPOINT should be."""
        return self.state.url

    def __enter__(self) -> Self:
        self.state.url = self._serve("hub")
        self.state.lfs_url = self._serve("lfs")
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def environment(self, home: Path) -> dict[str, str]:
        """What a client process needs to speak to this Hub, with its caches under `home`."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "127.0.0.1",
        }

    def create_repo(
        self, repo_id: str, kind: RepoKind = "model", *, private: bool = False, gated: bool = False
    ) -> Repo:
        """A new, empty repository; private and gated ones are read with a token from `add_token(readable=…)`."""
        git = GitRepo(self.root / f"{kind}s" / f"{repo_id}.git", lfs_folder=self.root / "lfs")
        repo = Repo(id=repo_id, kind=kind, git=git, private=private, gated=gated)
        self.state.repos[kind, repo_id] = repo
        return repo

    def repo(self, repo_id: str, kind: RepoKind | None = None) -> Repo:
        """The repository of that name; `kind` is needed only when two kinds share it."""
        found = [repo for (_, name), repo in self.state.repos.items() if name == repo_id and kind in (None, repo.kind)]
        (repo,) = found
        return repo

    def commit(
        self,
        repo_id: str,
        files: Mapping[str, Content | None],
        branch: str = "main",
        *,
        kind: RepoKind | None = None,
        parent: str | None = None,
        message: str = "Update",
    ) -> str:
        """Commit on a branch (made where there is none) and return the SHA; None removes a file."""
        git = self.repo(repo_id, kind).git
        return git.commit(files, ref=f"refs/heads/{branch}", parent=parent, message=message)

    def open_pull_request(
        self, repo_id: str, number: int, files: Mapping[str, Content | None], *, kind: RepoKind | None = None
    ) -> str:
        """Commit on `refs/pr/<number>`, from main; returns the SHA."""
        git = self.repo(repo_id, kind).git
        return git.commit(files, ref=f"refs/pr/{number}", parent=git.resolve("main"), message=f"Pull request {number}")

    def move_branch(self, repo_id: str, branch: str, revision: str, *, kind: RepoKind | None = None) -> str:
        """Point a branch at another revision, forward or back; returns its SHA."""
        git = self.repo(repo_id, kind).git
        sha = git.resolve(revision)
        git.point(f"refs/heads/{branch}", sha)
        return sha

    def delete_branch(self, repo_id: str, branch: str, *, kind: RepoKind | None = None) -> None:
        """Remove the name; the commits stay."""
        self.repo(repo_id, kind).git.remove(f"refs/heads/{branch}")

    def tag(self, repo_id: str, name: str, revision: str = "main", *, kind: RepoKind | None = None) -> str:
        """Tag a revision; returns its SHA."""
        git = self.repo(repo_id, kind).git
        sha = git.resolve(revision)
        git.point(f"refs/tags/{name}", sha)
        return sha

    def sha(self, repo_id: str, revision: str = "main", *, kind: RepoKind | None = None) -> str:
        """The commit that a revision names now."""
        return self.repo(repo_id, kind).git.resolve(revision)

    def rename(self, repo_id: str, new_id: str, *, kind: RepoKind | None = None) -> None:
        """Rename as the Hub does: the old name answers with a redirect."""
        repo = self.repo(repo_id, kind)
        del self.state.repos[repo.kind, repo_id]
        repo.id = new_id
        self.state.repos[repo.kind, new_id] = repo
        self.state.moved[repo.kind, repo_id] = new_id

    def delete_repo(self, repo_id: str, *, kind: RepoKind | None = None) -> None:
        """The repository is gone, as when its owner deletes it."""
        del self.state.repos[self.repo(repo_id, kind).kind, repo_id]

    def add_organization(self, name: str, *, trusted_kernel_publisher: bool = False) -> None:
        """A publisher, with or without the Hub's trust in its kernels."""
        self.state.organizations[name] = Organization(name=name, trusted_kernel_publisher=trusted_kernel_publisher)

    def add_token(self, token: str, user: str = "someone", *, readable: tuple[str, ...] = ()) -> None:
        """An access token that the Hub knows, and the private or gated repositories that it opens."""
        self.state.tokens[token] = user
        for repo_id in readable:
            self.repo(repo_id).readers.add(token)

    def _serve(self, origin: Literal["hub", "lfs"]) -> str:
        handler = type("Handler", (_Handler,), {"hub": self, "origin": origin})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        server.block_on_close = False
        self._servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    hub: ClassVar[HubServer]
    origin: ClassVar[Literal["hub", "lfs"]]
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes: without this each answer waits 40 ms

    def handle(self) -> None:
        try:
            super().handle()
        except (ConnectionError, OSError):
            self.close_connection = True  # the client went away, or a fault closed it

    def handle_any(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(
            origin=self.origin,
            method=self.command,
            path=self.path,
            headers=headers,
            body=self.rfile.read(length) if length else b"",
        )
        self.hub.requests.append(request)
        self.respond(request, answer(self.hub.state, request))

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_any  # noqa: N815 - the names that http.server calls

    def respond(self, request: Request, response: Response) -> None:
        has_body = response.status in (200, 206) and bool(response.body)
        fault = self.hub.faults.take(method=request.method, path=unquote(request.path), has_body=has_body)
        if fault is None:
            self.send(response)
        elif fault.kind in ("429", "500", "503"):
            seconds = fault.retry_after_seconds
            headers = {} if seconds is None else {"Retry-After": f"{seconds:g}"}
            self.send(
                Response(status=int(fault.kind), headers=headers, body=b'{"error":"a fault that a test asked for"}')
            )
        elif fault.kind == "truncate":
            self.send(response, stop_after=len(response.body) // 2)
        elif fault.kind == "corrupt":
            middle = len(response.body) // 2
            wrong = response.body[:middle] + bytes([response.body[middle] ^ 0xFF]) + response.body[middle + 1 :]
            self.send(Response(status=response.status, headers=response.headers, body=wrong))
        elif fault.kind == "slow":
            self.hub.stopping.wait(fault.seconds)
            self.send(response)
        elif fault.kind == "hang":
            self.send(response, stop_after=0, hang=True)
        else:
            self.reset()

    def send(self, response: Response, *, stop_after: int | None = None, hang: bool = False) -> None:
        self.send_response(response.status)
        for name, value in response.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(response.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.body[:stop_after])
        if hang:
            self.hub.stopping.wait()
        if stop_after is not None:
            self.close_connection = True

    def reset(self) -> None:
        # A zero linger time turns close() into RST: https://man7.org/linux/man-pages/man7/socket.7.html
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(self.connection.detach())
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        return
