"""The content-addressed store. Below every step; imports only errors.

Layout under `$KITBUILD_HOME` (default: the platform's cache directory):

    blobs/sha256/ab/ab12…   content, mode 0444, named by its sha256
    trees/<key>/            directories of hard links to blobs, for read-only mounts
    records/<kind>/<key>    small JSON facts that can be made again (bases, compiled wheels)
    work/                   temporary names; whatever is there may be deleted when nobody runs
    locks/                  one lock file per thing that must be made once at a time

A blob appears under its name only when it is complete, verified and synced, so a kill at any moment leaves
the store valid.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import filelock
import platformdirs

from kitbuild.errors import ResolveError, VerificationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

CHUNK_BYTES = 1 << 20
_DIGEST = re.compile(rb"[0-9a-f]{64}")


def sha256_file(path: Path) -> tuple[str, int]:
    """Hex sha256 and size in bytes of a file."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return digest, stream.tell()


@contextlib.contextmanager
def replacing(path: Path, *, mode: int = 0o644) -> Iterator[BinaryIO]:
    """A stream to a temporary name beside `path`, which takes its place when complete and synced.

    What is there and is no file (a folder, /dev/null) keeps its place: OSError, before anything is written.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "a device or a pipe, not a file, has this name", str(path))
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            yield stream
            stream.flush()
            os.fchmod(stream.fileno(), mode)
            os.fsync(stream.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_atomically(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write under a temporary name beside `path`, sync, rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, mode=mode) as stream:
        stream.write(data)


class Store:
    """One store directory. Processes share it: names are content, and making is under a file lock."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def at(cls, environ: Mapping[str, str]) -> Store:
        """The store that `environ` names by KITBUILD_HOME, else the platform's cache directory; nothing is made."""
        home = environ.get("KITBUILD_HOME")
        return cls(Path(home).expanduser().absolute() if home else Path(platformdirs.user_cache_dir("kitbuild")))

    @classmethod
    def open(cls, environ: Mapping[str, str]) -> Store:
        """The store that `environ` names, ready to be written."""
        store = cls.at(environ)
        try:
            for folder in ("blobs/sha256", "trees", "records", "work", "locks"):
                (store.root / folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ResolveError(
                f"the store {store.root} cannot be used: {error.strerror}",
                hint="set KITBUILD_HOME to a directory that you may write",
            ) from error
        return store

    def path(self, sha256: str) -> Path:
        """Where a blob is or would be."""
        return self.root / "blobs" / "sha256" / sha256[:2] / sha256

    def has(self, sha256: str) -> bool:
        """Whether the blob is there; what is there was verified when it came."""
        return self.path(sha256).is_file()

    def require(self, sha256: str, *, name: str) -> Path:
        """The blob's path, or an error that names the thing."""
        path = self.path(sha256)
        if not path.is_file():
            raise ResolveError(f"{name} (sha256 {sha256[:12]}…) is not in the store", hint="run `kitbuild fetch`")
        return path

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """A temporary directory on the store's own file system, removed at the end."""
        with space_errors(self.root):
            folder = Path(tempfile.mkdtemp(dir=self.root / "work"))
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def making(self, key: str, *, stopped: Callable[[], bool] | None = None) -> Iterator[None]:
        """Held by the one process that makes the thing called `key`; `stopped` ends the wait (and nothing is held)."""
        name = hashlib.sha256(key.encode()).hexdigest()[:32]
        lock = filelock.FileLock(self.root / "locks" / f"{name}.lock")
        while True:
            try:
                with space_errors(self.root):
                    lock.acquire(timeout=-1 if stopped is None else 0.5)
                break
            except filelock.Timeout:
                if stopped and stopped():
                    break
        try:
            yield
        finally:
            lock.release()

    def add_chunks(self, chunks: Iterable[bytes], *, name: str, expected: str | None = None) -> str:
        """Store a stream of bytes; returns the sha256. A stream that is not `expected` is refused, exit 7."""
        digest = hashlib.sha256()
        with self.scratch() as folder:
            part = folder / "blob"
            with part.open("wb") as stream:
                for chunk in chunks:
                    digest.update(chunk)
                    stream.write(chunk)
            return self.adopt(part, sha256=digest.hexdigest(), name=name, expected=expected)

    def add_bytes(self, data: bytes, *, name: str = "data") -> str:
        """Store bytes; returns the sha256."""
        sha256 = hashlib.sha256(data).hexdigest()
        return sha256 if self.has(sha256) else self.add_chunks((data,), name=name)

    def add_file(self, path: Path, *, name: str | None = None, expected: str | None = None) -> str:
        """Copy a file in; returns the sha256."""
        if expected is not None and self.has(expected):
            return expected
        with path.open("rb") as stream:
            return self.add_chunks(_chunks(stream), name=name or path.name, expected=expected)

    def adopt(self, part: Path, *, sha256: str, name: str, expected: str | None = None) -> str:
        """Move a complete temporary file, whose digest the caller computed while writing, to its name."""
        if expected is not None and sha256 != expected:
            raise VerificationError(
                f"{name}: sha256 is {sha256}, expected {expected}",
                hint="the source changed or the transfer was damaged; try again, then lock anew",
            )
        target = self.path(sha256)
        if not target.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            part.chmod(0o444)
            with part.open("rb") as stream:
                os.fsync(stream.fileno())
            part.replace(target)
        return sha256

    def tree(self, files: Iterable[tuple[str, str]], *, mode: int = 0o444) -> Path:
        """A read-only directory of `(relative POSIX path, sha256)`, made once, of hard links where that works."""
        listed = sorted(files)
        key = hashlib.sha256(json.dumps([mode, listed]).encode()).hexdigest()
        target = self.root / "trees" / key
        if target.is_dir():
            used(target)
            return target
        with self.making(f"tree {key}"), self.scratch() as folder:
            if not target.is_dir():
                for relative, sha256 in listed:
                    _link(self.require(sha256, name=relative), folder / "tree" / relative)
                (folder / "tree").mkdir(exist_ok=True)
                for directory in (folder / "tree", *(p for p in (folder / "tree").rglob("*") if p.is_dir())):
                    directory.chmod(0o755)
                (folder / "tree").replace(target)
        return target

    def record(self, kind: str, key: str) -> Any:
        """A fact written earlier, or None; a damaged one is none."""
        try:
            data = (self.root / "records" / kind / key).read_bytes()
            body, _, digest = data.rstrip(b"\n").rpartition(b"\n")
            if not _DIGEST.fullmatch(digest):  # of a kitbuild that wrote no digest
                return json.loads(data)
            return json.loads(body) if hashlib.sha256(body).hexdigest().encode() == digest else None
        except (FileNotFoundError, ValueError):
            return None

    def write_record(self, kind: str, key: str, value: object) -> None:
        """Write a fact that can be made again, and a last line with its digest."""
        body = json.dumps(value, indent=1, sort_keys=True).encode()
        data = b"%s\n%s\n" % (body, hashlib.sha256(body).hexdigest().encode())
        with space_errors(self.root):
            write_atomically(self.root / "records" / kind / key, data)

    def records(self, kind: str) -> dict[str, Any]:
        """All facts of a kind, by key."""
        folder = self.root / "records" / kind
        found = {path.name: self.record(kind, path.name) for path in sorted(folder.glob("[!.]*"))}
        return {key: value for key, value in found.items() if value is not None}


def used(folder: Path) -> None:
    """Make a folder look new, so that nobody drops it for its age while a run has it."""
    with contextlib.suppress(OSError):  # a store that may only be read
        os.utime(folder)


def _chunks(stream: BinaryIO) -> Iterator[bytes]:
    while chunk := stream.read(CHUNK_BYTES):
        yield chunk


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in {errno.EXDEV, errno.EMLINK, errno.EPERM, errno.ENOTSUP}:
            raise
        shutil.copyfile(source, target)
        target.chmod(0o444)


@contextlib.contextmanager
def space_errors(root: Path) -> Iterator[None]:
    """Turn a full, read-only or forbidden disk into a ResolveError that names the store."""
    try:
        yield
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES}:
            raise
        raise ResolveError(
            f"the store {root} cannot be written: {error.strerror}",
            hint="free some space (`kitbuild store gc`) or set KITBUILD_HOME to another disk",
        ) from error
