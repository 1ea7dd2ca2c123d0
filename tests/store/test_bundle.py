"""Carrying blobs to another store."""

from __future__ import annotations

import io
import json
import os
import tarfile
from typing import TYPE_CHECKING

import pytest

from kitbuild.errors import ResolveError, UsageError, VerificationError
from kitbuild.progress import Silent
from kitbuild.store import Store
from kitbuild.store.bundle import read_bundle, write_bundle

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def other(tmp_path: Path) -> Store:
    return Store.open({"KITBUILD_HOME": str(tmp_path / "other")})


def tar(path: Path, index: object, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, data in {"bundle.json": json.dumps(index).encode(), **files}.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def test_a_bundle_carries_blobs(store: Store, other: Store, tmp_path: Path) -> None:
    """What was written is read, byte for byte."""
    one, two = store.add_bytes(b"one"), store.add_bytes(b"")
    path = tmp_path / "b.tar"
    write_bundle(store, [two, one, one], path, progress=Silent())
    assert read_bundle(path, other, progress=Silent()) == tuple(sorted([one, two]))
    assert other.path(one).read_bytes() == b"one"
    assert other.has(two)


def test_the_same_content_gives_the_same_bytes(store: Store, other: Store, tmp_path: Path) -> None:
    """Order of the arguments, file times and store do not matter."""
    digests = [store.add_bytes(text) for text in (b"one", b"two")]
    write_bundle(store, digests, tmp_path / "a.tar", progress=Silent())
    read_bundle(tmp_path / "a.tar", other, progress=Silent())
    write_bundle(other, digests[::-1], tmp_path / "b.tar", progress=Silent())
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()


def test_an_absent_blob_writes_no_bundle(store: Store, tmp_path: Path) -> None:
    """Nothing half-made is left behind."""
    with pytest.raises(ResolveError):
        write_bundle(store, ["0" * 64], tmp_path / "b.tar", progress=Silent())
    assert not list(tmp_path.glob("*.tar*"))


def test_a_wrong_byte_is_exit_7(store: Store, other: Store, tmp_path: Path) -> None:
    """A flipped byte in the bundle is refused, and no blob of it is kept."""
    sha256 = store.add_bytes(b"a long enough text to be found")
    path = tmp_path / "b.tar"
    write_bundle(store, [sha256], path, progress=Silent())
    path.write_bytes(path.read_bytes().replace(b"long enough", b"song enough"))
    with pytest.raises(VerificationError, match=f"^.*b.tar: blobs/{sha256}: sha256 is .*, expected {sha256}$"):
        read_bundle(path, other, progress=Silent())
    assert not other.has(sha256)


@pytest.mark.parametrize("kept", [0.3, 0.6, 0.9])
def test_a_truncated_bundle_is_refused(store: Store, other: Store, tmp_path: Path, kept: float) -> None:
    """Half a bundle is never taken for a whole one."""
    digests = [store.add_bytes(bytes([number]) * 5000) for number in range(20)]
    path = tmp_path / "b.tar"
    write_bundle(store, digests, path, progress=Silent())
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises((VerificationError, UsageError)):
        read_bundle(path, other, progress=Silent())


@pytest.mark.parametrize(
    ("index", "files", "error"),
    [
        ({"version": 1, "blobs": {}}, {"../../evil": b"x"}, VerificationError),
        ({"version": 1, "blobs": {"../x": 1}}, {"blobs/../x": b"x"}, VerificationError),
        ({"version": 1, "blobs": {}, "records": {"layers": {"x": {}}}}, {}, VerificationError),
        ({"version": 1, "blobs": {"0" * 64: 1}}, {}, VerificationError),
        ({"version": 1, "blobs": {"0" * 64: 1}}, {"blobs/" + "0" * 64: b"xy"}, VerificationError),
        ({"version": 9, "blobs": {}}, {}, UsageError),
        ({"version": 1}, {}, VerificationError),
        ([], {}, VerificationError),
    ],
)
def test_a_strange_bundle_is_refused(
    other: Store, tmp_path: Path, index: object, files: dict[str, bytes], error: type[Exception]
) -> None:
    """Names that lead elsewhere, facts that nobody verifies, files that are not listed, and listed files that are not there."""
    with pytest.raises(error):
        read_bundle(tar(tmp_path / "b.tar", index, files), other, progress=Silent())


@pytest.mark.parametrize("data", [b"", b"no tar at all" * 100, b"\0" * 10240])
def test_what_is_no_bundle_is_a_usage_error(other: Store, tmp_path: Path, data: bytes) -> None:
    """Another file is said to be no bundle."""
    path = tmp_path / "b.tar"
    path.write_bytes(data)
    with pytest.raises(UsageError, match="is no bundle of kitbuild"):
        read_bundle(path, other, progress=Silent())


def test_a_bundle_takes_the_place_of_no_device(store: Store, tmp_path: Path) -> None:
    """`--bundle /dev/null` as root must leave the machine its /dev/null; a pipe stands for it here."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(FileExistsError, match="a device or a pipe, not a file, has this name"):
        write_bundle(store, [], pipe, progress=Silent())
    with pytest.raises(IsADirectoryError):
        write_bundle(store, [], tmp_path, progress=Silent())
    assert pipe.is_fifo()
    assert sorted(tmp_path.glob(".*")) == []


def test_an_absent_bundle_is_a_usage_error(other: Store, tmp_path: Path) -> None:
    """A path that is not there."""
    with pytest.raises(UsageError, match=r"^there is no bundle .*b\.tar$"):
        read_bundle(tmp_path / "b.tar", other, progress=Silent())
    with pytest.raises(UsageError, match=r"^the bundle .* cannot be read: Is a directory$"):
        read_bundle(tmp_path, other, progress=Silent())


def test_an_index_that_is_too_deep(other: Store, tmp_path: Path) -> None:
    """An index of many nested lists is refused as any other."""
    with tarfile.open(tmp_path / "b.tar", "w") as archive:
        member = tarfile.TarInfo("bundle.json")
        member.size = 100_000
        archive.addfile(member, io.BytesIO(b"[" * member.size))
    with pytest.raises(VerificationError, match=r"bundle\.json cannot be read"):
        read_bundle(tmp_path / "b.tar", other, progress=Silent())
