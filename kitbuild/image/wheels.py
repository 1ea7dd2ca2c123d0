"""Step 3: what a locked wheel puts where. The wheel format is `installer`'s; nothing is unpacked here.

`installer` reads a wheel and tells a destination what to write; ours only notes it, so a plan costs
milliseconds and the bytes are read once, when a layer is written and checked.
https://packaging.python.org/en/latest/specifications/binary-distribution-format/
"""

from __future__ import annotations

import base64
import configparser
import hashlib
import posixpath
import stat
import zipfile
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, BinaryIO, cast

import installer
from installer.destinations import WheelDestination
from installer.exceptions import InstallerError
from installer.records import Hash, RecordEntry, parse_record_file
from installer.sources import WheelFile
from installer.utils import construct_record_file

from kitbuild.errors import ImageError, VerificationError
from kitbuild.image.entries import Entry, Member
from kitbuild.store import sha256_file

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from installer.scripts import ScriptSection
    from installer.sources import WheelContentElement
    from installer.utils import Scheme

    from kitbuild.lock.models import LockedWheel

PREFIX = "/opt/kit"
PYTHON = f"{PREFIX}/bin/python"
# Written by whoever installs, or about signatures of the archive itself.
_NOT_INSTALLED = ("INSTALLER", "REQUESTED", "direct_url.json", "RECORD.jws", "RECORD.p7s")
_SCRIPT = """#!{python}
import sys
from {module} import {name}
if __name__ == "__main__":
    sys.exit({call}())
"""


def site_packages(python: str) -> str:
    """Where packages live, for a Python version such as 3.11.2."""
    return f"{PREFIX}/lib/python{'.'.join(python.split('.')[:2])}/site-packages"


def script(module: str, attribute: str) -> bytes:
    """A console script. Its text is ours: another `installer` must not change an image."""
    name = attribute.partition(".")[0]
    return _SCRIPT.format(python=PYTHON, module=module, name=name, call=attribute).encode()


def plan(wheel: LockedWheel, path: Path, *, python: str) -> tuple[Entry, ...]:
    """Every file of one wheel, RECORD rewritten, after checking the archive against the lock."""
    sha256, _size = sha256_file(path)
    if sha256 != wheel.sha256:
        raise VerificationError(f"{wheel.file}: sha256 is {sha256}, locked {wheel.sha256}", hint="run `kitbuild fetch`")
    destination = _Plan(wheel.file, path, python=python, name=wheel.name)
    try:
        with zipfile.ZipFile(path) as archive:
            archive.filename = wheel.file  # the store names it by digest; `installer` reads the name
            source = _Source(archive, destination)
            installer.install(source, destination, {"INSTALLER": b"kitbuild\n"})
    except (InstallerError, ValueError, KeyError, AssertionError, configparser.Error, zipfile.BadZipFile) as error:
        raise ImageError(f"{wheel.file} is not a wheel that can be installed: {error}") from error
    return tuple(sorted(destination.entries, key=lambda entry: entry.path))


class _Source(WheelFile):
    """The members of a wheel, refusing what no wheel may hold."""

    def __init__(self, archive: zipfile.ZipFile, destination: _Plan) -> None:
        super().__init__(archive)
        self._archive = archive
        self._items = tuple(_checked(archive.infolist()))
        self._destination = destination

    def get_contents(self) -> Iterator[WheelContentElement]:
        rows = {row[0]: row for row in parse_record_file(self.read_dist_info("RECORD").splitlines())}
        dropped = {f"{self.dist_info_dir}/{name}" for name in _NOT_INSTALLED}
        for item in self._items:
            if item.is_dir() or item.filename in dropped or "__pycache__" in item.filename.split("/"):
                continue
            mode = item.external_attr >> 16
            self._destination.member = item
            row = rows.get(item.filename, (item.filename, "", ""))
            with self._archive.open(item) as stream:
                self._destination.recorded = RecordEntry.from_elements(*row).hash_
                yield row, cast("BinaryIO", stream), bool(stat.S_ISREG(mode) and mode & 0o111)


def _checked(items: Iterable[zipfile.ZipInfo]) -> Iterator[zipfile.ZipInfo]:
    seen: set[str] = set()
    for item in items:
        name = item.filename
        if name.startswith("/") or "\\" in name or ".." in name.split("/") or not name.isprintable():
            raise ValueError(f"member {name!r} points outside of it")
        if stat.S_ISLNK(item.external_attr >> 16):
            raise ValueError(f"member {name} is a symbolic link")
        if name in seen:
            raise ValueError(f"member {name} is there twice")
        seen.add(name)
        yield item


class _Plan(WheelDestination):
    """Notes what `installer` would write."""

    def __init__(self, file: str, archive: Path, *, python: str, name: str) -> None:
        packages = site_packages(python)
        minor = PurePosixPath(packages).parent.name
        self._roots = {
            "purelib": packages,
            "platlib": packages,
            "scripts": f"{PREFIX}/bin",
            "data": PREFIX,
            "headers": f"{PREFIX}/include/site/{minor}/{name}",
        }
        self._file, self._archive, self._packages = file, archive, packages
        self.member: zipfile.ZipInfo | None = None
        self.recorded: Hash | None = None
        self.entries: list[Entry] = []

    def write_script(self, name: str, module: str, attr: str, section: ScriptSection) -> RecordEntry:  # noqa: ARG002 - gui scripts are scripts here
        return self._data("scripts", name, script(module, attr), executable=True)

    def write_file(
        self,
        scheme: Scheme,
        path: str | os.PathLike[str],
        stream: BinaryIO,
        is_executable: bool,  # noqa: FBT001 - the name and place are the base class's
    ) -> RecordEntry:
        relative = str(path)
        if scheme == "scripts":
            return self._data(scheme, relative, _own_shebang(stream.read()), executable=True)
        item = self.member
        if item is None or not hasattr(stream, "name") or stream.name != item.filename:
            return self._data(scheme, relative, stream.read(), executable=is_executable)
        sha256 = _hex(self.recorded) or hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]
        self.entries.append(
            Entry(
                path=self._path(scheme, relative),
                size=item.file_size,
                source=Member(archive=self._archive, name=item.filename),
                owner=self._file,
                sha256=sha256,
                executable=is_executable,
            )
        )
        return _record(relative, sha256, item.file_size)

    def finalize_installation(
        self, scheme: Scheme, record_file_path: str, records: Iterable[tuple[Scheme, RecordEntry]]
    ) -> None:
        def prefix(of: Scheme) -> str | None:
            root = self._roots[of]
            return None if root == self._packages else posixpath.relpath(root, self._packages) + "/"

        with construct_record_file(list(records), prefix) as stream:
            self._data(scheme, record_file_path, stream.read(), executable=False)

    def _data(self, scheme: str, relative: str, content: bytes, *, executable: bool) -> RecordEntry:
        path = self._path(scheme, relative)
        entry = Entry.of(path, content, owner=self._file, executable=executable)
        self.entries.append(entry)
        return _record(relative, hashlib.sha256(content).hexdigest(), len(content))

    def _path(self, scheme: str, relative: str) -> str:
        root = self._roots[scheme]
        path = posixpath.normpath(f"{root}/{relative}")
        if not path.startswith(f"{root}/"):
            raise ValueError(f"{relative} points outside of {root}")
        return path


def _own_shebang(content: bytes) -> bytes:
    first, newline, rest = content.partition(b"\n")
    return f"#!{PYTHON}\n".encode() + rest if first.startswith(b"#!python") and newline else content


def _hex(recorded: Hash | None) -> str | None:
    if recorded is None or recorded.name != "sha256":
        return None
    return base64.urlsafe_b64decode(recorded.value + "=" * (-len(recorded.value) % 4)).hex()


def _record(relative: str, sha256: str, size: int) -> RecordEntry:
    value = base64.urlsafe_b64encode(bytes.fromhex(sha256)).decode().rstrip("=")
    return RecordEntry(relative, Hash("sha256", value), size)
