"""Step 6: what really ran, held against the lock. Pure.

Kernels by repository, commit, variant and layer, called in every rank; the attention path; Liger. A run that departs
from its lock in one of them is not the locked run, whatever its numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kitbuild.archive.models import KernelUse, Manifest
    from kitbuild.archive.read import Archive
    from kitbuild.lock.models import LockedKernel


RANK_DIGITS = 9
Key = tuple[str, str, "str | None"]


@dataclass(frozen=True, kw_only=True)
class Departure:
    """One thing that ran otherwise than locked. `rank` is the first rank where it did so in some ranks only."""

    name: str
    locked: str
    ran: str
    rank: int | None = None

    def __str__(self) -> str:
        where = "" if self.rank is None else f" in rank {self.rank}"
        return f"{self.name}: locked {self.locked}, {self.ran}{where}"


def departures(archive: Archive) -> tuple[Departure, ...]:
    """All of them; none for a run that did not get to say what it used."""
    manifest = archive.manifest
    return (*_kernels(manifest), *_attention(manifest), *_liger(manifest)) if archive.finished else ()


def _kernels(manifest: Manifest) -> Iterator[Departure]:
    uses = {_use_key(use): use for use in manifest.kernels}
    told: set[Key] = set()
    for kernel in manifest.lock.kernels:
        if kernel.role == "dependency":  # Called by the kernel that needs it, not by the model.
            continue
        for member in _members(kernel):
            key: Key = (kernel.role, kernel.repo, member)
            found = _departure(manifest, kernel, member, uses.get(key))
            if found is not None and key not in told:
                yield found
            told.add(key)
    for found_key, use in uses.items():
        if found_key not in told and any(use.calls.values()):
            yield Departure(name=_name(use.repo, use.member), locked="nothing", ran=_identity(use))


def _departure(manifest: Manifest, kernel: LockedKernel, member: str | None, use: KernelUse | None) -> Departure | None:
    name, locked = _name(kernel.repo, member if kernel.layers else None), f"{kernel.commit[:12]} ({kernel.variant})"
    if use is None:
        return Departure(name=name, locked=locked, ran="not used")
    if (use.commit, use.variant) != (kernel.commit, kernel.variant):
        return Departure(name=name, locked=locked, ran=_identity(use))
    unused = _unused_ranks(manifest, use)
    if not unused:
        return None
    in_some = any(count > 0 for count in use.calls.values())
    return Departure(name=name, locked=locked, ran="not used", rank=unused[0] if in_some else None)


def _unused_ranks(manifest: Manifest, use: KernelUse) -> list[int]:
    """Ranks that did not call it: listed with no call, or not listed. A node of several lists its own ranks."""
    several = manifest.launch.get("nodes") not in (None, 1)
    ranks = manifest.launch.get("processes_per_node" if several else "world_size")
    found = (_rank(rank) for rank, count in use.calls.items() if count <= 0)
    silent = [rank for rank in found if rank is not None]
    missing = (ranks if isinstance(ranks, int) else 1) - len(use.calls)
    if missing > 0:
        silent.append(next(rank for rank in range(len(use.calls) + 1) if str(rank) not in use.calls))
    return sorted(silent)


def _attention(manifest: Manifest) -> Iterator[Departure]:
    """As transformers names it: `org/repo@commit[:function]`, or a name of its own."""
    used = manifest.attention.used
    kernel = next((item for item in manifest.lock.kernels if item.role == "attention"), None)
    if kernel is not None:
        locked = f"{kernel.repo}@{kernel.commit}" + (f":{kernel.member}" if kernel.member else "")
    else:
        given = manifest.lock.recipe.get("kernels")
        locked = str(given.get("attention") or "sdpa") if isinstance(given, dict) else "sdpa"
    if used is not None and used != locked:
        yield Departure(name="attention", locked=locked, ran=used)
        return
    for rank, calls in manifest.attention.calls.items():
        for path in sorted(name for name, count in calls.items() if count and name != locked):
            yield Departure(name="attention", locked=locked, ran=f"{path} was called", rank=_rank(rank))
            return


def _liger(manifest: Manifest) -> Iterator[Departure]:
    given, found = manifest.lock.recipe.get("liger"), manifest.liger.get("patched")
    patched = [str(name) for name in found] if isinstance(found, list) else []
    asked = any(given.values()) if isinstance(given, dict) else bool(given)
    if asked and not patched:
        yield Departure(name="liger", locked="on", ran="nothing was patched")
    elif patched and not asked:
        yield Departure(name="liger", locked="off", ran=f"patched {', '.join(patched)}")
    elif isinstance(given, dict):
        yield from _idle_patches(given, manifest.liger.get("calls"))


def _idle_patches(options: dict[str, Any], calls: object) -> Iterator[Departure]:
    """Options that are on and that a rank did not call; an older kitbuild did not count."""
    ranks = calls if isinstance(calls, dict) else {}
    for option in sorted(name for name, on in options.items() if on):
        idle = [rank for rank, held in ranks.items() if not (isinstance(held, dict) and held.get(option))]
        if idle:
            rank = _rank(idle[0]) if len(idle) < len(ranks) else None
            yield Departure(name=f"liger {option}", locked="on", ran="not used", rank=rank)


def _rank(text: object) -> int | None:
    return int(text) if isinstance(text, str) and text.isdecimal() and len(text) <= RANK_DIGITS else None


def _members(kernel: LockedKernel) -> tuple[str | None, ...]:
    return tuple(kernel.layers.values()) or (kernel.member,)


def _use_key(use: KernelUse) -> Key:
    return use.role, use.repo, use.member


def _identity(use: KernelUse) -> str:
    return f"{(use.commit or 'an unknown commit')[:12]} ({use.variant or 'an unknown variant'}) ran"


def _name(repo: str, member: str | None) -> str:
    return f"{repo}:{member}" if member else repo
