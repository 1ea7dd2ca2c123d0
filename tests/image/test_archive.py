"""Members of a wheel come out as `zipfile` gives them, however they are packed; a damaged one is told."""

from __future__ import annotations

import random
import zipfile
import zlib
from typing import TYPE_CHECKING

import pytest

from kitbuild.errors import ImageError, VerificationError
from kitbuild.image import archive
from kitbuild.image.archive import CHUNK_BYTES, Archive
from kitbuild.image.entries import Entry, Member, Reader

if TYPE_CHECKING:
    from pathlib import Path

NOISE = random.Random(3).randbytes(2 * CHUNK_BYTES + 17)  # noqa: S311 - any bytes that do not compress
CONTENTS = {
    "empty": b"",
    "one": b"x",
    "noise": NOISE,
    "zeros": bytes(6 * CHUNK_BYTES),
    "text": b"def f(): pass\n" * 99999,
}


def packed(path: Path, method: int, contents: dict[str, bytes] | None = None) -> Path:
    with zipfile.ZipFile(path, "w", method) as made:
        for name, data in (contents or CONTENTS).items():
            made.writestr(name, data)
    return path


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
@pytest.mark.parametrize("inflate", ["isal", "zlib"])
def test_every_member_comes_out(tmp_path: Path, method: int, inflate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty, tiny, incompressible and very compressible, in pieces of bounded size; with ISA-L and without it."""
    if inflate == "zlib":
        monkeypatch.setattr(archive, "inflating", zlib)
    assert (vars(archive)["inflating"] is zlib) == (inflate == "zlib")
    with Archive(packed(tmp_path / "a.zip", method)) as opened:
        for name, data in CONTENTS.items():
            pieces = list(opened.chunks(name))
            assert b"".join(pieces) == data
            assert max(map(len, pieces), default=0) <= 2 * CHUNK_BYTES


def entry(path: Path, name: str, size: int) -> Entry:
    return Entry(path=f"/{name}", size=size, source=Member(archive=path, name=name), owner="a.whl", sha256="0" * 64)


@pytest.mark.parametrize("inflate", ["isal", "zlib"])
def test_a_damaged_member_is_told(tmp_path: Path, inflate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a byte is flipped, reading ends with exit 5 or 7 that names the wheel, never with other bytes."""
    if inflate == "zlib":
        monkeypatch.setattr(archive, "inflating", zlib)
    text = b"".join(b"line %d of a module\n" % number for number in range(400))
    path = packed(tmp_path / "a.zip", zipfile.ZIP_DEFLATED, {"m.py": text})
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as made:
        size = made.getinfo("m.py").compress_size
    for place in range(34, 34 + size, max(1, size // 40)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        with Reader() as reader, pytest.raises((ImageError, VerificationError), match=r"^a\.whl: /m\.py "):
            reader.read(entry(path, "m.py", len(text)))


def test_more_than_was_promised(tmp_path: Path) -> None:
    """A member that inflates to more than the wheel says is refused without being read to its end."""
    path = packed(tmp_path / "a.zip", zipfile.ZIP_DEFLATED)
    with Reader() as reader, pytest.raises(VerificationError, match=r"^a\.whl: /zeros has sha256 "):
        reader.read(entry(path, "zeros", 100))
