"""The bootstrapped base is the same bytes every time, knows its packages, and failing leaves nothing."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tarfile
import time
from typing import TYPE_CHECKING

import pytest

from kitbuild.base import bases, oci
from kitbuild.base.bootstrap import bootstrap, rewrite
from kitbuild.base.engine import find_image, import_base
from kitbuild.base.targets import load_bootstrap
from kitbuild.errors import ImageError
from kitbuild.image.load import load_base
from kitbuild.progress import Silent
from kitbuild.store import Store
from tests.base.made import STATUS, Notes

if TYPE_CHECKING:
    from pathlib import Path

    import docker

    from kitbuild.base.models import LockedBase

AVAILABLE = "Package: libc6\nArchitecture: amd64\nVersion: 2.36-9+deb12u10\nSHA256: " + "a" * 64 + "\n\n"


def raw(path: Path, *, order: int, mtime: int, host: str) -> Path:
    """What mmdebstrap might write on some machine at some time."""
    files = {
        "./var/lib/dpkg/status": STATUS,
        "./etc/hostname": host,
        "./etc/apt/sources.list": f"deb http://{host}/ bookworm main",
        "./etc/os-release": "ID=debian",
        "./usr/share/doc/bash/copyright": "GPL",
        "./usr/share/doc/bash/README": "words",
        "./usr/share/man/man1/bash.1": "words",
        "./var/log/dpkg.log": host,
        "./dev/null": "",
    }
    with tarfile.open(path, "w") as archive:
        for name, text in sorted(files.items(), reverse=bool(order)):
            info = tarfile.TarInfo(name)
            info.size, info.mtime, info.uname = len(text), mtime, host
            archive.addfile(info, io.BytesIO(text.encode()))
        first, second = ("./usr/bin/perl", "./usr/bin/perl5")[:: -1 if order else 1]
        info = tarfile.TarInfo(first)
        info.size = 3
        info.mtime = mtime
        archive.addfile(info, io.BytesIO(b"ELF"))
        link = tarfile.TarInfo(second)
        link.type, link.linkname, link.mtime = tarfile.LNKTYPE, first, mtime
        archive.addfile(link)
    return path


def rewritten(folder: Path, *, order: int, mtime: int, host: str) -> bytes:
    (folder / "available").write_text(AVAILABLE)
    source = raw(folder / "raw.tar", order=order, mtime=mtime, host=host)
    digest = rewrite(source, folder / "layer.tar", how=load_bootstrap("cpu"), available=folder / "available")
    data = (folder / "layer.tar").read_bytes()
    assert oci.digest_of(data) == f"sha256:{digest}"
    return data


def test_machine_and_time_do_not_enter(tmp_path: Path) -> None:
    """Order, later times, owners' names, host name, mirror and logs leave no trace; licences stay, manuals do not."""
    one = rewritten(tmp_path, order=0, mtime=1_800_000_000, host="one")
    two = rewritten(tmp_path, order=1, mtime=1_900_000_000, host="two")
    assert one == two
    with tarfile.open(fileobj=io.BytesIO(one)) as archive:
        members = {member.name: member for member in archive}
        packages = archive.extractfile("usr/share/kitbuild/packages.json")
        assert packages is not None
        assert b'{"architecture":"amd64","name":"libc6","sha256":"aaaa' in packages.read()
    assert set(members) == {
        "etc/os-release",
        "usr/bin/perl",
        "usr/bin/perl5",
        "usr/share/doc/bash/copyright",
        "usr/share/kitbuild",
        "usr/share/kitbuild/packages.json",
        "var/lib/dpkg/status",
    }
    assert members["usr/bin/perl"].isreg()
    assert members["usr/bin/perl5"].linkname == "usr/bin/perl"
    assert members["etc/os-release"].mtime == load_bootstrap("cpu").source_date_epoch


def fake(folder: Path, script: str) -> dict[str, str]:
    """An environment whose mmdebstrap is this script."""
    path = folder / "bin" / "mmdebstrap"
    path.parent.mkdir()
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)
    return {"PATH": f"{path.parent}:{os.environ['PATH']}"}


def left_behind(store: Store) -> list[Path]:
    return [*(store.root / "work").iterdir(), *(store.root / "blobs" / "sha256").iterdir()]


def test_without_mmdebstrap(store: Store) -> None:
    """The error names the package to install."""
    with pytest.raises(ImageError) as caught:
        bootstrap("cpu", store=store, progress=Silent(), environ={"PATH": "/nonexistent"})
    assert caught.value.message == ("mmdebstrap is not installed: the CPU base cannot be made from Debian packages")
    assert (caught.value.hint or "").startswith("apt-get install mmdebstrap debian-archive-keyring")


def test_mmdebstrap_fails(store: Store, tmp_path: Path) -> None:
    """Its last lines are in the error, its stages were notes, nothing is left."""
    environ = fake(tmp_path, 'echo "I: downloading packages with apt..." >&2; echo "E: no mirror" >&2; exit 25')
    notes = Notes()
    with pytest.raises(ImageError) as caught:
        bootstrap("cpu", store=store, progress=notes, environ=environ)
    assert caught.value.message == (
        "mmdebstrap failed with exit code 25:\nI: downloading packages with apt...\nE: no mirror"
    )
    assert notes.lines == ["bootstrap: downloading packages with apt..."]
    assert left_behind(store) == []


def test_mirrors_come_from_the_environment(store: Store, tmp_path: Path) -> None:
    """KITBUILD_DEBIAN_MIRROR is handed on; without it mmdebstrap's own default holds."""
    environ = fake(tmp_path, 'echo "E: ${@: -2}" >&2; exit 1')
    with pytest.raises(ImageError, match=r"raw\.tar m\.example/debian"):
        bootstrap(
            "cpu", store=store, progress=Silent(), environ=environ | {"KITBUILD_DEBIAN_MIRROR": "m.example/debian"}
        )
    with pytest.raises(ImageError, match=r"bookworm .*raw\.tar"):
        bootstrap("cpu", store=store, progress=Silent(), environ=environ)


def test_interrupt_leaves_nothing(store: Store, tmp_path: Path) -> None:
    """Ctrl-C stops mmdebstrap, which cleans up behind itself, and leaves no temporary file."""
    environ = fake(
        tmp_path,
        f'trap "touch {tmp_path}/cleaned; exit 1" TERM\necho "I: extracting" >&2\nfor i in {{1..300}}; do sleep 0.1; done',
    )
    program = (
        "import os, sys\nfrom kitbuild.base.bootstrap import bootstrap\nfrom kitbuild.progress import Silent\n"
        "from kitbuild.store import Store\n"
        "class Say(Silent):\n    def note(self, message): print(message, flush=True)\n"
        "bootstrap('cpu', store=Store.open(os.environ), progress=Say(), environ=os.environ)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env=environ | {"KITBUILD_HOME": str(store.root), "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "bootstrap: extracting\n"
    process.send_signal(signal.SIGINT)
    _out, error = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in error
    assert (tmp_path / "cleaned").exists()
    assert left_behind(store) == []


@pytest.mark.slow
def test_facts_of_the_real_base(debian_base: LockedBase) -> None:
    """Debian 12: Python, glibc, and every package with the digest of its archive."""
    assert debian_base.interpreter == "/usr/bin/python3.11"
    assert (debian_base.python[:5], debian_base.glibc) == ("3.11.", "2.36")
    assert debian_base.upstream is not None
    assert debian_base.upstream.name == "debian:bookworm"
    assert len(debian_base.packages) > 100
    assert [package.name for package in debian_base.packages if package.sha256 is None] == []
    assert {"g++", "libpython3-dev", "ca-certificates"} <= {package.name for package in debian_base.packages}


@pytest.mark.slow
def test_bootstrap_repeats(debian_base: LockedBase, tmp_path: Path) -> None:
    """Bootstrapped again into another store, under another umask, time zone and locale: the same base."""
    again = Store.open({"KITBUILD_HOME": str(tmp_path / "again")})
    environ = {**os.environ, "TZ": "Pacific/Chatham", "LC_ALL": "tr_TR.UTF-8", "PYTHONHASHSEED": "7"}
    old = os.umask(0o077)
    try:
        base = bootstrap("cpu", store=again, progress=Silent(), environ=environ)
    finally:
        os.umask(old)
    assert base == debian_base


@pytest.mark.slow
@pytest.mark.docker
def test_real_base_in_an_engine(
    debian_base: LockedBase, session_store: Store, store: Store, client: docker.DockerClient
) -> None:
    """Loaded, it compiles and imports with nothing but itself; taken back from the engine it is the same base."""
    tag = f"kitbuild-test/base-cpu:{time.time_ns()}"
    load_base(debian_base, client, store=session_store, tag=tag, progress=Silent())
    try:
        source = "printf '#include <Python.h>\\n#include <omp.h>\\nextern \"C\" int f() { return 42; }' > /tmp/f.cpp"
        compiled = "g++ -O2 -fopenmp -shared -fPIC -I/usr/include/python3.11 /tmp/f.cpp -o /tmp/f.so"
        called = "python3 -c 'import ctypes, ssl, sqlite3; print(ctypes.CDLL(\"/tmp/f.so\").f())'"
        output = client.containers.run(
            tag,
            ["sh", "-c", f"{source} && {compiled} && {called}"],
            user="10001:10001",
            read_only=True,
            network_mode="none",
            cap_drop=["ALL"],
            tmpfs={"/tmp": "exec"},  # noqa: S108 - inside the container
            remove=True,
        )
        assert output == b"42\n"
        image = find_image(client, tag)
        assert image is not None
        taken = import_base(client, image, name=debian_base.name, store=store, progress=Silent())
        assert taken == debian_base
        assert bases.held(store, taken)
    finally:
        client.images.remove(tag, force=True)
