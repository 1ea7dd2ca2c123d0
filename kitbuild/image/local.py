"""Step 3 without an engine: the image's files as a directory, for `--engine local`.

Two directories, each made once: the virtual environment, which another recipe with the same wheels shares, and
the lock with its kernels, whose `opt/kit` points there. Model and data are not copied: a run adds them, baked or not.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kitbuild.errors import ImageError, Problem
from kitbuild.image.assemble import check_inputs, content_json, with_content
from kitbuild.image.content import GUEST, Listing, parts
from kitbuild.image.entries import Entry, Link, Reader, folders, merge
from kitbuild.image.layers import nodes
from kitbuild.image.wheels import PREFIX
from kitbuild.lock.files import LAYOUT
from kitbuild.lock.models import canonical
from kitbuild.store import sha256_file
from kitbuild.store.blobs import used

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from kitbuild.image.content import Part
    from kitbuild.image.entries import Node
    from kitbuild.image.pyc import Compiler
    from kitbuild.lock.models import Lock
    from kitbuild.progress import Progress
    from kitbuild.store import Store

RECORDS = "environments"
ENVIRONMENTS = "envs"


def materialise(
    lock: Lock,
    *,
    recipe: bytes,
    python: Path,
    store: Store,
    compiler: Compiler,
    progress: Progress,
    wheels: bool = True,
) -> Path:
    """The directory that stands for `/`; `python` becomes the environment's interpreter.

    Without `wheels` the packages are those that `python` has: only the guest, the kernels and the lock are laid out.
    """
    check_inputs(lock, recipe)
    if wheels:
        _check_python(python, lock.base.python)
    listed = parts(lock, recipe=recipe, store=store, baked=frozenset())
    shared = [part for part in listed if part.compiles]
    rest = [part for part in listed if not part.compiles]
    if not wheels:
        shared = [replace(part, compiles=False) for part in shared if part.name == GUEST]

    def make(chosen: Sequence[Part]) -> tuple[Node, ...]:
        made = nodes(chosen, lock.base.python, compiler, store, progress)
        return merge(_here(node, lock, python) for each in made for node in each)

    key = _key([[part.name, part.inputs, part.compiles] for part in shared], compiler.key, str(python))
    environment = _tree(key, store, progress, title="unpacking the wheels", make=lambda: make(shared))
    content = content_json((_facts(store, key), _listed(make(rest[:-1]))), rest[-1])
    return _tree(
        _key(key, lock.sha256, hashlib.sha256(content).hexdigest()),
        store,
        progress,
        title="laying out the kernels",
        make=lambda: [
            *make([*rest[:-1], with_content(rest[-1], content)]),
            Link(path=PREFIX, target=str(environment / PREFIX[1:])),
        ],
        of={"lock": lock.sha256, "environment": key},
    )


def damaged(store: Store, *, progress: Progress, repair: bool) -> tuple[Problem, ...]:
    """Environments that are not what was laid out; with `repair` they are removed, and made again when needed."""
    found = []
    folders = sorted((store.root / ENVIRONMENTS).glob("[!.]*"))
    with progress.activity("Verifying the environments", total=float(len(folders)), unit="folders") as advance:
        for folder in folders:
            wrong = _wrong(folder, store.record(RECORDS, folder.name) or {})
            if wrong is not None:
                hint = "removed; the next run makes it again" if repair else "run `kitbuild store verify --repair`"
                found.append(Problem(message=f"{wrong} is not what was laid out", file=str(folder), hint=hint))
                if repair:
                    _remove(folder, store)
            advance(1)
    return tuple(found)


def _remove(folder: Path, store: Store) -> None:
    """At once, so that nobody finds half of it, and whoever else repairs is not in the way."""
    with store.scratch() as scratch, contextlib.suppress(FileNotFoundError):
        folder.rename(scratch / folder.name)


def _wrong(folder: Path, record: Mapping[str, Mapping[str, str]]) -> str | None:
    """The first path that is not as recorded (without a record, nothing uses the folder)."""
    for name, target in record.get("links", {}).items():
        place = folder / name[1:]
        if not place.is_symlink() or str(place.readlink()) != target:
            return name
    for name, sha256 in record.get("files", {}).items():
        place = folder / name[1:]
        if not place.is_file() or sha256_file(place)[0] != sha256:
            return name
    return None


def find_python(locked: str, environ: Mapping[str, str]) -> Path:
    """A Python of the locked minor version on this machine, outside of any virtual environment."""
    minor = _minor(locked)
    for candidate in _candidates(minor, environ):
        try:
            found, real = _ask(candidate)
        except ImageError:
            continue
        if found == minor:
            return real
    raise ImageError(
        f"there is no Python {minor} on this machine, and the lock's packages are for it",
        hint=f"`uv python install {minor}`, or use a container engine",
    )


def _candidates(minor: str, environ: Mapping[str, str]) -> Iterator[Path]:
    yield Path(sys.executable)
    path = environ.get("PATH", os.defpath)
    if named := shutil.which(f"python{minor}", path=path):
        yield Path(named)
    if uv := shutil.which("uv", path=os.pathsep.join((str(Path(sys.executable).parent), path))):
        command = [uv, "python", "find", "--system", "--no-python-downloads", minor]
        done = subprocess.run(command, env=dict(environ), check=False, capture_output=True, text=True)
        if done.returncode == 0 and done.stdout.strip():
            yield Path(done.stdout.strip())


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _ask(python: Path) -> tuple[str, Path]:
    """Minor version, and the interpreter itself where `python` is a virtual environment's or a shim."""
    code = "import os, sys; print('%d.%d' % sys.version_info[:2], os.path.realpath(sys._base_executable))"
    try:
        done = subprocess.run([python, "-ISc", code], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ImageError(f"{python} is not a Python that runs: {error}") from error
    minor, _, real = done.stdout.strip().partition(" ")
    return minor, Path(real)


def _check_python(python: Path, locked: str) -> None:
    found, _real = _ask(python)
    minor = _minor(locked)
    if found != minor:
        raise ImageError(
            f"{python} is Python {found}, the lock's packages are for {minor}",
            hint=f"give a Python {minor} (`uv python install {minor}`), or use a container engine",
        )


def _here(node: Node, lock: Lock, python: Path) -> Node:
    """What names the base's interpreter names the host's instead."""
    if isinstance(node, Link) and node.target == lock.base.interpreter:
        return Link(path=node.path, target=str(python))
    if isinstance(node, Entry) and node.path == f"{PREFIX}/pyvenv.cfg":
        settings = f"home = {python.parent}\ninclude-system-site-packages = false\nversion = {lock.base.python}\n"
        return Entry.of(node.path, settings.encode(), owner="kitbuild")
    return node


def _key(*facts: object) -> str:
    return hashlib.sha256(canonical([LAYOUT, *facts])).hexdigest()


def _tree(
    key: str,
    store: Store,
    progress: Progress,
    *,
    title: str,
    make: Callable[[], Sequence[Node]],
    of: Mapping[str, str] | None = None,
) -> Path:
    """`envs/<key>` in the store, complete or not there; its content, and what it is of, are in a record."""
    target = store.root / ENVIRONMENTS / key
    if target.is_dir() and store.record(RECORDS, key) is not None:
        used(target)
        return target
    with store.making(f"environment {key}"), store.scratch() as scratch:
        if not (target.is_dir() and store.record(RECORDS, key) is not None):
            found = make()
            facts = _write(scratch / "tree", found, progress, title)
            store.write_record(RECORDS, key, {"files": facts.files, "links": facts.links, **(of or {})})
            target.parent.mkdir(exist_ok=True)
            if not target.is_dir():
                (scratch / "tree").replace(target)
    return target


def _facts(store: Store, key: str) -> Listing:
    record = store.record(RECORDS, key)
    return Listing(files=record["files"], links=record["links"])


def _listed(found: Iterable[Node]) -> Listing:
    known = tuple(found)
    return Listing(
        files={node.path: str(node.sha256) for node in known if isinstance(node, Entry)},
        links={node.path: node.target for node in known if isinstance(node, Link)},
    )


def _write(root: Path, found: Sequence[Node], progress: Progress, title: str) -> Listing:
    total = sum(node.size for node in found if isinstance(node, Entry))
    kept = [node for node in found if isinstance(node, Entry | Link)]
    for path in folders(kept):
        (root / path[1:]).mkdir(parents=True, exist_ok=True)
    with Reader() as reader, progress.activity(title, total=total, unit="bytes") as advance:
        for node in kept:
            place = root / node.path[1:]
            if isinstance(node, Link):
                place.symlink_to(node.target)
                continue
            with place.open("wb") as stream:
                for chunk in reader.chunks(node):
                    stream.write(chunk)
                    advance(len(chunk))
                os.fchmod(stream.fileno(), 0o755 if node.executable else 0o644)
    return _listed(kept)
