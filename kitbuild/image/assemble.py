"""Step 3: lock to image. No network and, where every module is compiled already, no engine.

parts of the lock → layers (each made once) → provenance → content.json → config → manifest
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from kitbuild.base.oci import write_archive
from kitbuild.errors import ImageError, LockError
from kitbuild.image.config import image_config, image_manifest, oci_annotations
from kitbuild.image.content import CONTENT, Listing, Part, parts
from kitbuild.image.entries import Entry
from kitbuild.image.layers import make_layers
from kitbuild.image.models import Base, Image, refuse_damaged
from kitbuild.image.provenance import PROVENANCE, provenance
from kitbuild.lock.files import check_maker
from kitbuild.store.blobs import replacing

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kitbuild.image.pyc import Compiler
    from kitbuild.lock.models import Lock
    from kitbuild.progress import Progress
    from kitbuild.store import Store


def assemble(
    lock: Lock,
    *,
    recipe: bytes,
    store: Store,
    compiler: Compiler,
    progress: Progress,
    tag: str | None = None,
) -> Image:
    """The image of a lock. The same lock gives the same config and manifest digests everywhere."""
    check_inputs(lock, recipe)
    base = Base.stored(lock.base, store)
    listed = parts(lock, recipe=recipe, store=store, baked=frozenset(lock.recipe["image"]["bake"]))
    made = make_layers(listed[:-1], python=lock.base.python, compiler=compiler, store=store, progress=progress)
    statement = Entry.of(PROVENANCE, provenance(lock, tuple(each.layer for each in made)), owner="kitbuild")
    told = with_entry(listed[-1], statement)
    content = content_json(made, told)
    last = make_layers(
        (with_content(told, content),), python=lock.base.python, compiler=compiler, store=store, progress=progress
    )
    own = tuple(each.layer for each in (*made, *last))
    content_sha256 = hashlib.sha256(content).hexdigest()
    config = image_config(lock, base, own, content_sha256=content_sha256)
    layers = (*base.layers, *own)
    return Image(
        config=config,
        manifest=image_manifest(config, layers, annotations=oci_annotations(lock)),
        layers=layers,
        tag=tag or default_tag(lock),
        content_sha256=content_sha256,
        lock_sha256=lock.sha256,
    )


def default_tag(lock: Lock) -> str:
    """`kitbuild/<name>:<12 hex of lock_sha256>`."""
    return f"kitbuild/{lock.name}:{lock.sha256[:12]}"


def write_oci(image: Image, path: Path) -> None:
    """An archive that `docker load` and tools for the OCI image layout read; complete or not there."""
    refuse_damaged(image.layers)
    try:
        with replacing(path) as stream:
            write_archive(
                stream,
                config=image.config,
                manifest=image.manifest,
                layers=[(layer.digest, layer.path) for layer in image.layers],
                tag=image.tag,
            )
    except OSError as error:
        raise ImageError(
            f"{path} cannot be written: {error.strerror}", hint="name a file where there is room and you may write"
        ) from error


def check_inputs(lock: Lock, recipe: bytes) -> None:
    """Exit 3 where another kitbuild wrote the lock or the recipe is not the locked one."""
    check_maker(lock)
    if hashlib.sha256(recipe).hexdigest() != lock.recipe_sha256:
        raise LockError("the recipe is not the one that was locked", hint="run `kitbuild lock RECIPE`")


def content_json(made: Sequence[Listing], last: Part) -> bytes:
    """`/kit/content.json`: every file that kitbuild adds, but this one."""
    files = {path: sha256 for each in made for path, sha256 in each.files.items()}
    links = {path: target for each in made for path, target in each.links.items()}
    files |= {node.path: str(node.sha256) for node in last.make()[1] if isinstance(node, Entry)}
    return json.dumps({"version": 1, "files": files, "links": links}, indent=0, sort_keys=True).encode() + b"\n"


def with_content(part: Part, content: bytes) -> Part:
    """The last layer, with content.json in it."""
    return with_entry(part, Entry.of(CONTENT, content, owner="kitbuild"))


def with_entry(part: Part, entry: Entry) -> Part:
    """A part with one more file."""
    sources, nodes = part.make()
    return Part(name=part.name, inputs=[part.inputs, entry.sha256], make=lambda: (sources, (*nodes, entry)))
