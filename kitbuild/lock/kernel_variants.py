"""Step 2: the build variant of a Hub kernel that the target loads, and the reason against each other one. Pure.

Decided by the `kernels` library itself, for the system that the lock names and never for the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from kitbuild.lock.models import RejectedVariant


@dataclass(frozen=True, kw_only=True)
class System:
    """What a kernel must fit: torch's CUDA ("12.9", or None for CPU), its version, machine and GPU architectures."""

    cuda: str | None
    torch: str
    machine: str
    gpu_archs: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"torch {self.torch}, {'CUDA ' + self.cuda if self.cuda else 'CPU'}, {self.machine}"


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
