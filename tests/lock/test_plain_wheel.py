"""A built wheel's bytes follow from its files."""

from __future__ import annotations

import io
import zipfile

import pytest

from kitbuild.lock.plain_wheel import plain

FILES = {"raw/__init__.py": b"X = 1\n" * 100, "raw/run.sh": b"#!/bin/sh\n", "raw-1.0.dist-info/RECORD": b"r"}


def packed(names: list[str], *, level: int, year: int, compress: int = zipfile.ZIP_DEFLATED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compress, compresslevel=level) as archive:
        archive.writestr(zipfile.ZipInfo("raw/", (year, 1, 1, 0, 0, 0)), b"")
        for name in names:
            item = zipfile.ZipInfo(name, (year, 2, 3, 4, 5, 6))
            item.external_attr = (0o775 if name.endswith(".sh") else 0o664 if year == 2000 else 0o600) << 16
            archive.writestr(item, FILES[name], compress, level)
    return stream.getvalue()


@pytest.mark.parametrize(
    "other",
    [
        packed(sorted(FILES, reverse=True), level=9, year=2000),
        packed(sorted(FILES), level=1, year=2020),
        packed(sorted(FILES), level=1, year=2020, compress=zipfile.ZIP_STORED),
    ],
)
def test_how_it_was_packed_does_not_matter(other: bytes) -> None:
    """Another zlib, clock, mask or order of names gives the same bytes; the files and what may be run stay."""
    first = plain(packed(list(FILES), level=6, year=1999))
    assert plain(other) == first
    with zipfile.ZipFile(io.BytesIO(first)) as archive:
        assert {item.filename: archive.read(item) for item in archive.infolist()} == FILES
        assert [item.filename for item in archive.infolist()] == sorted(FILES)
        modes = {item.filename: item.external_attr >> 16 for item in archive.infolist()}
        assert modes == {name: 0o100755 if name.endswith(".sh") else 0o100644 for name in FILES}


def test_another_file_is_another_wheel() -> None:
    """One byte in one file is seen."""
    first = packed(list(FILES), level=6, year=1999)
    stream = io.BytesIO(first)
    with zipfile.ZipFile(stream, "a") as archive:
        archive.writestr("raw/more.py", b"")
    assert plain(stream.getvalue()) != plain(first)
