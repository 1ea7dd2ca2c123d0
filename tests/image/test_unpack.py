"""What comes out of the compiler's container is unpacked by hand: Python 3.11.2 has no `extractall(filter=)`."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from kitbuild.errors import ImageError
from kitbuild.image.compilers import unpack_files


def stream(*members: tuple[str, bytes, bytes]) -> tarfile.TarFile:
    """A tar that is read once, front to back, of (name, type, content)."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name, kind, content in members:
            member = tarfile.TarInfo(name)
            member.type, member.size, member.linkname = kind, len(content), "/etc/passwd"
            archive.addfile(member, io.BytesIO(content))
    return tarfile.open(fileobj=io.BytesIO(data.getvalue()), mode="r|")


def test_files_are_unpacked(tmp_path: Path) -> None:
    """Files and their folders; links and devices are left out."""
    made = stream(
        ("out", tarfile.DIRTYPE, b""),
        ("out/0/a.pyc", tarfile.REGTYPE, b"code"),
        ("out/link", tarfile.SYMTYPE, b""),
        ("out/pipe", tarfile.FIFOTYPE, b""),
    )
    unpack_files(made, tmp_path)
    assert (tmp_path / "out/0/a.pyc").read_bytes() == b"code"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["0"]


@pytest.mark.parametrize("name", ["../evil", "/evil", "out/../../evil"])
def test_nothing_outside(tmp_path: Path, name: str) -> None:
    """A name that leads elsewhere is refused before a byte of it is written."""
    folder = tmp_path / "work"
    folder.mkdir()
    with pytest.raises(ImageError, match="outside its folder"):
        unpack_files(stream((name, tarfile.REGTYPE, b"x")), folder)
    assert [path.name for path in tmp_path.rglob("*")] == ["work"]


def test_no_filter_of_a_later_python() -> None:
    """`filter=` came with Python 3.11.4; no module of ours calls what takes it."""
    root = Path(__file__).parents[2] / "kitbuild"
    assert [path.name for path in root.rglob("*.py") if ".extractall(" in path.read_text(encoding="utf-8")] == []
