"""Step 5, repeats: further runs of the same recipe that an archive keeps below `repeats/`, without their weights.

They show how far equal runs stray where bits are not promised, and so what a run on another device may be held to.
Each is an archive of its own, with its own list of files; the archive that keeps them stays what it was.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from kitbuild.archive.read import Archive, check, read
from kitbuild.archive.seal import SEAL_FILE, WEIGHT_FOLDERS
from kitbuild.archive.source import REPEATS_PREFIX
from kitbuild.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kitbuild.archive.source import Source

CHUNK_BYTES = 1 << 20


def kept_repeats(archive: Archive) -> tuple[Archive, ...]:
    """Those that the archive keeps, by name; of a packed one, read in place."""
    names = {PurePosixPath(name).parts[1] for name in archive.source.names() if name.startswith(REPEATS_PREFIX)}
    return tuple(archive.repeat(name) for name in sorted(names))


def keep_repeats(archive: Archive, repeats: Iterable[Archive]) -> tuple[Path, ...]:
    """Copy each verified repeat into the archive's directory; one that is there already is left as it is."""
    if not archive.path.is_dir():
        raise UsageError(f"{archive.path} is not a run directory", hint="unpack it first, or name a run directory")
    made = []
    for repeat in repeats:
        check(repeat)
        target = archive.path / REPEATS_PREFIX / repeat.path.name.removesuffix(".kit.tar")
        if target.exists() and read(target).sha256 != repeat.sha256:
            raise UsageError(f"{target} is another run", hint="remove it, or rename the new one")
        if not target.exists():
            _copy(repeat, target)
        made.append(target)
    return tuple(made)


def _copy(repeat: Archive, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        for name in _names(repeat.source, repeat):
            place = part / name
            place.parent.mkdir(parents=True, exist_ok=True)
            with repeat.source.open(name) as stream, place.open("xb") as file:
                while chunk := stream.read(CHUNK_BYTES):
                    file.write(chunk)
        part.chmod(0o755)
        part.replace(target)
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(part)


def _names(source: Source, repeat: Archive) -> Iterable[str]:
    listed = {SEAL_FILE, *repeat.seal.files} if repeat.seal else None
    for name in source.names():
        kept = name in listed if listed is not None else "/" not in name or name.startswith("logs/")
        if kept and not name.startswith(WEIGHT_FOLDERS):
            yield name
