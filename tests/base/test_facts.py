"""Facts are read from layers alone, top layer wins, and an unfinished base is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from kitbuild.base.facts import read_facts
from kitbuild.base.models import LockedBase, SystemPackage, Upstream
from kitbuild.errors import ImageError
from tests.base import made

if TYPE_CHECKING:
    from pathlib import Path


def facts(tmp_path: Path, *layers: dict[str, str], origin: Upstream | None = None, **changes: Any) -> LockedBase:
    data = [made.layer(files) for files in layers]
    return read_facts(name="b", config=made.config(data, **changes), layers=made.write(tmp_path, data), origin=origin)


def test_debian(tmp_path: Path) -> None:
    """Python, glibc and installed packages come from dpkg's record; what is only configured is not installed."""
    base = facts(tmp_path, made.DEBIAN)
    assert (base.python, base.interpreter, base.glibc) == ("3.11.2", "/usr/bin/python3.11", "2.36")
    assert base.packages == (
        SystemPackage(name="libc6", version="2.36-9+deb12u10", architecture="amd64"),
        SystemPackage(name="python3.11-minimal", version="3.11.2-6+deb12u6", architecture="amd64"),
    )
    assert (base.cuda, base.upstream, base.dockerfile_sha256) == (None, None, None)


def test_recorded_digests(tmp_path: Path) -> None:
    """A digest recorded for this very version is taken, another version's is not."""
    entries = [
        {"name": "libc6", "version": "2.36-9+deb12u10", "architecture": "amd64", "sha256": "a" * 64},
        {"name": "python3.11-minimal", "version": "3.11.1", "architecture": "amd64", "sha256": "b" * 64},
    ]
    base = facts(tmp_path, made.DEBIAN | {"usr/share/kitbuild/packages.json": json.dumps(entries)})
    assert [package.sha256 for package in base.packages] == ["a" * 64, None]


def test_local_python_comes_first(tmp_path: Path) -> None:
    """/usr/local is before /usr, as on PATH, and headers tell the version where dpkg does not."""
    local = {
        "usr/local/bin/python3": "->python3.13",
        "usr/local/bin/python3.13": "ELF",
        "usr/local/include/python3.13/patchlevel.h": '#define PY_VERSION  "3.13.5+"\n',
    }
    base = facts(tmp_path, made.DEBIAN, local)
    assert (base.interpreter, base.python) == ("/usr/local/bin/python3.13", "3.13.5")


@pytest.mark.parametrize("whiteout", ["usr/local/bin/.wh.python3", "usr/.wh.local", "usr/local/.wh..wh..opq"])
def test_whiteouts(tmp_path: Path, whiteout: str) -> None:
    """What an upper layer deletes is not there: a file, a folder, an opaque folder."""
    local = {"usr/local/bin/python3": "->python3.13", "usr/local/bin/python3.13": "ELF"}
    assert facts(tmp_path, made.DEBIAN, local, {whiteout: ""}).interpreter == "/usr/bin/python3.11"


@pytest.mark.parametrize(
    ("changes", "cuda"),
    [
        ({"env": ["CUDA_VERSION=12.9.1"]}, "12.9"),
        ({"labels": {"org.kitbuild.base.cuda": "12.8"}, "env": ["CUDA_VERSION=12.9.1"]}, "12.8"),
        ({}, None),
    ],
)
def test_cuda(tmp_path: Path, changes: dict[str, Any], cuda: str | None) -> None:
    """The label says CUDA's major and minor, else NVIDIA's variable."""
    assert cuda == facts(tmp_path, made.DEBIAN, **changes).cuda


def test_upstream(tmp_path: Path) -> None:
    """Labels tell what a base was built from; without them, where it was found."""
    origin = Upstream(name="ghcr.io/a/b", digest="sha256:" + "1" * 64)
    labels = {"org.kitbuild.base.upstream": "debian:bookworm", "org.kitbuild.base.dockerfile.sha256": "c" * 64}
    base = facts(tmp_path, made.DEBIAN, labels=labels, origin=origin)
    assert base.upstream == Upstream(name="debian:bookworm", digest=None)
    assert base.dockerfile_sha256 == "c" * 64
    assert origin == facts(tmp_path, made.DEBIAN, origin=origin).upstream


def without(*names: str) -> dict[str, str]:
    return {name: text for name, text in made.DEBIAN.items() if name not in names}


@pytest.mark.parametrize(
    ("files", "changes", "message"),
    [
        (without("./usr/bin/python3"), {}, "b has no /usr/bin/python3 nor /usr/local/bin/python3"),
        (without("./usr/bin/python3.11"), {}, "b has no /usr/bin/python3 nor /usr/local/bin/python3"),
        (without("./var/lib/dpkg/status"), {}, "b does not tell its Python's version: no headers of python3.11"),
        (
            without("./var/lib/dpkg/status") | {"usr/include/python3.11/patchlevel.h": '#define PY_VERSION "3.11.2"'},
            {},
            "b has no libc6 package",
        ),
        (made.DEBIAN, {"architecture": "s390x"}, "b is for s390x"),
    ],
)
def test_unfinished(tmp_path: Path, files: dict[str, str], changes: dict[str, Any], message: str) -> None:
    """An image that is no finished base is exit 5 and says what it lacks."""
    with pytest.raises(ImageError) as caught:
        facts(tmp_path, files, **changes)
    assert message == caught.value.message
    assert caught.value.hint
