"""Step 5, the bytes of a packed file: each is either a member's content or follows from the member list.

`pack` writes one way only, so a header, a padding byte or the end that is otherwise was changed afterwards. Content
is covered by archive.json (`run/…`), by its own name (`blobs/sha256/…`) and by its own digest (`kit.json`).
"""

from __future__ import annotations

import tarfile
from typing import TYPE_CHECKING, BinaryIO

from kitbuild.errors import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CHUNK_BYTES = 1 << 20


def plain_member(name: str, size: int) -> tarfile.TarInfo:
    """A member without times and owners (`TarInfo` starts with zeros)."""
    member = tarfile.TarInfo(name)
    member.size = size
    member.mode = 0o644
    return member


def byte_problems(path: Path, members: dict[str, tarfile.TarInfo]) -> Iterator[Problem]:
    """The first place between the contents that is not as `pack` writes it."""
    with path.open("rb") as stream:
        at = 0
        for member in sorted(members.values(), key=lambda item: item.offset_data):
            header = plain_member(member.name, member.size).tobuf(tarfile.PAX_FORMAT)
            stream.seek(at)
            if at + len(header) != member.offset_data or stream.read(len(header)) != header:
                yield _problem(path, at, f"the header of {member.name}")
                return
            at = member.offset_data + member.size
            padding = -member.size % tarfile.BLOCKSIZE
            if not _zeros(stream, at, padding):
                yield _problem(path, at, f"the padding after {member.name}")
                return
            at += padding
        size = stream.seek(0, 2)
        end = at + 2 * tarfile.BLOCKSIZE
        end += -end % tarfile.RECORDSIZE
        if size != end or not _zeros(stream, at, end - at):
            yield _problem(path, at, "the end")


def _zeros(stream: BinaryIO, start: int, length: int) -> bool:
    stream.seek(start)
    left = length
    while left > 0:
        chunk = stream.read(min(left, CHUNK_BYTES))
        if not chunk or any(chunk):
            return False
        left -= len(chunk)
    return True


def _problem(path: Path, at: int, what: str) -> Problem:
    return Problem(message=f"{what}, at byte {at}, is not as it was packed", file=str(path))
