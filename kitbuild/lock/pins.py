"""Step 2: what an earlier lock fixed and stays, and the names under which a part of it can be told to move. Pure.

A repository has the name that the recipe writes and the one that the Hub has for it today; either means it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from packaging.utils import canonicalize_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kitbuild.lock.models import Lock, LockedTree

BASE = "base"


@dataclass(frozen=True, kw_only=True)
class Pins:
    """What an earlier lock fixed and stays: commits by (type, repo, revision), wheel versions, the base."""

    commits: Mapping[tuple[str, str, str], str]
    versions: Mapping[str, str]
    base: str | None


def pins_of(lock: Lock | None, update: frozenset[str], *, target: str) -> Pins:
    """Everything in `lock` but what `update` names: package names, repositories, or `base`.

    Another target keeps the commits only: its packages and base are others.
    """
    if lock is None:
        return Pins(commits={}, versions={}, base=None)
    commits = {
        place: commit
        for places in _places(lock)
        if not update & {repo for _, repo, _ in places}
        for place, commit in places.items()
    }
    if lock.target != target:
        return Pins(commits=commits, versions={}, base=None)
    moving = {package(name) for name in update}
    versions = {wheel.name: wheel.version for wheel in lock.wheels if package(wheel.name) not in moving}
    return Pins(commits=commits, versions=versions, base=None if BASE in update else lock.base.manifest_digest)


def names(lock: Lock) -> frozenset[str]:
    """All that `update` may name: packages, repositories, the base."""
    repos = {repo for places in _places(lock) for _, repo, _ in places}
    return frozenset({BASE, *(package(wheel.name) for wheel in lock.wheels), *repos})


def package(name: str) -> str:
    """A package's name as the lock spells it; anything else as it is."""
    return name if "/" in name else str(canonicalize_name(name))


def _places(lock: Lock) -> Iterator[dict[tuple[str, str, str], str]]:
    """The (type, repo, revision) of each repository in the lock, under every name that it has, with its commit."""
    for kind, tree, written in _trees(lock):
        if tree is not None and tree.repo is not None:
            repos = {tree.repo, written or tree.repo}
            yield {(kind, repo, str(tree.revision)): str(tree.commit) for repo in repos}
    for kernel in lock.kernels:
        places = {("kernel", item.repo, item.revision): item.commit for item in kernel.redirects}
        yield places | {("kernel", kernel.repo, kernel.revision): kernel.commit}


def _trees(lock: Lock) -> Iterator[tuple[str, LockedTree | None, str | None]]:
    """Type, tree, and the name that the recipe writes."""
    model: dict[str, Any] = lock.recipe.get("model") or {}
    yield "model", lock.model.weights, model.get("repo")
    yield "model", lock.model.tokenizer, (model.get("tokenizer") or {}).get("repo")
    written = [item.get("repo") for item in lock.recipe.get("dataset") or ()]
    for index, dataset in enumerate(lock.datasets):
        yield "dataset", dataset.tree, written[index] if index < len(written) else None
    if lock.evaluate is not None:
        yield "dataset", lock.evaluate.tree, ((lock.recipe.get("evaluate") or {}).get("dataset") or {}).get("repo")
