"""Step 2: a built wheel written again, so that the files in it alone decide its bytes. Pure.

What packs a wheel compresses with the zlib of its Python, and zlib-ng packs otherwise; it also keeps times, and the
order in which a file system lists names. Stored, sorted and without times, the same files are the same wheel
everywhere. RECORD is of the files and stays as it is.
"""

from __future__ import annotations

import io
import zipfile

_FIRST_TIME = (1980, 1, 1, 0, 0, 0)
_UNIX = 3
_EXECUTABLE = 0o111


def plain(wheel: bytes) -> bytes:
    """The same files, with nothing else."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(wheel)) as source, zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as target:
        for item in sorted(source.infolist(), key=lambda item: item.filename):
            if item.is_dir():
                continue
            plain_item = zipfile.ZipInfo(item.filename, _FIRST_TIME)
            plain_item.create_system = _UNIX
            mode = 0o755 if item.external_attr >> 16 & _EXECUTABLE else 0o644
            plain_item.external_attr = (0o100000 | mode) << 16
            target.writestr(plain_item, source.read(item))
    return stream.getvalue()
