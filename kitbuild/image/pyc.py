"""Step 3: hash-based .pyc of every wheel, made by the base's own Python and kept in the store.

Importing the trainers without them takes 24 s instead of 6. `unchecked-hash` .pyc hold no time and are
never compared with their source, so they are bytes like any other: https://peps.python.org/pep-0552/
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kitbuild.image.entries import Entry, Reader, Stored
from kitbuild.lock.models import canonical

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kitbuild.progress import Progress
    from kitbuild.store import Store

DRIVER = Path(__file__).with_name("pyc_driver.py")
PYC = "pyc"


class Compiler(Protocol):
    """A Python that compiles."""

    @property
    def key(self) -> str:
        """Names the interpreter: equal keys give equal bytes."""

    def __call__(self, work: Path, *, advance: Callable[[int], None]) -> None:
        """Run `pyc_driver.py` over `work`; `advance` is told the index of each job that is done."""


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Files that are compiled together in one process; `key` names their content."""

    key: str
    name: str
    entries: tuple[Entry, ...]

    @property
    def python(self) -> tuple[Entry, ...]:
        """The modules among them, in order."""
        found = (e for e in self.entries if e.path.endswith(".py") and "/site-packages/" in e.path)
        return tuple(sorted(found, key=lambda entry: entry.path))


def compiled(
    groups: Sequence[Sources], *, compiler: Compiler, python: str, store: Store, progress: Progress
) -> dict[str, tuple[Entry, ...]]:
    """The .pyc of each group by its key; only what the store lacks is compiled."""
    keys = {group.key: _record_key(group.key, compiler.key) for group in groups}
    missing = [group for group in groups if not _usable(store, keys[group.key]) and group.python]
    if missing:
        with store.making("pyc"):
            missing = [group for group in missing if not _usable(store, keys[group.key])]
            _compile(missing, keys, compiler=compiler, store=store, progress=progress)
    tag = "cpython-" + "".join(python.split(".")[:2])
    return {group.key: _entries(store, keys[group.key], group.name, tag) if group.python else () for group in groups}


def _record_key(key: str, compiler_key: str) -> str:
    driver = hashlib.sha256(DRIVER.read_bytes()).hexdigest()
    return hashlib.sha256(canonical([key, compiler_key, driver])).hexdigest()


def _usable(store: Store, key: str) -> bool:
    record = store.record(PYC, key)
    return record is not None and store.has(record["blob"])


def _compile(
    groups: Sequence[Sources], keys: dict[str, str], *, compiler: Compiler, store: Store, progress: Progress
) -> None:
    if not groups:
        return
    total = sum(len(group.python) for group in groups)
    with store.scratch() as work, progress.activity("compiling Python modules", total=total, unit="files") as advance:
        _lay_out(work, groups)
        compiler(work, advance=lambda index: advance(len(groups[index].python)))
        for index, group in enumerate(groups):
            _keep(work / "out", index, store, keys[group.key], group)


def _lay_out(work: Path, groups: Iterable[Sources]) -> None:
    jobs: list[list[str]] = []
    with Reader() as reader:
        for index, group in enumerate(groups):
            folder = work / "src" / str(index)
            folder.mkdir(parents=True)
            for number, entry in enumerate(group.python):
                (folder / str(number)).write_bytes(reader.read(entry))
            jobs.append([entry.path for entry in group.python])
    (work / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
    (work / DRIVER.name).write_bytes(DRIVER.read_bytes())


def _keep(out: Path, index: int, store: Store, key: str, group: Sources) -> None:
    data = (out / f"{index}.bin").read_bytes()
    found: dict[str, list[int]] = json.loads((out / f"{index}.json").read_bytes())
    files = {
        path: {"offset": offset, "size": size, "sha256": hashlib.sha256(data[offset : offset + size]).hexdigest()}
        for path, (offset, size) in sorted(found.items())
    }
    blob = store.add_bytes(data, name=f"compiled modules of {group.name}")
    store.write_record(PYC, key, {"blob": blob, "files": files, "of": group.name, "source": group.key})


def _entries(store: Store, key: str, owner: str, tag: str) -> tuple[Entry, ...]:
    record = store.record(PYC, key)
    blob = store.path(record["blob"])
    return tuple(
        Entry(
            path=_cached(path, tag),
            size=fact["size"],
            source=Stored(file=blob, offset=fact["offset"]),
            owner=owner,
            sha256=fact["sha256"],
        )
        for path, fact in record["files"].items()
    )


def _cached(path: str, tag: str) -> str:
    folder, _, name = path.rpartition("/")
    return f"{folder}/__pycache__/{name.removesuffix('.py')}.{tag}.pyc"
