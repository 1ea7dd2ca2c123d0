"""What this machine has, what the store holds, which package sets are tested."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Any

from kitbuild import __version__
from kitbuild.base.targets import load_known, load_target, target_names
from kitbuild.errors import KitbuildError, UsageError, VerificationError
from kitbuild.flow.context import Context, Result
from kitbuild.store.gc import gc, verify

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30
ROOM_BYTES = 15 * GIB
"""What one image needs at once: wheels, layers, and the engine's copy."""


def doctor(context: Context) -> Result:
    """What kitbuild finds here, and what to do about what is missing; never an error by itself."""
    checks: list[dict[str, Any]] = [
        {"name": "kitbuild", "ok": True, "text": f"{__version__} on Python {sys.version.split()[0]}"},
        _engine(context),
        _room(context.store.root),
        {
            "name": "mmdebstrap",
            "ok": shutil.which("mmdebstrap") is not None,
            "text": "makes the CPU base (Debian, Ubuntu: apt-get install mmdebstrap)",
        },
        {
            "name": "nvidia",
            "ok": shutil.which("nvidia-smi") is not None,
            "text": "a GPU driver; only the cuda targets need it",
        },
    ]
    lines = tuple(f"{'ok     ' if item['ok'] else 'missing'}  {item['name']:<11} {item['text']}" for item in checks)
    return Result(fields={"checks": checks}, lines=lines)


def _engine(context: Context) -> dict[str, Any]:
    try:
        version = context.client().version()
    except KitbuildError as error:
        return {"name": "engine", "ok": False, "text": f"{error.message}; {error.hint}"}
    return {"name": "engine", "ok": True, "text": f"{version.get('Version')} answers"}


def _room(root: Path) -> dict[str, Any]:
    free = shutil.disk_usage(root).free
    return {"name": "store", "ok": free >= ROOM_BYTES, "text": f"{root}, {free / GIB:.0f} GiB free"}


def stack() -> Result:
    """The tested package set of each target, what each version is known to work with, and why it was taken."""
    sets = [load_target(name) for name in target_names()]
    known = load_known()
    lines = [f"{target.target:<9}Python {target.python}, base {target.base}" for target in sets]
    users: dict[tuple[str, str], list[str]] = {(name, version): [] for name, held in known.items() for version in held}
    for target in sets:
        for name, version in target.packages.items():
            users.setdefault((_plain(name), version), []).append(target.target)
        for feature, extra in target.extras.items():
            for name, version in extra.items():
                users.setdefault((_plain(name), version), []).append(f"{target.target} for {feature}")
    for (name, version), places in users.items():
        lines.append(f"{name} {version}  ({', '.join(places) or 'for image.packages: no target installs it'})")
        about = known[name][version]
        needs = ", ".join(f"{other} {wanted}" for other, wanted in about.with_.items())
        lines += [f"  with  {needs}"] if needs else []
        lines += [f"  why   {about.why}"]
    fields = {
        "targets": [target.model_dump(mode="json") for target in sets],
        "known": {
            name: {version: item.model_dump(mode="json", by_alias=True) for version, item in held.items()}
            for name, held in known.items()
        },
    }
    return Result(fields=fields, lines=tuple(lines))


def _plain(name: str) -> str:
    return name.replace("_", "-")


def store_verify(context: Context, *, repair: bool) -> Result:
    """Hash every blob, and what local runs start from; exit 7 where one is not what it should be."""
    from kitbuild.image.local import damaged  # noqa: PLC0415 - beside its one use

    problems = verify(context.store, progress=context.progress, repair=repair)
    problems += damaged(context.store, progress=context.progress, repair=repair)
    if problems:
        raise VerificationError(f"{len(problems)} files in the store are damaged", problems=problems)
    return Result(fields={"damaged": 0}, lines=("every file in the store is what its name says",))


def store_gc(context: Context, folders: tuple[Path, ...]) -> Result:
    """Drop what no lock below `folders` names: downloads, layers, environments. What is younger than a day stays."""
    from kitbuild.image.kept import drop_dead_records, drop_environments, made_for, named_bases  # noqa: PLC0415
    from kitbuild.lock.closure import closure  # noqa: PLC0415
    from kitbuild.lock.files import parse_lock  # noqa: PLC0415

    for folder in folders:
        if not folder.is_dir():
            raise UsageError(
                f"{folder} is not a folder", hint="nothing was removed; name the folders that hold your locks"
            )
    # x.lock.json beside a recipe, lock.json in a run; package-lock.json is somebody else's.
    locks = [path for folder in folders for path in sorted(folder.rglob("*lock.json")) if _is_lock(path.name)]
    kept = [parse_lock(path.read_bytes(), name=str(path)) for path in locks]
    store = context.store
    needed = made_for(kept, store) | named_bases(store)
    for lock in kept:
        needed |= closure(lock).keys()
    freed = gc(store, needed)
    environments = drop_environments(store, {lock.sha256 for lock in kept})
    drop_dead_records(store)
    fields = {
        "locks": len(locks),
        "blobs": freed.blobs,
        "bytes": freed.bytes + environments.bytes,
        "trees": freed.trees,
        "environments": environments.trees,
    }
    freed_of = f"{freed.blobs} files and {environments.trees} environments, {fields['bytes'] / 1e6:.0f} MB freed"
    return Result(fields=fields, lines=(f"{len(locks)} locks kept; {freed_of}",))


def _is_lock(name: str) -> bool:
    return name == "lock.json" or name.endswith(".lock.json")
