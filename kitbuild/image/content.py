"""Step 3: which files each of kitbuild's layers holds, as a pure function of the lock and the store.

The order is by how rarely a layer changes: an engine with the classic store can keep a layer only while all
below it are the same.
"""

from __future__ import annotations

import concurrent.futures
import posixpath
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kitbuild.guest_files import guest_files, guest_sha256
from kitbuild.image import wheels
from kitbuild.image.compilers import WORKERS
from kitbuild.image.entries import Entry, Folder, Link, Node, Stored
from kitbuild.image.kernels import kernel_entries, kernel_refs
from kitbuild.image.pyc import Sources
from kitbuild.image.sbom import SBOM, sbom

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kitbuild.lock.models import Lock, LockedTree, LockedWheel
    from kitbuild.store import Store

CONTENT = "/kit/content.json"
GUEST = "guest"
LARGE_WHEEL_BYTES = 10_000_000
_TORCH = ("nvidia-", "cuda-", "torch", "triton")
WORLD_WRITABLE = 0o1777


@dataclass(frozen=True, kw_only=True)
class Listing:
    """What is in a layer: path to sha256 of files, path to target of links."""

    files: dict[str, str]
    links: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Part:
    """What becomes a layer. `inputs` decide its bytes together with the compiler; `make` lists them when needed.

    `make` gives the sources that are to be compiled, and nodes besides.
    """

    name: str
    inputs: Any
    make: Callable[[], tuple[tuple[Sources, ...], tuple[Node, ...]]]
    compiles: bool = False


def parts(lock: Lock, *, recipe: bytes, store: Store, baked: frozenset[str]) -> tuple[Part, ...]:
    """All layers, lowest first; those with nothing in them are left out."""
    found = [*_wheel_parts(lock, store)]
    if "model" in baked:
        found.append(_input_part("model", _model_inputs(lock), store))
    if "dataset" in baked:
        found.append(_input_part("dataset", _data_inputs(lock), store))
    found.append(_guest_part(lock))
    if lock.kernels:
        files = [[k.repo, k.commit, f.path, f.sha256] for k in lock.kernels for f in k.files]
        files += [list(ref) for ref in sorted(kernel_refs(lock).items())]
        found.append(Part(name="kernels", inputs=files, make=lambda: ((), kernel_entries(lock, store))))
    found.append(_lock_part(lock, recipe))
    return tuple(found)


def _wheel_parts(lock: Lock, store: Store) -> Iterator[Part]:
    groups: dict[str, list[LockedWheel]] = {"wheels-torch": [], "wheels-large": [], "wheels": []}
    for wheel in sorted(lock.wheels, key=lambda wheel: (wheel.name, wheel.file)):
        groups[_group(wheel)].append(wheel)
    for name, group in groups.items():
        if group:
            inputs = {"python": lock.base.python, "wheels": [[wheel.file, wheel.sha256] for wheel in group]}
            make = partial(_wheels, tuple(group), lock.base.python, store)
            yield Part(name=name, inputs=inputs, make=make, compiles=True)


def _group(wheel: LockedWheel) -> str:
    if wheel.name.startswith(_TORCH) and not wheel.name.startswith(("torchvision", "torchaudio", "torchao")):
        return "wheels-torch"
    return "wheels-large" if wheel.size >= LARGE_WHEEL_BYTES else "wheels"


def _wheels(group: tuple[LockedWheel, ...], python: str, store: Store) -> tuple[tuple[Sources, ...], tuple[Node, ...]]:
    def plan(wheel: LockedWheel) -> Sources:
        path = store.require(wheel.sha256, name=wheel.file)
        return Sources(key=wheel.sha256, name=wheel.file, entries=wheels.plan(wheel, path, python=python))

    # Each is hashed first, which leaves the interpreter lock.
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        return tuple(pool.map(plan, group)), ()


def _guest_part(lock: Lock) -> Part:
    base = {"python": lock.base.python, "interpreter": lock.base.interpreter}
    inputs = {"guest": guest_sha256(), "console": wheels.script("a", "b").decode(), **base}
    return Part(name=GUEST, inputs=inputs, make=partial(_guest, lock), compiles=True)


def _guest(lock: Lock) -> tuple[tuple[Sources, ...], tuple[Node, ...]]:
    packages = wheels.site_packages(lock.base.python)
    entries = [Entry.of(f"{packages}/{name}", content, owner="kitbuild") for name, content in guest_files()]
    return (Sources(key=guest_sha256(), name="kitbuild", entries=tuple(entries)),), _environment(lock)


def _environment(lock: Lock) -> tuple[Node, ...]:
    """The virtual environment itself, and the places that a run writes to."""
    home = posixpath.dirname(lock.base.interpreter)
    settings = f"home = {home}\ninclude-system-site-packages = false\nversion = {lock.base.python}\n"
    minor = ".".join(lock.base.python.split(".")[:2])
    return (
        Entry.of(f"{wheels.PREFIX}/pyvenv.cfg", settings.encode(), owner="kitbuild"),
        Entry.of(
            f"{wheels.PREFIX}/bin/kit",
            wheels.script("kitbuild.guest.entry", "main"),
            owner="kitbuild",
            executable=True,
        ),
        Link(path=f"{wheels.PREFIX}/bin/python", target=lock.base.interpreter),
        Link(path=f"{wheels.PREFIX}/bin/python3", target=lock.base.interpreter),
        Link(path=f"{wheels.PREFIX}/bin/python{minor}", target=lock.base.interpreter),
        Folder(path="/cache", mode=WORLD_WRITABLE),
        Folder(path="/out", mode=WORLD_WRITABLE),
        Folder(path="/inputs", mode=0o755),
    )


def _lock_part(lock: Lock, recipe: bytes) -> Part:
    return Part(name="lock", inputs=[lock.sha256, lock.recipe_sha256], make=partial(_lock, lock, recipe))


def _lock(lock: Lock, recipe: bytes) -> tuple[tuple[Sources, ...], tuple[Node, ...]]:
    return (), (
        Entry.of("/kit/lock.json", lock.to_bytes(), owner="kitbuild"),
        Entry.of("/kit/recipe.yaml", recipe, owner="kitbuild"),
        Entry.of(SBOM, sbom(lock), owner="kitbuild"),
    )


def _model_inputs(lock: Lock) -> Iterator[tuple[str, str, int, str]]:
    model = lock.model
    for place, tree in (("model", model.weights), ("tokenizer", model.tokenizer)):
        yield from _tree(f"/inputs/{place}", tree)
    if model.chat_template is not None:
        yield "/inputs/chat_template.jinja", model.chat_template.sha256, model.chat_template.size, "the chat template"


def _data_inputs(lock: Lock) -> Iterator[tuple[str, str, int, str]]:
    for index, data in enumerate(lock.datasets):
        yield from _tree(f"/inputs/data/{index}", data.tree)
    yield from _tree("/inputs/evaluate", lock.evaluate.tree if lock.evaluate else None)


def _tree(root: str, tree: LockedTree | None) -> Iterator[tuple[str, str, int, str]]:
    for file in tree.files if tree else ():
        yield f"{root}/{file.path}", file.sha256, file.size, f"{tree.repo or tree.path}" if tree else ""


def _input_part(name: str, files: Iterator[tuple[str, str, int, str]], store: Store) -> Part:
    listed = sorted(files)

    def make() -> tuple[tuple[Sources, ...], tuple[Node, ...]]:
        nodes = tuple(
            Entry(
                path=path,
                size=size,
                source=Stored(file=Path(store.require(sha256, name=f"{owner} {path}"))),
                owner=owner,
                sha256=sha256,
            )
            for path, sha256, size, owner in listed
        )
        return (), nodes

    return Part(name=name, inputs=[list(file) for file in listed], make=make)
