"""The git side of the test Hub: bare repositories with commits that are the same on every run.

Large files are kept as Git LFS keeps them: a pointer in git, the bytes aside, found by their sha256.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Content = bytes | str
EPOCH_SECONDS = 1_700_000_000  # every history starts here, one second a commit: so SHAs never change
LFS_SUFFIXES = (".safetensors", ".so", ".bin", ".parquet", ".gguf")
LFS_OVER_BYTES = 1_000_000
POINTER = re.compile(rb"version https://git-lfs\.github\.com/spec/v1\noid sha256:([0-9a-f]{64})\nsize (\d+)\n")
FULL_SHA = re.compile(r"[0-9a-f]{40}")
SHORT_SHA = re.compile(r"[0-9a-f]{7,39}")


class UnknownRevisionError(LookupError):
    """No branch, tag, reference or commit of that name."""


@dataclass(frozen=True, kw_only=True)
class Lfs:
    """What a pointer file says."""

    sha256: str
    size: int
    pointer_size: int


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A file or a folder of one commit; `size` is that of the file a user sees, not of its pointer."""

    path: str
    kind: Literal["file", "directory"]
    oid: str
    size: int
    lfs: Lfs | None = None


@dataclass(frozen=True, kw_only=True)
class Commit:
    """One commit of a history."""

    sha: str
    title: str
    seconds: int


@dataclass(frozen=True, kw_only=True)
class Refs:
    """Names and the commits they point to."""

    branches: Mapping[str, str]
    tags: Mapping[str, str]
    pulls: Mapping[str, str]


class GitRepo:
    """One bare repository, written by `git fast-import` and read by plumbing commands."""

    def __init__(self, path: Path, *, lfs_folder: Path) -> None:
        self.path = path
        self.lfs_folder = lfs_folder
        lfs_folder.mkdir(parents=True, exist_ok=True)
        if not (path / "HEAD").exists():
            path.mkdir(parents=True, exist_ok=True)
            self._git("init", "--quiet", "--bare", "--template=", "--initial-branch=main", ".")
        self.tree = lru_cache(maxsize=None)(self._tree)
        self.read = lru_cache(maxsize=None)(self._read)

    def commit(
        self,
        files: Mapping[str, Content | None],
        *,
        ref: str = "refs/heads/main",
        parent: str | None = None,
        message: str = "Update",
    ) -> str:
        """Write `files` over the parent's (None removes one) and point `ref` there; `parent` defaults to the ref."""
        parent = parent or self._lookup(ref)
        depth = int(self._git("rev-list", "--count", parent)) if parent else 0
        seconds = EPOCH_SECONDS + depth
        title = message.encode()
        stream = [f"commit {ref}\ncommitter Hub <hub@example.org> {seconds} +0000\ndata {len(title)}\n".encode()]
        stream += [title, b"\n", f"from {parent}\n".encode() if parent else b""]
        for path, content in sorted(files.items()):
            stream.append(self._change(path, content))
        self._git("fast-import", "--quiet", "--force", stdin=b"".join(stream) + b"\n")
        return self.resolve(ref)

    def point(self, ref: str, sha: str) -> None:
        """Make `ref` name that commit, forward or not."""
        self._git("update-ref", ref, sha)

    def remove(self, ref: str) -> None:
        """Forget a reference; its commits stay readable by SHA."""
        self._git("update-ref", "-d", ref)

    def refs(self) -> Refs:
        """Every branch, tag and pull request."""
        lines = self._git("for-each-ref", "--format=%(refname) %(objectname)").decode().splitlines()
        found = dict(line.split(" ", 1) for line in lines)

        def under(prefix: str) -> dict[str, str]:
            return {name.removeprefix(prefix): sha for name, sha in found.items() if name.startswith(prefix)}

        return Refs(branches=under("refs/heads/"), tags=under("refs/tags/"), pulls=under("refs/pr/"))

    def resolve(self, revision: str) -> str:
        """The full SHA of a branch, tag, full reference, commit or unambiguous short commit."""
        names = [f"refs/heads/{revision}", f"refs/tags/{revision}"]
        if revision.startswith("refs/"):
            names = [revision]
        elif FULL_SHA.fullmatch(revision) or SHORT_SHA.fullmatch(revision):
            names.append(revision)
        for name in names:
            sha = self._lookup(name)
            if sha is not None:
                return sha
        raise UnknownRevisionError(revision)

    def log(self, sha: str, path: str | None = None) -> tuple[Commit, ...]:
        """Newest first; only those that touched `path` when one is given."""
        only = ("--", path) if path else ()
        lines = self._git("log", "--format=%H%x00%ct%x00%s", sha, *only).decode().splitlines()
        parts = [line.split("\0") for line in lines]
        return tuple(Commit(sha=part[0], seconds=int(part[1]), title=part[2]) for part in parts)

    def blob(self, entry: Entry) -> bytes:
        """The bytes that a user of the file sees."""
        return (self.lfs_folder / entry.lfs.sha256).read_bytes() if entry.lfs else self.read(entry.oid)

    def _change(self, path: str, content: Content | None) -> bytes:
        if content is None:
            return f"D {path}\n".encode()
        data = content.encode() if isinstance(content, str) else content
        if path.endswith(LFS_SUFFIXES) or len(data) > LFS_OVER_BYTES:
            data = self._store_lfs(data)
        return f"M 100644 inline {path}\ndata {len(data)}\n".encode() + data + b"\n"

    def _store_lfs(self, data: bytes) -> bytes:
        sha256 = hashlib.sha256(data).hexdigest()
        target = self.lfs_folder / sha256
        if not target.exists():
            target.write_bytes(data)
        return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {len(data)}\n".encode()

    def _tree(self, sha: str) -> tuple[Entry, ...]:
        entries: list[Entry] = []
        for line in self._git("ls-tree", "-r", "-t", "-l", "-z", sha).decode().split("\0"):
            if not line:
                continue
            facts, path = line.split("\t", 1)
            _mode, kind, oid, size = facts.split()
            if kind == "tree":
                entries.append(Entry(path=path, kind="directory", oid=oid, size=0))
                continue
            lfs = self._lfs(oid, int(size))
            entries.append(Entry(path=path, kind="file", oid=oid, size=lfs.size if lfs else int(size), lfs=lfs))
        return tuple(entries)

    def _lfs(self, oid: str, size: int) -> Lfs | None:
        found = POINTER.fullmatch(self.read(oid)) if 120 <= size <= 150 else None
        return Lfs(sha256=found[1].decode(), size=int(found[2]), pointer_size=size) if found else None

    def _read(self, oid: str) -> bytes:
        return self._git("cat-file", "blob", oid)

    def _lookup(self, name: str) -> str | None:
        try:
            return self._git("rev-parse", "--quiet", "--verify", f"{name}^{{commit}}").decode().strip()
        except subprocess.CalledProcessError:
            return None

    def _git(self, *arguments: str, stdin: bytes | None = None) -> bytes:
        env = {"PATH": os.environ["PATH"], "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "LC_ALL": "C"}
        command = ["git", "-C", str(self.path), *arguments]
        return subprocess.run(command, input=stdin, env=env, check=True, capture_output=True).stdout
