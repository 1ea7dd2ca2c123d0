"""Step 2: the declared defaults of the locked trainers, read from the source inside the locked wheels.

The guest compares them with what it finds in the image; `arguments` builds on them what is in force.
"""

from __future__ import annotations

import contextlib
import zipfile
from typing import TYPE_CHECKING, Any

from kitbuild.errors import ResolveError
from kitbuild.recipe.declared import declared_fields

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kitbuild.lock.models import LockedWheel
    from kitbuild.recipe.declared import DeclaredField
    from kitbuild.store import Store

# As the lock names them, where the class is written, and the wheels that hold it with its bases.
CLASSES = {
    "trl.SFTConfig": ("trl.trainer.sft_config.SFTConfig", ("trl", "transformers")),
    "peft.LoraConfig": ("peft.tuners.lora.config.LoraConfig", ("peft",)),
}
DECLARING = frozenset(package for _, packages in CLASSES.values() for package in packages)
"""The packages whose source is read."""


def read_defaults(wheels: Iterable[LockedWheel], store: Store) -> dict[str, dict[str, Any]]:
    """Class to field to default, for every class of `CLASSES` whose wheels are locked.

    A default that is no literal is its source text.
    """
    return {
        name: {key: field.default for key, field in fields.items()}
        for name, fields in read_fields(wheels, store).items()
    }


def read_fields(wheels: Iterable[LockedWheel], store: Store) -> dict[str, dict[str, DeclaredField]]:
    """As `read_defaults`, with types and whether a default is a literal."""
    locked = {wheel.name: wheel for wheel in wheels}
    found: dict[str, dict[str, DeclaredField]] = {}
    for name, (qualified, packages) in CLASSES.items():
        present = [locked[package] for package in packages if package in locked]
        if len(present) < len(packages):
            continue
        with contextlib.ExitStack() as stack:
            archives = {wheel.name: stack.enter_context(_open(wheel, store)) for wheel in present}
            try:
                found[name] = declared_fields(_reader(archives), qualified)
            except (LookupError, SyntaxError) as error:
                files = " and ".join(wheel.file for wheel in present)
                raise ResolveError(f"{name} cannot be read from {files}: {error}") from error
    return found


def _open(wheel: LockedWheel, store: Store) -> zipfile.ZipFile:
    path = store.require(wheel.sha256, name=wheel.file)
    try:
        return zipfile.ZipFile(path)
    except zipfile.BadZipFile as error:
        raise ResolveError(f"{wheel.file} is no wheel: {error}") from error


def _reader(archives: dict[str, zipfile.ZipFile]) -> Callable[[str], str | None]:
    def read(path: str) -> str | None:
        archive = archives.get(path.partition("/")[0])
        if archive is None:
            return None
        try:
            return archive.read(path).decode()
        except KeyError:
            return None

    return read
