"""The archive is a pure function of its arguments and every reader takes it."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from typing import TYPE_CHECKING, Any

import pytest

from kitbuild.base import oci
from kitbuild.errors import ImageError

if TYPE_CHECKING:
    from pathlib import Path


def layer(path: Path, files: dict[str, bytes]) -> tuple[str, Path]:
    with tarfile.open(path, "w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return oci.digest_of(path.read_bytes()), path


def image(tmp_path: Path) -> dict[str, Any]:
    layers = [layer(tmp_path / "0", {"a": b"1"}), layer(tmp_path / "1", {"b": b"2"})]
    config = oci.config_bytes(
        architecture="amd64", diff_ids=[d for d, _ in layers], config={"Env": ["A=1"]}, history=[{}, {}]
    )
    manifest = oci.manifest_bytes(config, [(d, p.stat().st_size) for d, p in layers])
    return {"config": config, "manifest": manifest, "layers": layers}


def written(tmp_path: Path, **changes: Any) -> Path:
    target = tmp_path / "image.tar"
    oci.write_archive(target, **(image(tmp_path) | {"tag": "kitbuild/x:1"} | changes))
    return target


def test_manifest_is_canonical() -> None:
    """The manifest of a known config and layer has known bytes: no clock, host or dictionary order enters."""
    manifest = oci.manifest_bytes(b"{}", [("sha256:" + "1" * 64, 7)])
    assert manifest == (
        b'{"config":{"digest":"sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",'
        b'"mediaType":"application/vnd.oci.image.config.v1+json","size":2},"layers":[{"digest":"sha256:'
        + b"1"
        * 64
        + b'","mediaType":"application/vnd.oci.image.layer.v1.tar","size":7}],'
        b'"mediaType":"application/vnd.oci.image.manifest.v1+json","schemaVersion":2}'
    )


def test_archive_repeats_and_streams(tmp_path: Path) -> None:
    """A file and a stream that cannot seek get the same bytes."""

    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return False

        def tell(self) -> int:
            raise OSError

    path = written(tmp_path)
    pipe = Pipe()
    oci.write_archive(pipe, **image(tmp_path), tag="kitbuild/x:1")
    assert path.read_bytes() == pipe.getvalue()


def test_archive_has_both_indexes(tmp_path: Path) -> None:
    """`manifest.json` and `index.json` name the same image; the tag stands in each reader's form."""
    with tarfile.open(written(tmp_path)) as archive:
        names = archive.getnames()
        docker = json.load(archive.extractfile("manifest.json") or io.BytesIO())
        index = json.load(archive.extractfile("index.json") or io.BytesIO())
    made = image(tmp_path)
    assert len(names) == len(set(names)) == 2 + 2 + 2 + 3
    assert docker[0]["RepoTags"] == ["kitbuild/x:1"]
    assert docker[0]["Config"] == "blobs/sha256/" + oci.digest_of(made["config"])[7:]
    assert index["manifests"][0]["digest"] == oci.digest_of(made["manifest"])
    assert index["manifests"][0]["annotations"] == {
        "io.containerd.image.name": "docker.io/kitbuild/x:1",
        "org.opencontainers.image.ref.name": "1",
    }


def test_omitted_and_repeated_layers_are_written_once_or_never(tmp_path: Path) -> None:
    """A digest in `omit` has no member; a layer that occurs twice has one."""
    made = image(tmp_path)
    first, second = made["layers"]
    target = written(tmp_path, layers=[first, first, second], omit={second[0]})
    with tarfile.open(target) as archive:
        names = archive.getnames()
    assert names.count("blobs/sha256/" + first[0][7:]) == 1
    assert "blobs/sha256/" + second[0][7:] not in names


@pytest.mark.parametrize("drop", ["manifest.json", None])
def test_archive_is_read_back(tmp_path: Path, drop: str | None) -> None:
    """Config and layers come back as they were written, through either index."""
    path = written(tmp_path)
    if drop:
        with tarfile.open(path) as old, tarfile.open(tmp_path / "oci.tar", "w") as new:
            for member in old.getmembers():
                if member.name != drop:
                    new.addfile(member, old.extractfile(member) if member.isfile() else None)
        path = tmp_path / "oci.tar"
    made = image(tmp_path)
    with oci.read_archive(path) as saved:
        assert saved.config == made["config"]
        assert saved.diff_ids == tuple(d for d, _ in made["layers"])
        with saved.layer(1) as stream:
            assert stream.read() == made["layers"][1][1].read_bytes()


def test_gzip_is_unpacked_and_zstd_refused() -> None:
    """A gzip layer is read as its tar; zstd, which Python 3.11 cannot read, is a plain error."""
    with oci.uncompressed(io.BytesIO(gzip.compress(b"tar")), name="layer") as stream:
        assert stream.read() == b"tar"
    with (
        pytest.raises(ImageError, match=r"^layer is compressed with zstd$"),
        oci.uncompressed(io.BytesIO(b"\x28\xb5\x2f\xfd...."), name="layer"),
    ):
        pass


INDEX = b'{"manifests": [{"digest": "again"}]}'


@pytest.mark.parametrize(
    "files",
    [
        {"index.json": b"[" * 100_000},
        {"index.json": b"null"},
        {"index.json": INDEX, "blobs/again": INDEX},
        {"manifest.json": b'[{"Config": 5, "Layers": 7}]'},
        {"manifest.json": b"[[]]"},
        {"manifest.json": b'[{"Config": "manifest.json", "Layers": 7}]'},
    ],
)
def test_a_strange_archive_is_refused(tmp_path: Path, files: dict[str, bytes]) -> None:
    """Documents that are too deep, of other kinds, or an index that names itself: an error that names the file."""
    path = tmp_path / "bad.tar"
    with tarfile.open(path, "w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    with pytest.raises(ImageError, match=r"bad\.tar is not an image archive"), oci.read_archive(path):
        pass


def test_a_folder_is_no_archive(tmp_path: Path) -> None:
    """A folder is said to be one."""
    with pytest.raises(ImageError, match="is a folder, not an image archive"), oci.read_archive(tmp_path):
        pass


@pytest.mark.parametrize("content", [b"", b"not a tar", b"\0" * 10240])
def test_what_is_no_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    """Rubbish, an empty file and an empty tar are errors that name the file."""
    path = tmp_path / "bad.tar"
    path.write_bytes(content)
    with pytest.raises(ImageError, match=r"bad\.tar is not an image archive"), oci.read_archive(path):
        pass


@pytest.mark.parametrize(
    ("tag", "name"),
    [
        ("kitbuild/x:1", "docker.io/kitbuild/x:1"),
        ("x", "docker.io/library/x:latest"),
        ("localhost:5000/a/b", "localhost:5000/a/b:latest"),
        ("ghcr.io/a/b:2", "ghcr.io/a/b:2"),
        ("localhost/b", "localhost/b:latest"),
    ],
)
def test_full_name(tag: str, name: str) -> None:
    """containerd wants the registry and the tag spelt out."""
    assert name == oci.full_name(tag)
