"""Step 3: a part becomes a layer, once. A record in the store says which tar the same inputs gave before."""

from __future__ import annotations

import concurrent.futures
import hashlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kitbuild.errors import ImageError
from kitbuild.image.compilers import WORKERS
from kitbuild.image.content import Listing
from kitbuild.image.entries import Entry, Node, merge
from kitbuild.image.models import Layer
from kitbuild.image.pyc import Compiler, Sources, compiled
from kitbuild.image.tars import write_tar
from kitbuild.lock.files import LAYOUT
from kitbuild.lock.models import canonical

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kitbuild.image.content import Part
    from kitbuild.progress import Progress
    from kitbuild.store import Store

LAYERS = "layers"


@dataclass(frozen=True, kw_only=True)
class Made(Listing):
    """A layer and what is in it."""

    layer: Layer


def make_layers(
    parts: Sequence[Part], *, python: str, compiler: Compiler, store: Store, progress: Progress
) -> tuple[Made, ...]:
    """Every part's layer; only those with new inputs are written."""
    keys = [layer_key(part, compiler.key) for part in parts]
    found = [_find(store, key, part.name) for key, part in zip(keys, parts, strict=True)]
    missing = [(key, part) for key, part, made in zip(keys, parts, found, strict=True) if made is None]
    if missing:
        with store.making("layers"):
            found_nodes = nodes([part for _key, part in missing], python, compiler, store, progress)
            listed = [(key, part.name, each) for (key, part), each in zip(missing, found_nodes, strict=True)]
            _write_all(listed, store=store, progress=progress)
        found = [_find(store, key, part.name) for key, part in zip(keys, parts, strict=True)]
    made = tuple(each for each in found if each is not None)
    _refuse_clashes(parts, made)
    return made


def nodes(
    parts: Sequence[Part], python: str, compiler: Compiler, store: Store, progress: Progress
) -> tuple[tuple[Node, ...], ...]:
    """Each part's files with their .pyc, merged; all are compiled together, to keep the workers busy."""
    made = [part.make() for part in parts]
    sources = [group for part, (own, _others) in zip(parts, made, strict=True) if part.compiles for group in own]
    pyc = compiled(sources, compiler=compiler, python=python, store=store, progress=progress)
    return tuple(merge((*_with_pyc(own, pyc), *others)) for own, others in made)


def _with_pyc(groups: Sequence[Sources], pyc: dict[str, tuple[Entry, ...]]) -> Iterator[Entry]:
    """A module that two wheels share has one .pyc, the first's: their bytes may differ with what came before."""
    seen: set[str] = set()
    for group in groups:
        yield from group.entries
        for entry in pyc.get(group.key, ()):
            if entry.path not in seen:
                seen.add(entry.path)
                yield entry


def layer_key(part: Part, compiler_key: str) -> str:
    """Names the layer that a part becomes: equal keys, equal bytes."""
    facts = [LAYOUT, part.name, part.inputs, compiler_key if part.compiles else None]
    return hashlib.sha256(canonical(facts)).hexdigest()


def _find(store: Store, key: str, name: str) -> Made | None:
    record = store.record(LAYERS, key)
    if record is None or not store.has(record["sha256"]):
        return None
    layer = Layer(
        name=name, digest=f"sha256:{record['sha256']}", size=record["size"], path=store.path(record["sha256"])
    )
    return Made(layer=layer, files=record["files"], links=record["links"])


def _write_all(listed: Sequence[tuple[str, str, tuple[Node, ...]]], *, store: Store, progress: Progress) -> None:
    total = sum(node.size for _key_, _name, found in listed for node in found if isinstance(node, Entry))
    names = ", ".join(name for _key_, name, _found in listed)
    with (
        progress.activity(f"writing layers ({names})", total=total, unit="bytes") as advance,
        # Inflating and hashing release the interpreter lock.
        concurrent.futures.ThreadPoolExecutor(WORKERS) as pool,
    ):
        stop = threading.Event()

        def step(amount: float) -> None:
            if stop.is_set():
                raise concurrent.futures.CancelledError
            advance(amount)

        jobs = [pool.submit(_write, key, name, found, store, step) for key, name, found in listed]
        try:
            for job in jobs:
                job.result()
        except BaseException:
            stop.set()  # a failure or Ctrl-C does not wait for gigabytes
            raise


def _write(key: str, name: str, found: tuple[Node, ...], store: Store, advance: Callable[[float], None]) -> None:
    with store.scratch() as folder:
        part = folder / "layer.tar"
        with part.open("wb") as stream:
            written = write_tar(stream, found, advance=advance)
        store.adopt(part, sha256=written.sha256, name=f"layer {name}")
    record: dict[str, Any] = {
        "sha256": written.sha256,
        "size": written.size,
        "files": written.files,
        "links": written.links,
        "name": name,
    }
    store.write_record(LAYERS, key, record)


def _refuse_clashes(parts: Sequence[Part], made: Sequence[Made]) -> None:
    """Layers are cached one by one: the same path in two of them must hold the same content."""
    seen: dict[str, str] = {}
    for each in made:
        for path, sha256 in each.files.items():
            if seen.setdefault(path, sha256) != sha256 and "/__pycache__/" not in path:
                merge(entry for part in parts if part.compiles for source in part.make()[0] for entry in source.entries)
                raise ImageError(f"two layers bring {path}, with different content")
