"""Step 3: deterministic tars. The same nodes give the same bytes on every machine and Python.

Sorted entries, each directory once, owner 0, time 0, modes 0644 and 0755 (and what `Folder` says).
"""

from __future__ import annotations

import hashlib
import tarfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from kitbuild.image.ahead import ahead
from kitbuild.image.entries import Entry, Folder, Link, Node, Reader, folders

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

BLOCK_BYTES = 512


@dataclass(frozen=True, kw_only=True)
class Written:
    """A tar and what is in it: path to sha256 of files, path to target of links."""

    sha256: str
    size: int
    files: dict[str, str]
    links: dict[str, str]


def header(name: str, *, size: int = 0, mode: int = 0o644, kind: bytes = tarfile.REGTYPE, target: str = "") -> bytes:
    """One header, with an extended one before it where the name or the size needs that."""
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.type, info.linkname = size, mode, kind, target
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def padding(size: int) -> bytes:
    """What fills a member's last block."""
    return b"\0" * (-size % BLOCK_BYTES)


END = b"\0" * (2 * BLOCK_BYTES)


def write_tar(stream: BinaryIO, nodes: Sequence[Node], *, advance: Callable[[float], None]) -> Written:
    """Write sorted, merged `nodes`; `advance` is told the bytes."""
    digest, size = hashlib.sha256(), 0
    files: dict[str, str] = {}
    with Reader() as reader, ahead(_members(nodes, reader, files)) as chunks:
        for chunk in chunks:
            digest.update(chunk)
            stream.write(chunk)
            size += len(chunk)
            advance(len(chunk))
    links = {node.path: node.target for node in nodes if isinstance(node, Link)}
    return Written(sha256=digest.hexdigest(), size=size, files=files, links=links)


def _members(nodes: Sequence[Node], reader: Reader, files: dict[str, str]) -> Iterator[bytes]:
    directories = folders(nodes)
    named: dict[str, Node] = {node.path: node for node in nodes if not isinstance(node, Folder)}
    for path in sorted({*directories, *named}):
        node = named.get(path)
        if node is None:
            yield header(path[1:] + "/", mode=directories[path], kind=tarfile.DIRTYPE)
        elif isinstance(node, Link):
            yield header(path[1:], mode=0o777, kind=tarfile.SYMTYPE, target=node.target)
        elif isinstance(node, Entry):
            yield header(path[1:], size=node.size, mode=0o755 if node.executable else 0o644)
            content = hashlib.sha256()
            for chunk in reader.chunks(node):
                content.update(chunk)
                yield chunk
            files[path] = content.hexdigest()
            yield padding(node.size)
    yield END
