"""Step 3: members of a wheel, inflated fast: half of what assembling a CUDA image takes.

`zipfile` finds them; ISA-L inflates twice as fast as zlib does, where there is a build of it. What comes out is the
same, and is compared with a digest by whoever asks.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from typing import TYPE_CHECKING, Any, Self, cast

try:
    from isal import isal_zlib as inflating
except ImportError:  # a processor that nobody built it for
    import zlib as inflating  # type: ignore[no-redef]

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import TracebackType

CHUNK_BYTES = 1 << 20
# The stub of isal says that this is an exception, and not a class.
_INFLATING = cast("type[Exception]", inflating.error)
# zipfile says NotImplementedError of a compression that it does not know: https://docs.python.org/3/library/zipfile.html
UNREADABLE = (zipfile.BadZipFile, zlib.error, _INFLATING, EOFError, NotImplementedError, struct.error)
_RAW = -zlib.MAX_WBITS
# https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, 4.3.7: a fixed part, then name and extra field.
_LOCAL_HEADER = struct.Struct("<26xHH")


class Archive:
    """An open archive."""

    def __init__(self, path: Path) -> None:
        self._stream = path.open("rb")
        self._zip = zipfile.ZipFile(self._stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._zip.close()
        self._stream.close()

    def chunks(self, name: str) -> Iterator[bytes]:
        """A member's bytes; whether they are the right ones is for the caller to say."""
        info = self._zip.getinfo(name)
        if info.compress_type == zipfile.ZIP_DEFLATED:
            yield from _inflated(self._raw(info))
        elif info.compress_type == zipfile.ZIP_STORED:
            yield from self._raw(info)
        else:
            with self._zip.open(info) as stream:
                while chunk := stream.read(CHUNK_BYTES):
                    yield chunk

    def _raw(self, info: zipfile.ZipInfo) -> Iterator[bytes]:
        self._stream.seek(info.header_offset)
        skipped = sum(_LOCAL_HEADER.unpack(self._stream.read(_LOCAL_HEADER.size)))
        self._stream.seek(skipped, 1)
        left = info.compress_size
        while left:
            piece = self._stream.read(min(CHUNK_BYTES, left))
            if not piece:
                raise EOFError("the archive ends early")
            left -= len(piece)
            yield piece


def _inflated(pieces: Iterator[bytes]) -> Iterator[bytes]:
    inflater: Any = inflating.decompressobj(_RAW)
    for piece in pieces:
        rest = piece
        while rest and not inflater.eof:
            chunk = inflater.decompress(rest, CHUNK_BYTES)
            rest = inflater.unconsumed_tail
            if chunk:
                yield chunk
    if chunk := inflater.flush():
        yield chunk
