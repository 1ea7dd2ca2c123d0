"""recipe → lock: check without the network, resolve with it."""

from __future__ import annotations

import difflib
import json
import shutil
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kitbuild import recipe as recipes
from kitbuild.errors import LockError, RecipeError, UsageError
from kitbuild.flow.context import Context, Result
from kitbuild.lock.changes import changes
from kitbuild.lock.changes import lines as change_lines
from kitbuild.lock.files import check_current, lock_path, parse_lock, read_lock, write_lock
from kitbuild.lock.pins import names, package
from kitbuild.lock.pylock import check_name, given_pylock, pylock_text
from kitbuild.store import Store

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from kitbuild.lock.models import Lock
    from kitbuild.recipe import LoadedRecipe
    from kitbuild.recipe.memory import Memory


def check(path: Path, environ: Mapping[str, str], *, launch: bool = False) -> Result:
    """All that can be known of a recipe without the network: syntax, types, rules, advisories, the lock's state.

    `launch`: what Accelerate, DeepSpeed and FSDP would be told, too.
    """
    from kitbuild.base.targets import load_target  # noqa: PLC0415 - after the recipe is known to be one
    from kitbuild.lock import launcher  # noqa: PLC0415
    from kitbuild.lock.requirements import expected_versions, refuse_advisories  # noqa: PLC0415

    loaded = recipes.read(path)
    recipe = loaded.recipe
    refuse_missing(loaded)
    versions = expected_versions(recipe, load_target(recipe.image.target), given=given_pylock(loaded)[1])
    held, state, detail = _lock_state(loaded)
    met = refuse_advisories(recipe, versions=versions, model_config=model_config(loaded, held, environ))
    memory, needs = _memory(loaded, held, environ)
    notes = tuple(recipes.notes(loaded))
    model = recipe.model.repo or recipe.model.path or f"{(recipe.model.config or {}).get('model_type')} (random init)"
    fields = {
        "recipe": str(path),
        "name": recipe.name,
        "target": recipe.image.target,
        "lock": state,
        "memory": memory.as_json() if memory else None,
        "advisories": [{"id": item.id, "severity": item.severity, "summary": item.summary} for item in met],
        "notes": [note.as_json() for note in notes],
    }
    world = recipe.launch.world_size
    processes = f"{world} process" + ("es" if world > 1 else "")
    lines = [
        f"{path} is fine",
        f"  model    {model}, {recipe.model.dtype}",
        f"  target   {recipe.image.target}, attention {recipe.kernels.attention}",
        f"  batch    {recipe.batch.global_} = {recipe.batch.micro} micro × {recipe.accumulation} accumulated × {processes}",
        f"  memory   {needs}",
        f"  lock     {detail}",
        *(f"  {item.severity}: {item.summary}; {item.advice}" for item in met),
        *(f"  note: {note.key}: {note.message}" for note in notes),
    ]
    if launch:
        fields["launch"] = launcher.launch(recipe)
        lines.append(json.dumps(fields["launch"], indent=1, sort_keys=True))
    return Result(fields=fields, lines=tuple(lines))


def refuse_missing(loaded: LoadedRecipe) -> None:
    """Exit 2 with every local path that the recipe names and that is not there."""
    missing = tuple(recipes.missing_inputs(loaded))
    if missing:
        raise RecipeError(f"{loaded.path} names files that do not exist", problems=missing)


def _lock_state(loaded: LoadedRecipe) -> tuple[Lock | None, str, str]:
    lock = None
    try:
        lock = read_lock(loaded.path)
        if lock is None:
            return None, "missing", f"none yet; kitbuild lock {loaded.path} makes it"
        check_current(loaded, lock, by_size=True)
    except LockError as error:
        return lock, "stale", f"{error.message} ({error.hint})"
    return lock, "current", f"{lock_path(loaded.path).name}, current"


def _memory(loaded: LoadedRecipe, lock: Lock | None, environ: Mapping[str, str]) -> tuple[Memory | None, str]:
    """The estimate, and what is said of it."""
    from kitbuild.recipe.memory import estimate  # noqa: PLC0415 - after the recipe is known to be one

    config = model_config(loaded, lock, environ)
    if config is None:
        return None, "not known: the model's config.json is not here; it is once the recipe is locked"
    memory = estimate(loaded.recipe, config)
    if memory is None:
        return None, f"no estimate for {config.get('model_type', 'this kind of model')}: dense decoders only"
    return memory, memory.text(of="a process" if loaded.recipe.image.target == "cpu" else "a GPU")


def model_config(loaded: LoadedRecipe, lock: Lock | None, environ: Mapping[str, str]) -> Mapping[str, Any] | None:
    """config.json of the model: in the recipe, in its directory, or in the store as the lock names it."""
    model = loaded.recipe.model
    if model.config is not None:
        return model.config
    path = loaded.directory / model.path / "config.json" if model.path else None
    ours = lock is not None and lock.recipe.get("model") == model.model_dump(mode="json")
    if path is None and ours and lock is not None and lock.model.weights is not None:
        digests = {file.path: file.sha256 for file in lock.model.weights.files}
        path = Store.at(environ).path(digests["config.json"]) if "config.json" in digests else None
    try:
        found = json.loads(path.read_bytes()) if path else None
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def lock(
    context: Context,
    path: Path,
    *,
    only_check: bool,
    update: frozenset[str],
    upgrade: bool,
    diff: Path | None,
    pylock: Path | None = None,
) -> Result:
    """Resolve and write the lock. What an earlier lock fixed stays, but for what `update` names or on `upgrade`.

    With `pylock`, its wheels are written there too, for other tools.
    """
    loaded = recipes.read(path)
    if pylock is not None:
        check_name(pylock)
    old = None if diff is None else _read_old(diff)  # before it is replaced: it may be this very lock
    previous = _previous(loaded, strict=only_check)
    if previous is not None:
        _refuse_unknown(update, previous)
    if only_check:
        assert previous is not None, "strict reading raises where there is none"  # noqa: S101 - for us
        check_current(loaded, previous)
        found, changed = previous, False
    elif previous is not None and not update and not upgrade and _current(loaded, previous):
        found, changed = previous, False
    else:
        found = make_lock(context, loaded, previous=None if upgrade else previous, update=update)
        _, changed = write_lock(path, found)
    lines = [f"{lock_path(path)} {'written' if changed else 'is current'}, {found.sha256[:12]}"]
    fields: dict[str, Any] = {"lock_path": str(lock_path(path)), "lock_sha256": found.sha256, "changed": changed}
    if old is not None:
        moved = changes(old, found)
        fields["differences"] = [asdict(change) for change in moved]
        lines += change_lines(moved) or [f"no difference from {diff}"]
    if pylock is not None:
        _write_pylock(context, loaded, found, pylock)
        fields["pylock"] = str(pylock)
        lines.append(f"wrote {pylock}")
    return Result(fields=fields, lines=tuple(lines))


def _write_pylock(context: Context, loaded: LoadedRecipe, lock: Lock, path: Path) -> None:
    """What no index has (a wheel built here, one from a folder) is laid beside it."""
    from kitbuild.lock.uv import Sources  # noqa: PLC0415 - beside its one use
    from kitbuild.lock.wheel_places import addresses, locate_wheels  # noqa: PLC0415
    from kitbuild.store.download import fetch  # noqa: PLC0415

    store, environ, progress, indexes = context.store, context.environ, context.progress, loaded.recipe.image.indexes
    places = addresses(lock, indexes=indexes, store=store, environ=environ, progress=progress)
    here = [wheel for wheel in lock.wheels if wheel.sha256 not in places]
    missing = locate_wheels(here, lock=lock, indexes=indexes, store=store, environ=environ, progress=progress)
    fetch(store, missing, progress=progress, environ=Sources.read(indexes, environ).trusting)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for wheel in here:
            shutil.copyfile(store.require(wheel.sha256, name=wheel.file), path.with_name(wheel.file))
        text = pylock_text(lock, places | {wheel.sha256: wheel.file for wheel in here})
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror}", hint="name a file where you may write"
        ) from error


def _previous(loaded: LoadedRecipe, *, strict: bool) -> Lock | None:
    """The lock that is there; one that cannot be read is replaced, but is an error when it is to be checked."""
    try:
        found = read_lock(loaded.path)
    except LockError:
        if strict:
            raise
        return None
    if found is None and strict:
        raise LockError(f"{lock_path(loaded.path)} does not exist", hint=f"kitbuild lock {loaded.path}")
    return found


def _current(loaded: LoadedRecipe, lock: Lock) -> bool:
    try:
        check_current(loaded, lock)
    except LockError:
        return False
    return True


def make_lock(
    context: Context, loaded: LoadedRecipe, *, previous: Lock | None, update: frozenset[str] = frozenset()
) -> Lock:
    """Resolve with this context's effects."""
    refuse_missing(loaded)
    from kitbuild.lock.resolve import resolve  # noqa: PLC0415 - the only way into the network

    return resolve(
        loaded,
        store=context.store,
        environ=context.environ,
        progress=context.progress,
        client=context.client,
        previous=previous,
        update=update,
    )


def ensure_lock(context: Context, loaded: LoadedRecipe) -> Lock:
    """The current lock; written where there is none. A stale one is exit 3 and never replaced."""
    found = read_lock(loaded.path)
    if found is None:
        found = make_lock(context, loaded, previous=None)
        write_lock(loaded.path, found)
        context.progress.note(f"wrote {lock_path(loaded.path)}")
    check_current(loaded, found)
    return found


def _refuse_unknown(update: frozenset[str], lock: Lock) -> None:
    """A misspelt name would update nothing, silently."""
    known = names(lock)
    for name in sorted(update):
        if package(name) not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            raise UsageError(
                f"--update {name}: the lock names no such package or repository",
                hint=f"did you mean {near[0]}?"
                if near
                else "a package as the lock spells it, org/repository, or `base`",
            )


def _read_old(path: Path) -> Lock:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise LockError(f"{path} cannot be read: {error.strerror}", hint="--diff takes another lock file") from error
    return parse_lock(data, name=str(path))
