"""Step 2: what would go wrong with a locked kernel later, told now. Pure."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from kitbuild.errors import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kitbuild.lock.kernel_metadata import Metadata
    from kitbuild.lock.kernel_variants import System
    from kitbuild.lock.models import LockedKernel, LockedWheel
    from kitbuild.recipe.models import Recipe


def complaints(
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
    yield from _trust(kernel, metadata, recipe=recipe, name=name, key=key)
    versions = {wheel.name: wheel.version for wheel in wheels}
    minimum = metadata.minimum_kernels
    if minimum and "kernels" in versions and Version(versions["kernels"]) < Version(minimum):
        yield Problem(
            key=key,
            message=f"{name} needs kernels ≥ {minimum}, the lock has {versions['kernels']}",
            hint="take an older revision of the kernel",
        )
    packages, unknown = _python_packages(metadata)
    for package in packages:
        if package not in versions:
            yield Problem(
                key=key,
                message=f"{name} needs the Python package {package}, which the lock does not have",
                hint=f'add it: image: {{packages: {{{package}: "…"}}}}',
            )
    for other in unknown:
        yield Problem(
            key=key,
            message=f"{name} needs {other}, which kernels does not know: it would refuse to load",
            hint="take an older revision of the kernel",
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


def _trust(kernel: LockedKernel, metadata: Metadata, *, recipe: Recipe, name: str, key: str) -> Iterator[Problem]:
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


def _python_packages(metadata: Metadata) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names on the package index of `python-depends`, by the table that `kernels` ships; and what is not in it."""
    from importlib.resources import files  # noqa: PLC0415

    table = json.loads((files("kernels") / "python_depends.json").read_text())
    backend = metadata.backend.type.lower()
    known = {**table["general"], **table["backends"].get(backend, {})}
    names = {entry["pkg"] for name in metadata.python_depends for entry in known.get(name, {}).get("python", [])}
    return tuple(sorted(names)), tuple(sorted(set(metadata.python_depends) - known.keys()))
