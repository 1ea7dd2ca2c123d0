"""Step 5, where an archive's bytes are: a run directory, or a `.kit.tar` that is read in place.

A `.kit.tar` comes from a stranger. It must be an uncompressed tar, so nothing in it is larger than the file itself;
links, devices, sparse members, names outside the three known folders and repeated names are refused before a byte
of it is used. Reading writes nothing; `unpack` writes only checked names.
"""

from __future__ import annotations

import re
import stat
import tarfile
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Protocol, Self

from kitbuild.errors import Problem, UsageError, VerificationError

KIT_FORMAT = 2
KIT_FILE = "kit.json"
RUN_PREFIX = "run/"
BLOB_PREFIX = "blobs/sha256/"
REPEATS_PREFIX = "repeats/"
MEMBER_LIMIT = 200_000
DOCUMENT_LIMIT_BYTES = 1 << 28
_MAGIC_AT, _MAGIC = 257, b"ustar"  # https://www.gnu.org/software/tar/manual/html_node/Standard.html
_BLOB = re.compile(r"blobs/sha256/[0-9a-f]{64}")


class Stream:
    """A part of a file, read-only; `seek` counts from the part's start."""

    def __init__(self, stream: BinaryIO, start: int, size: int) -> None:
        self.size = size
        self._stream, self._start, self._at = stream, start, 0

    def read(self, size: int = -1) -> bytes:
        """Up to `size` bytes."""
        left = self.size - self._at
        self._stream.seek(self._start + self._at)
        data = self._stream.read(left if size < 0 else min(size, left))
        self._at += len(data)
        return data

    def seek(self, offset: int) -> int:
        """Go to an offset."""
        self._at = max(0, min(offset, self.size))
        return self._at

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self._stream.close()


class Source(Protocol):
    """Named files, read-only."""

    @property
    def path(self) -> Path:
        """What the user named."""
        ...

    def names(self) -> tuple[str, ...]:
        """Relative POSIX paths of all files, sorted."""
        ...

    def open(self, name: str) -> Stream:
        """A seekable stream; `FileNotFoundError` where there is none."""
        ...

    def below(self, folder: str) -> Source:
        """The files of a folder, as a source of their own."""
        ...


def read_document(source: Source, name: str) -> bytes | None:
    """A whole small file, or None where there is none."""
    try:
        with source.open(name) as stream:
            data = stream.read(DOCUMENT_LIMIT_BYTES + 1)
    except FileNotFoundError:
        return None
    if len(data) > DOCUMENT_LIMIT_BYTES:
        raise VerificationError(f"{source.path}: {name} is larger than {DOCUMENT_LIMIT_BYTES >> 20} MiB")
    return data


@dataclass(frozen=True, kw_only=True)
class RunDirectory:
    """A run directory. A symbolic link inside is not followed: an archive holds its own bytes."""

    path: Path

    def names(self) -> tuple[str, ...]:
        """Every regular file below."""
        found = (item for item in self.path.rglob("*") if stat.S_ISREG(item.lstat().st_mode))
        return tuple(sorted(item.relative_to(self.path).as_posix() for item in found))

    def below(self, folder: str) -> RunDirectory:
        """A folder of it."""
        return RunDirectory(path=self.path / folder)

    def links(self) -> tuple[str, ...]:
        """Symbolic links below, less checkpoints (several nodes share them by a link); `pack` refuses them."""
        found = (p.relative_to(self.path).as_posix() for p in self.path.rglob("*") if p.is_symlink())
        return tuple(sorted(name for name in found if name.partition("/")[0] != "checkpoints"))

    def open(self, name: str) -> Stream:
        """The file's stream."""
        target = self.path / name
        steps = (self.path.joinpath(*PurePosixPath(name).parts[: depth + 1]) for depth in range(name.count("/") + 1))
        if any(step.is_symlink() for step in steps):
            raise VerificationError(f"{target} is a symbolic link", hint="an archive holds its own files; copy it in")
        if not target.is_file():
            raise FileNotFoundError(target)
        return Stream(target.open("rb"), 0, target.stat().st_size)


@dataclass(frozen=True, kw_only=True)
class KitTar:
    """The members of a checked `.kit.tar` below `prefix`."""

    path: Path
    members: dict[str, tarfile.TarInfo] = field(repr=False)
    prefix: str = RUN_PREFIX

    @classmethod
    def read(cls, path: Path) -> KitTar:
        """Read and check the member list; what does not claim to be a tar is a wrong call, not a damaged archive."""
        if not _claims_to_be_tar(path):
            raise UsageError(
                f"{path} is neither a run directory nor a .kit.tar", hint="name a run directory (runs/…) or a .kit.tar"
            )
        members: dict[str, tarfile.TarInfo] = {}
        problems: list[Problem] = []
        try:
            with tarfile.open(path, "r:") as tar:
                for count, member in enumerate(tar):
                    if count >= MEMBER_LIMIT:
                        raise VerificationError(f"{path} has more than {MEMBER_LIMIT} members")
                    reason = _refused(member, members, path.stat().st_size)
                    if reason is not None:
                        problems.append(Problem(message=f"{member.name!r} {reason}", file=str(path)))
                    members[member.name] = member
        except (tarfile.TarError, EOFError, ValueError) as error:
            raise VerificationError(
                f"{path} is not a .kit.tar: {error}", hint="name a run directory, or a file that `archive pack` wrote"
            ) from error
        problems += [
            Problem(message=f"{name!r} lies below a file", file=str(path))
            for name in members
            if any(parent.as_posix() in members for parent in PurePosixPath(name).parents)
        ]
        if problems:
            raise VerificationError(
                f"{path} is not a safe archive: {problems[0].message}", problems=problems, hint="do not use it"
            )
        if KIT_FILE not in members:
            raise UsageError(
                f"{path} is not a .kit.tar: it has no {KIT_FILE}", hint="`kitbuild archive pack` makes one"
            )
        return cls(path=path, members=members)

    def names(self) -> tuple[str, ...]:
        """Files below the prefix, without it."""
        length = len(self.prefix)
        return tuple(sorted(name[length:] for name in self.members if name.startswith(self.prefix)))

    def below(self, folder: str) -> KitTar:
        """Members of a folder of it; problems name it by the path that it would have."""
        return KitTar(path=self.path, members=self.members, prefix=f"{self.prefix}{folder}/")

    def open(self, name: str) -> Stream:
        """A stream over the member's bytes, in place."""
        return self.open_member(self.prefix + name)

    def open_member(self, full_name: str) -> Stream:
        """The same by the whole name."""
        member = self.members.get(full_name)
        if member is None:
            raise FileNotFoundError(full_name)
        return Stream(self.path.open("rb"), member.offset_data, member.size)

    def blobs(self) -> tuple[str, ...]:
        """Digests of the blobs carried."""
        return tuple(sorted(name.removeprefix(BLOB_PREFIX) for name in self.members if name.startswith(BLOB_PREFIX)))


def open_source(path: Path) -> Source:
    """A run directory or a `.kit.tar`, by what it is."""
    if path.is_dir():
        return RunDirectory(path=path)
    if path.is_file():
        return KitTar.read(path)
    raise UsageError(f"{path} does not exist", hint="name a run directory (runs/…) or a .kit.tar")


def _claims_to_be_tar(path: Path) -> bool:
    """By name or by content."""
    if path.suffix == ".tar":
        return True
    with path.open("rb") as stream:
        stream.seek(_MAGIC_AT)
        return stream.read(len(_MAGIC)) == _MAGIC


def _refused(member: tarfile.TarInfo, seen: dict[str, tarfile.TarInfo], tar_bytes: int) -> str | None:
    """Why a member is refused, or None."""
    name = member.name
    if not member.isfile() or member.issparse():
        return "is not a regular file"
    if name in seen:
        return "is there twice"
    if name.startswith("/") or "\\" in name or "\0" in name or {"", ".", ".."} & set(name.split("/")):
        return "leads outside the archive"
    if name != KIT_FILE and not name.startswith(RUN_PREFIX) and not _BLOB.fullmatch(name):
        return "is in no known folder (run/, blobs/sha256/)"
    if member.size < 0 or member.offset_data + member.size > tar_bytes:
        return "is cut short"
    return None
