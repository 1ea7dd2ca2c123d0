"""Step 2: which builds of torch are tried for a target, in which order, and whether one fits its CUDA. Pure.

The plain wheel of one index is a build for some CUDA, which only its dependencies tell; PyTorch's own index (known to
uv as a backend) has one per CUDA, and the CPU's, with a local version such as `+cu129`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from kitbuild.lock.uv import NoSolutionError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from packaging.pylock import Package, Pylock

_BACKEND = re.compile(r"cpu|cu\d{2,3}|rocm[\d.]+|xpu")
_CUDA_RUNTIMES = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime-cu11")


def attempts(
    wanted: Mapping[str, str], torch_backend: str | None, *, has_spare: bool
) -> Iterator[tuple[str, str | None, bool, str]]:
    """(torch's version, uv's torch backend, with spare indexes, how its CUDA must fit), in order of preference."""
    spares = (False, True) if has_spare else (False,)
    version = wanted.get("torch", "")
    local = Version(version).local if is_exact(version) else None
    if "torch" not in wanted or torch_backend is None:
        yield from (("", None, spare, "any") for spare in spares)
        return
    backend = local if local and _BACKEND.fullmatch(local) else torch_backend
    if not is_exact(version):
        yield "", backend, False, "same"
        return
    tagged = version if local else f"{version}+{backend}"
    yield from ((tagged, None, spare, "any") for spare in spares)
    if not local and backend != "cpu":
        yield from ((version, None, spare, "same") for spare in spares)
    yield tagged, backend, False, "any"
    if not local and backend != "cpu":
        yield from ((version, None, spare, "older") for spare in spares)
    if has_spare:
        yield tagged, backend, True, "any"


def is_exact(version: str) -> bool:
    """Whether it is a version and not a specifier."""
    try:
        Version(version)
    except InvalidVersion:
        return False
    return True


def requirement(name: str, value: str) -> str:
    """As uv reads it."""
    if is_exact(value):
        return f"{name}=={value}"
    return name if value in {"", "*"} else f"{name}{value}"


def _cuda(pylock: Pylock) -> tuple[int, int] | None:
    for package in pylock.packages:
        if package.name in _CUDA_RUNTIMES and package.version is not None:
            return package.version.major, package.version.minor
    return None


def cuda_of_local(version: str) -> str | None:
    """`2.8.0+cu129` → `12.9`: the CUDA that a build's local version tells."""
    local = Version(version).local if is_exact(version) else None
    match = re.fullmatch(r"cu(\d+)(\d)", local or "")
    return f"{match[1]}.{match[2]}" if match else None


def cuda_of_runtime(versions: Mapping[str, str]) -> str | None:
    """The CUDA of the runtime that torch brings as a package: what a build without a local version is for."""
    found = next((Version(versions[name]) for name in _CUDA_RUNTIMES if name in versions), None)
    return f"{found.major}.{found.minor}" if found else None


def cuda_fits(pylock: Pylock, backend: str, how: str) -> bool:
    """Whether torch's CUDA is the backend's (`same`) or of its major and not newer (`older`); unknown fits."""
    built, wanted = _cuda(pylock), _backend_cuda(backend)
    if how == "any" or built is None or wanted is None:
        return True
    return built == wanted or (how == "older" and built[0] == wanted[0] and built[1] <= wanted[1])


def _backend_cuda(backend: str) -> tuple[int, int] | None:
    match = re.fullmatch(r"cu(\d+)(\d)", backend)
    return (int(match[1]), int(match[2])) if match else None


def wrong_cuda(pylock: Pylock, backend: str) -> NoSolutionError:
    """What is said of a torch that does not fit."""
    built, wanted = _cuda(pylock), _backend_cuda(backend)
    assert built is not None and wanted is not None  # noqa: PT018, S101 - else it would fit
    torch = next(package for package in pylock.packages if package.name == "torch")
    return NoSolutionError(
        f"torch {torch.version} is built for CUDA {built[0]}.{built[1]}, the target is CUDA {wanted[0]}.{wanted[1]}",
        hint="take a torch version that has a build for the target",
    )


def torch_build(package: Package) -> str | None:
    """The backend that a local version names, such as cu129."""
    local = package.version.local if package.version else None
    return local if local and _BACKEND.fullmatch(local) else None
