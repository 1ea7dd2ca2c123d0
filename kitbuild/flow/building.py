"""lock → image: fetch what is locked, assemble, load or write or push."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kitbuild import recipe as recipes
from kitbuild.errors import LockError, Problem, ResolveError, UsageError
from kitbuild.flow.context import Context, Result
from kitbuild.flow.locking import ensure_lock
from kitbuild.image import assemble, base_compiler, load, write_oci
from kitbuild.image.known import remember_image
from kitbuild.lock.closure import closure
from kitbuild.lock.fetch import fetch_locked
from kitbuild.lock.files import check_current, local_trees, lock_path, read_lock

if TYPE_CHECKING:
    from pathlib import Path

    from kitbuild.image import Image
    from kitbuild.lock.models import Lock
    from kitbuild.recipe import LoadedRecipe
    from kitbuild.store import Store


# https://github.com/distribution/reference: [host[:port]/]path[:tag]
_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
TAG = re.compile(rf"(?:[A-Za-z0-9.-]+(?::[0-9]+)?/)?{_PART}(?:/{_PART})*(?::\w[\w.-]{{0,127}})?")


@dataclass(frozen=True, kw_only=True)
class Built:
    """An image, where it went, and how long it took. `engine_id` is None where it was only written to a file."""

    lock: Lock
    image: Image
    engine_id: str | None
    reused: frozenset[str]
    seconds: float
    where: str

    def identity(self) -> dict[str, Any]:
        """What the archive says of the image."""
        return {
            "config_digest": self.image.config_digest,
            "manifest_digest": self.image.manifest_digest,
            "engine_id": self.engine_id,
        }

    def as_json(self) -> dict[str, Any]:
        """The fields of `kitbuild.image/1`."""
        return {
            "image_id": self.image.config_digest,
            "manifest_digest": self.image.manifest_digest,
            "engine_id": self.engine_id,
            "tag": self.image.tag,
            "content_sha256": self.image.content_sha256,
            "layers": [
                {
                    "name": layer.name,
                    "digest": layer.digest,
                    "size": layer.size,
                    "reused": layer.digest in self.reused,
                }
                for layer in self.image.layers
            ],
            "lock_sha256": self.lock.sha256,
            "seconds": round(self.seconds, 3),
        }

    def text(self) -> str:
        """A line of identity and a line a layer."""
        lines = [f"{self.image.tag}  {self.image.config_digest}  ({self.where}, {self.seconds:.1f} s)"]
        lines += [
            f"  {layer.name:<24} {layer.size / 1e6:9.1f} MB  {layer.digest[7:19]}"
            + ("  reused" if layer.digest in self.reused else "")
            for layer in self.image.layers
        ]
        return "\n".join(lines)


def image(context: Context, path: Path, *, tag: str | None, push: str | None, output: Path | None) -> Built:
    """`kitbuild image`: lock where there is none, fetch, assemble, then load, write or push."""
    started = time.monotonic()
    if tag is not None and not TAG.fullmatch(tag):
        raise UsageError(f"--tag {tag} is not an image name", hint="name:tag in lower case, such as team/qwen3:v1")
    loaded = recipes.read(path)
    locked = ensure_lock(context, loaded)
    fetch_all(context, locked, loaded)
    return build(context, locked, recipe=loaded.content, tag=tag, push=push, output=output, started=started)


def build(
    context: Context,
    lock: Lock,
    *,
    recipe: bytes,
    tag: str | None = None,
    push: str | None = None,
    output: Path | None = None,
    started: float | None = None,
) -> Built:
    """From a lock whose closure is in the store, and the recipe's bytes, to an image."""
    began = time.monotonic() if started is None else started
    compiler = base_compiler(lock.base, context.client, store=context.store, progress=context.progress)
    made = assemble(lock, recipe=recipe, store=context.store, compiler=compiler, progress=context.progress, tag=tag)
    engine_id: str | None = None
    reused: frozenset[str] = frozenset()
    where = []
    if output is not None:
        write_oci(made, output)
        where.append(f"written to {output}")
    else:
        loaded = load(made, context.client(), store=context.store, progress=context.progress)
        engine_id, reused = loaded.engine_id, frozenset(loaded.reused)
        where.append("in the engine")
    if push is not None:
        from kitbuild.base import registry  # noqa: PLC0415 - only a push needs it

        layers = [(layer.digest, layer.path) for layer in made.layers]
        registry.push(push, made.manifest, made.config, layers, environ=context.environ, progress=context.progress)
        where.append(f"pushed to {push}")
    remember_image(context.store, lock, made, engine_id=engine_id, pushed=push)
    return Built(
        lock=lock,
        image=made,
        engine_id=engine_id,
        reused=reused,
        seconds=time.monotonic() - began,
        where=", ".join(where),
    )


def fetch_all(context: Context, lock: Lock, loaded: LoadedRecipe, *, base: bool = True, wheels: bool = True) -> None:
    """Everything that the lock names, in the store; the recipe knows where local files and its own indexes are."""
    fetch_locked(
        lock,
        store=context.store,
        environ=context.environ,
        progress=context.progress,
        client=context.client,
        folder=loaded.directory,
        indexes=loaded.recipe.image.indexes,
        base=base,
        wheels=wheels,
    )


def fetch(
    context: Context, path: Path, *, bundle: Path | None, source: Path | None, inputs: Path | None = None
) -> Result:
    """`kitbuild fetch`: fill the store, from the network or from a bundle; write a bundle, or a directory of inputs."""
    from kitbuild.store.bundle import read_bundle, write_bundle  # noqa: PLC0415 - only with --bundle or --from

    if bundle is not None and source is not None:
        raise UsageError("--bundle and --from do not go together", hint="write on one machine, read on the other")
    loaded = recipes.read(path)
    if source is not None:
        read_bundle(source, context.store, progress=context.progress)
        check_carried(context, loaded, source)
    locked = ensure_lock(context, loaded)
    fetch_all(context, locked, loaded)
    blobs = sorted(closure(locked))
    size = sum(context.store.path(sha256).stat().st_size for sha256 in blobs)
    fields: dict[str, Any] = {"lock_sha256": locked.sha256, "blobs": len(blobs), "bytes": size}
    lines = [f"{len(blobs)} files, {size / 1e6:.0f} MB, are in the store"]
    if bundle is not None:
        try:
            write_bundle(context.store, blobs, bundle, progress=context.progress)
        except OSError as error:
            raise UsageError(
                f"{bundle} cannot be written: {error.strerror}",
                hint="name a file where there is room and you may write",
            ) from error
        fields["bundle"] = str(bundle)
        lines.append(f"wrote {bundle}")
    if inputs is not None:
        copy_inputs(locked, inputs, store=context.store)
        fields["inputs"] = str(inputs)
        lines.append(f"wrote {inputs}: mount it, or put it where the nodes see it")
    return Result(fields=fields, lines=tuple(lines))


def check_carried(context: Context, loaded: LoadedRecipe, source: Path) -> None:
    """Exit 3 without a lock, exit 4 where the store lacks what it names: nobody is asked where there is no network."""
    lock = read_lock(loaded.path)
    if lock is None:
        raise LockError(
            f"there is no {lock_path(loaded.path)}: a bundle has the files of a lock, not the lock",
            hint="carry it beside the recipe, from the machine that wrote the bundle",
        )
    check_current(loaded, lock)
    local = {file.sha256 for _key, tree in local_trees(lock) for file in tree.files}
    local |= {lock.model.chat_template.sha256} if lock.model.chat_template else set()
    absent = [name for sha256, name in closure(lock).items() if sha256 not in local and not context.store.has(sha256)]
    if absent:
        raise ResolveError(
            f"{source} lacks {len(absent)} of the lock's files, such as {absent[0]}",
            hint=f"it was written for another lock; write it again: kitbuild fetch {loaded.path} --bundle {source.name}",
            problems=[Problem(message=f"{name} is not in the store") for name in absent],
        )


def copy_inputs(lock: Lock, folder: Path, *, store: Store) -> None:
    """Model and data that the image does not hold, as a directory for machines that have no store; what is there stays.

    Real copies, readable by all: a container's user is another one. The guest verifies each byte.
    """
    import shutil  # noqa: PLC0415 - beside its one use

    from kitbuild.run.container import input_mounts  # noqa: PLC0415 - likewise

    for source, place in input_mounts(lock, store, baked=frozenset(lock.recipe["image"]["bake"])):
        target = folder / place.relative_to("/inputs")
        if target.exists():
            continue
        part = target.with_name(f".{target.name}.part")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.rmtree(part, ignore_errors=True)
                shutil.copytree(source, part)
            else:
                shutil.copy(source, part)
            part.rename(target)
        except (
            OSError
        ) as error:  # copytree's own holds a list: https://docs.python.org/3/library/shutil.html#shutil.Error
            reason = error.strerror or f"{len(error.args[0])} of its files could not be copied"
            raise UsageError(
                f"{target} cannot be written: {reason}", hint="name a folder where there is room"
            ) from error
