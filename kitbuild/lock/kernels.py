"""Hub kernels, resolved for the target: commit, build variant, files, dependencies, trust.

Part of step 2. Which variant fits: `kernel_variants`; what would go wrong later: `kernel_checks`.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kitbuild.errors import Problem, ResolveError
from kitbuild.lock.kernel_checks import complaints
from kitbuild.lock.kernel_metadata import METADATA, SIGNATURE, check_digest, check_signature, parse_metadata
from kitbuild.lock.kernel_variants import choose_variant
from kitbuild.lock.models import LockedKernel, LockedWheel, Moved

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kitbuild.lock.hub import Hub, HubFile, Snapshot
    from kitbuild.lock.kernel_metadata import Metadata
    from kitbuild.lock.kernel_variants import System
    from kitbuild.progress import Progress
    from kitbuild.recipe.models import Recipe
    from kitbuild.store import Store

MAX_REDIRECTS = 5


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """One reference to resolve, and who asked for it; `above` are the kernels that need it, outermost first."""

    role: str
    repo: str
    revision: str
    member: str | None
    layers: Mapping[str, str]
    asked_by: str
    above: tuple[str, ...] = ()


def wanted_kernels(recipe: Recipe) -> tuple[Wanted, ...]:
    """The kernels that a recipe names; layers of one repository and revision are one kernel."""
    from kitbuild.recipe.models import KernelReference  # noqa: PLC0415

    found = []
    attention = recipe.kernels.attention_reference
    if attention is not None:
        found.append(
            Wanted(
                role="attention",
                repo=attention.repo,
                revision=str(attention.revision),
                member=attention.member,
                layers={},
                asked_by="kernels.attention",
            )
        )
    grouped: dict[tuple[str, str], dict[str, str]] = {}
    for layer, text in sorted(recipe.kernels.layers.items()):
        reference = KernelReference.parse(text)
        grouped.setdefault((reference.repo, str(reference.revision)), {})[layer] = str(reference.member)
    found += [
        Wanted(
            role="layers",
            repo=repo,
            revision=revision,
            member=None,
            layers=layers,
            asked_by="kernels.layers." + ", ".join(layers),
        )
        for (repo, revision), layers in sorted(grouped.items())
    ]
    return tuple(found)


def lock_kernels(
    recipe: Recipe, *, system: System, wheels: tuple[LockedWheel, ...], hub: Hub, store: Store, progress: Progress
) -> tuple[LockedKernel, ...]:
    """Lock every kernel that the recipe names, and what those depend on. All problems are raised at once."""
    queue = list(wanted_kernels(recipe))
    locked: dict[tuple[str, str, str, str], LockedKernel] = {}
    problems: list[Problem] = []
    while queue:
        wanted = queue.pop(0)
        try:
            _refuse_circle(wanted)
            kernel = _lock_one(
                wanted,
                system=system,
                hub=hub,
                store=store,
                progress=progress,
                signed=recipe.policy.require_signatures,
            )
        except ResolveError as error:
            problems.append(Problem(message=error.message, hint=error.hint, key=wanted.asked_by))
            continue
        metadata = parse_metadata(store.path(kernel.metadata_sha256).read_bytes(), name=kernel.repo)
        problems += complaints(kernel, metadata, recipe=recipe, system=system, wheels=wheels, key=wanted.asked_by)
        key = (kernel.role, kernel.repo, kernel.commit, kernel.revision)
        locked[key] = kernel
        queue += _dependencies(wanted, metadata)
    if problems:
        raise ResolveError("the kernels cannot be locked", problems=problems)
    return tuple(locked[key] for key in sorted(locked))


def _lock_one(
    wanted: Wanted, *, system: System, hub: Hub, store: Store, progress: Progress, signed: bool
) -> LockedKernel:
    snapshot, revision, moved = _follow_redirects(wanted, hub=hub, store=store, progress=progress)
    variants = sorted({file.path.split("/")[1] for file in snapshot.files if file.path.count("/") > 1})
    variant, rejected = choose_variant(variants, system)
    if variant is None:
        listed = ", ".join(variants) or "none"
        raise ResolveError(
            f"{wanted.repo}@{wanted.revision} ({snapshot.commit[:12]}) has no build for {system}",
            hint=f"variants that exist: {listed}; choose another revision, or image.cuda and torch to match one",
        )
    folder = f"build/{variant}/"
    chosen = tuple(file for file in snapshot.files if _in_variant(file, folder))
    files = hub.lock_files(snapshot, chosen, store=store, progress=progress)
    about = next((file for file in files if file.path == folder + METADATA), None)
    if about is None:
        raise ResolveError(
            f"{wanted.repo}@{wanted.revision}: {folder}metadata.json is missing",
            hint="builds from before metadata existed cannot be verified; take a newer revision",
        )
    name = f"{snapshot.repo} ({variant})"
    data = store.path(about.sha256).read_bytes()
    signature = next((file for file in files if file.path == folder + SIGNATURE), None)
    if signature is not None and signed:
        check_signature(data, store.path(signature.sha256).read_bytes(), name=name)
    metadata = parse_metadata(data, name=name)
    check_digest(metadata, files, folder=folder, name=name)
    publisher = snapshot.repo.partition("/")[0]
    progress.note(
        f"{wanted.role}: {snapshot.repo} @ {snapshot.commit[:12]} ({wanted.asked_by} {wanted.revision}),"
        f" variant {variant} ({system})"
    )
    digest = metadata.digest.model_dump() if metadata.digest else None
    return LockedKernel.model_validate(
        {
            "role": wanted.role,
            "repo": snapshot.repo,
            "revision": revision,
            "commit": snapshot.commit,
            "redirects": moved,
            "member": wanted.member,
            "layers": dict(wanted.layers),
            "variant": variant,
            "rejected": rejected,
            "kernel_version": metadata.version,
            "files": files,
            "metadata_sha256": about.sha256,
            "metadata_digest": json.dumps(digest, sort_keys=True) if digest else None,
            "dependencies": tuple(sorted(f"{item.repo}@{item.wanted}" for item in metadata.kernel_depends)),
            "publisher": publisher,
            "trusted": hub.trusts(publisher),
            "signature": "absent" if signature is None else "verified" if signed else "present",
        }
    )


def _follow_redirects(
    wanted: Wanted, *, hub: Hub, store: Store, progress: Progress
) -> tuple[Snapshot, str, tuple[Moved, ...]]:
    """Follow renames and `kernel-status.toml`, which the `kernels` library itself does not follow when it loads."""
    repo, revision, moved = wanted.repo, wanted.revision, list[Moved]()
    for _ in range(MAX_REDIRECTS):
        snapshot = hub.snapshot(repo, revision, "kernel")
        target = _redirect(snapshot, revision, hub=hub, store=store, progress=progress)
        if target is None and snapshot.repo == repo:
            return snapshot, revision, tuple(moved)
        place, branch = target or (snapshot.repo, revision)
        if wanted.role == "dependency":
            raise ResolveError(
                f"{repo}@{revision} moved to {place}, which the kernel that needs it does not know",
                hint="take a newer revision of that kernel",
            )
        progress.note(f"kernel {repo} moved to {place}")
        moved.append(Moved(repo=repo, revision=revision, commit=snapshot.commit))
        repo, revision = place, branch
    raise ResolveError(f"{wanted.repo}@{wanted.revision} redirects more than {MAX_REDIRECTS} times")


def _redirect(
    snapshot: Snapshot, revision: str, *, hub: Hub, store: Store, progress: Progress
) -> tuple[str, str] | None:
    status = tuple(file for file in snapshot.files if file.path == "kernel-status.toml")
    if not status:
        return None
    (locked,) = hub.lock_files(snapshot, status, store=store, progress=progress)
    try:
        fields = tomllib.loads(store.path(locked.sha256).read_bytes().decode())
    except ValueError as error:
        raise ResolveError(f"{snapshot.repo}@{revision}: kernel-status.toml cannot be read: {error}") from error
    if fields.get("kind") != "redirect" or not fields.get("destination"):
        return None
    return str(fields["destination"]), str(fields.get("revision", "main"))


def _dependencies(wanted: Wanted, metadata: Metadata) -> list[Wanted]:
    return [
        Wanted(
            role="dependency",
            repo=item.repo,
            revision=item.wanted,
            member=None,
            layers={},
            asked_by=f"needed by {wanted.repo}",
            above=(*wanted.above, f"{wanted.repo}@{wanted.revision}"),
        )
        for item in metadata.kernel_depends
    ]


def _refuse_circle(wanted: Wanted) -> None:
    """Kernels that need each other do not load: `kernels` refuses them (src/kernels/deps.py)."""
    name = f"{wanted.repo}@{wanted.revision}"
    if name in wanted.above:
        raise ResolveError(
            f"kernels need each other in a circle: {' → '.join((*wanted.above, name))}",
            hint="take another revision, and tell their publisher",
        )


def _in_variant(file: HubFile, folder: str) -> bool:
    # Byte code in a repository is never the code that was reviewed; `kernels` leaves it out too.
    return file.path.startswith(folder) and not file.path.endswith(".pyc") and "__pycache__" not in file.path
