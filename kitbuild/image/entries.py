"""Step 3: files before they are written, the same for a layer and for a directory.

An entry knows its absolute path in the image and where its bytes are; reading checks them against the
digest it was promised with.
"""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from kitbuild.errors import ImageError, VerificationError
from kitbuild.image.archive import CHUNK_BYTES, UNREADABLE, Archive

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path
    from types import TracebackType


@dataclass(frozen=True, kw_only=True)
class Data:
    """Bytes at hand."""

    content: bytes = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A file, or a part of one."""

    file: Path
    offset: int = 0


@dataclass(frozen=True, kw_only=True)
class Member:
    """A member of a zip archive."""

    archive: Path
    name: str


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One regular file. `sha256` is what it must be; None where its source is this process."""

    path: str
    size: int
    source: Data | Stored | Member
    owner: str
    sha256: str | None = None
    executable: bool = False

    @classmethod
    def of(cls, path: str, content: bytes, *, owner: str, executable: bool = False) -> Self:
        """An entry of bytes at hand."""
        digest = hashlib.sha256(content).hexdigest()
        return cls(
            path=path,
            size=len(content),
            source=Data(content=content),
            owner=owner,
            sha256=digest,
            executable=executable,
        )


@dataclass(frozen=True, kw_only=True)
class Link:
    """A symbolic link."""

    path: str
    target: str


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A directory whose mode matters; others are 0755 and need no mention."""

    path: str
    mode: int


Node = Entry | Link | Folder


class Reader:
    """Reads entries; keeps archives open between members."""

    def __init__(self) -> None:
        self._open = contextlib.ExitStack()
        self._archives: dict[Path, Archive] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def chunks(self, entry: Entry) -> Iterator[bytes]:
        """The entry's bytes; exit 7 at the end if they are not the promised ones."""
        digest = hashlib.sha256()
        size = 0
        try:
            for chunk in self._pieces(entry):
                size += len(chunk)
                if size > entry.size:
                    break
                digest.update(chunk)
                yield chunk
        except UNREADABLE as error:
            raise ImageError(f"{entry.owner}: {entry.path} cannot be unpacked: {error}") from error
        if size != entry.size or (entry.sha256 is not None and digest.hexdigest() != entry.sha256):
            raise VerificationError(
                f"{entry.owner}: {entry.path} has sha256 {digest.hexdigest()} ({size} bytes),"
                f" expected {entry.sha256} ({entry.size} bytes)",
                hint="the file was changed after it was stored, or its wheel's RECORD is wrong",
            )

    def read(self, entry: Entry) -> bytes:
        """All bytes at once."""
        return b"".join(self.chunks(entry))

    def _pieces(self, entry: Entry) -> Iterator[bytes]:
        source = entry.source
        if isinstance(source, Data):
            yield source.content
        elif isinstance(source, Stored):
            yield from _part(source, entry.size)
        else:
            archive = self._archives.get(source.archive)
            if archive is None:
                archive = self._archives[source.archive] = self._open.enter_context(Archive(source.archive))
            yield from archive.chunks(source.name)


def _part(source: Stored, size: int) -> Iterator[bytes]:
    with source.file.open("rb") as stream:
        stream.seek(source.offset)
        while size and (chunk := stream.read(min(CHUNK_BYTES, size))):
            size -= len(chunk)
            yield chunk


def merge(nodes: Iterable[Node]) -> tuple[Node, ...]:
    """Sorted by path; the same file twice is kept once, two different ones are refused with both owners."""
    kept: dict[str, Node] = {}
    for node in nodes:
        other = kept.setdefault(node.path, node)
        if other is node or other == node:
            continue
        if not (isinstance(node, Entry) and isinstance(other, Entry) and _same(node, other)):
            raise ImageError(
                f"{_owner(other)} and {_owner(node)} both bring {node.path}, with different content",
                hint="leave one of them out, or pin versions that do not clash (image.packages)",
            )
    for path, node in kept.items():
        for parent in _parents(path):
            if isinstance(kept.get(parent), Entry | Link):
                raise ImageError(f"{_owner(kept[parent])} has the file {parent}, {_owner(node)} has {path}")
    return tuple(kept[path] for path in sorted(kept))


def _same(left: Entry, right: Entry) -> bool:
    return (left.size, left.sha256, left.executable) == (right.size, right.sha256, right.executable)


def _owner(node: Node) -> str:
    return node.owner if isinstance(node, Entry) else "kitbuild"


def _parents(path: str) -> Iterator[str]:
    while path := path.rpartition("/")[0]:
        yield path


def folders(nodes: Iterable[Node]) -> dict[str, int]:
    """Every directory needed for `nodes`, with its mode, in order."""
    found = {parent: 0o755 for node in nodes for parent in _parents(node.path)}
    found |= {node.path: node.mode for node in nodes if isinstance(node, Folder)}
    return dict(sorted(found.items()))
