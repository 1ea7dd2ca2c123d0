"""Hub kernels, resolved for the target: commit, build variant, files, dependencies, trust.

Part of step 2. Which variant fits is decided by the `kernels` library itself, for the system that the lock
names and never for the host.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from packaging.version import InvalidVersion, Version

from kitbuild.errors import Problem, ResolveError
from kitbuild.lock.kernel_metadata import METADATA, SIGNATURE, check_digest, check_signature, parse_metadata
from kitbuild.lock.models import LockedKernel, LockedWheel, RejectedVariant

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kitbuild.lock.hub import Hub, HubFile, Snapshot
    from kitbuild.lock.kernel_metadata import Metadata
    from kitbuild.progress import Progress
    from kitbuild.recipe.models import Recipe
    from kitbuild.store import Store

MAX_REDIRECTS = 5


@dataclass(frozen=True, kw_only=True)
class System:
    """What a kernel must fit: torch's CUDA ("12.9", or None for CPU), its version, machine and GPU architectures."""

    cuda: str | None
    torch: str
    machine: str
    gpu_archs: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"torch {self.torch}, {'CUDA ' + self.cuda if self.cuda else 'CPU'}, {self.machine}"


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
        problems += _complaints(kernel, metadata, recipe=recipe, system=system, wheels=wheels, key=wanted.asked_by)
        key = (kernel.role, kernel.repo, kernel.commit, kernel.revision)
        locked[key] = kernel
        queue += _dependencies(wanted, metadata)
    if problems:
        raise ResolveError("the kernels cannot be locked", problems=problems)
    return tuple(locked[key] for key in sorted(locked))


def _lock_one(
    wanted: Wanted, *, system: System, hub: Hub, store: Store, progress: Progress, signed: bool
) -> LockedKernel:
    snapshot, revision = _follow_redirects(wanted, hub=hub, store=store, progress=progress)
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


def _follow_redirects(wanted: Wanted, *, hub: Hub, store: Store, progress: Progress) -> tuple[Snapshot, str]:
    """Follow `kernel-status.toml`, which the `kernels` library itself does not do when it loads."""
    repo, revision = wanted.repo, wanted.revision
    for _ in range(MAX_REDIRECTS):
        snapshot = hub.snapshot(repo, revision, "kernel")
        status = tuple(file for file in snapshot.files if file.path == "kernel-status.toml")
        if not status:
            return snapshot, revision
        (locked,) = hub.lock_files(snapshot, status, store=store, progress=progress)
        try:
            fields = tomllib.loads(store.path(locked.sha256).read_bytes().decode())
        except ValueError as error:
            raise ResolveError(f"{repo}@{revision}: kernel-status.toml cannot be read: {error}") from error
        if fields.get("kind") != "redirect" or not fields.get("destination"):
            return snapshot, revision
        if wanted.role == "dependency":
            raise ResolveError(
                f"{repo}@{revision} moved to {fields['destination']}, which the kernel that needs it does not know",
                hint="take a newer revision of that kernel",
            )
        progress.note(f"kernel {repo} moved to {fields['destination']}")
        repo, revision = str(fields["destination"]), str(fields.get("revision", "main"))
    raise ResolveError(f"{wanted.repo}@{wanted.revision} redirects more than {MAX_REDIRECTS} times")


def choose_variant(names: list[str], system: System) -> tuple[str | None, tuple[RejectedVariant, ...]]:
    """The build variant that `kernels` would load on `system`, and each other one with the reason against it.

    Uses a private function of `kernels` (pinned to 0.17), since the public one detects the host:
    huggingface/kernels, src/kernels/variants.py.
    """
    from kernels import variants as library  # noqa: PLC0415
    from kernels.backends import CPU, CUDA  # noqa: PLC0415

    parsed, rejected = [], []
    for name in names:
        try:
            parsed.append(library.parse_variant(name))
        except ValueError as error:
            rejected.append(RejectedVariant(variant=name, reason=str(error)))
    torch = Version(system.torch)
    accepted, trace = library._resolve_variant_for_system(  # noqa: SLF001 - see the docstring
        parsed,
        CUDA(Version(system.cuda)) if system.cuda else CPU(),
        system.machine,
        "linux",
        Version(f"{torch.major}.{torch.minor}"),
        True,  # noqa: FBT003 - torch wheels for Linux are built with the C++11 ABI since 2.6
        None,
    )
    # Two spellings can parse to one variant; the name in the repository is what is loaded.
    spelled = {library.parse_variant(name).variant_str: name for name in names if _parses(library, name)}
    for decision in trace:
        name = spelled[decision.variant.variant_str]
        if not accepted or decision.variant != accepted[0]:
            reason = getattr(decision, "reason", "another build is preferred")
            rejected.append(RejectedVariant(variant=name, reason=str(reason)))
    ordered = tuple(sorted(rejected, key=lambda item: item.variant))
    return (spelled[accepted[0].variant_str] if accepted else None), ordered


def _parses(library: Any, name: str) -> bool:
    try:
        library.parse_variant(name)
    except ValueError:
        return False
    return True


def _complaints(
    kernel: LockedKernel,
    metadata: Metadata,
    *,
    recipe: Recipe,
    system: System,
    wheels: tuple[LockedWheel, ...],
    key: str,
) -> Iterator[Problem]:
    """Everything that would go wrong with this kernel later."""
    name = f"{kernel.repo}@{kernel.revision}"
    if not kernel.trusted and not {kernel.publisher, kernel.repo} & set(recipe.policy.allow_publishers):
        yield Problem(
            key=key,
            message=f"{name}: {kernel.publisher} is not a trusted kernel publisher",
            hint=f"if you trust it, add it: policy: {{allow_publishers: [{kernel.publisher}]}}",
        )
    if recipe.policy.require_signatures and kernel.signature == "absent":
        yield Problem(key=key, message=f"{name} is not signed", hint="policy.require_signatures asks for signatures")
    if recipe.policy.require_signatures and metadata.digest is None:
        yield Problem(
            key=key, message=f"{name} has no digest of its files", hint="so that its signature says nothing of them"
        )
    versions = {wheel.name: wheel.version for wheel in wheels}
    minimum = metadata.minimum_kernels
    if minimum and "kernels" in versions and Version(versions["kernels"]) < Version(minimum):
        yield Problem(
            key=key,
            message=f"{name} needs kernels ≥ {minimum}, the lock has {versions['kernels']}",
            hint="take an older revision of the kernel",
        )
    for package in _python_packages(metadata):
        if package not in versions:
            yield Problem(
                key=key,
                message=f"{name} needs the Python package {package}, which the lock does not have",
                hint=f'add it: image: {{packages: {{{package}: "…"}}}}',
            )
    archs = metadata.backend.archs
    if archs and system.cuda:
        for arch in system.gpu_archs:
            if not _runs_on(arch, archs):
                yield Problem(
                    key=key,
                    message=f"{name} ({kernel.variant}) is built for GPU architectures {', '.join(archs)}, not {arch}",
                    hint="take another revision, or correct image.gpu_archs",
                )


def _runs_on(arch: str, built_for: tuple[str, ...]) -> bool:
    """Binary code runs on its own major with an equal or higher minor, `a` code on that capability alone, PTX on newer.

    https://docs.nvidia.com/cuda/cuda-c-programming-guide/#feature-set-compiler-targets; an odd name is no objection.
    """
    try:
        wanted = Version(arch.rstrip("af"))
        for text in built_for:
            plain = text.removesuffix("+PTX")
            built = Version(plain.rstrip("af"))
            newer = built <= wanted
            if built == wanted or (
                newer and (text.endswith("+PTX") or (built.major == wanted.major and plain[-1] != "a"))
            ):
                return True
    except InvalidVersion:
        return True
    return False


def _python_packages(metadata: Metadata) -> tuple[str, ...]:
    """Names on the package index of `python-depends`, by the table that `kernels` ships."""
    from importlib.resources import files  # noqa: PLC0415

    table = json.loads((files("kernels") / "python_depends.json").read_text())
    backend = metadata.backend.type.lower()
    known = {**table["general"], **table["backends"].get(backend, {})}
    names = [entry["pkg"] for name in metadata.python_depends for entry in known.get(name, {}).get("python", [])]
    return tuple(sorted(set(names)))


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
