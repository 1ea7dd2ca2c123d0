"""Step 2: exact wheels for the target, each with its digest and the name of the index that it came from."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote

from packaging.pylock import PackageWheel, PylockSelectError
from packaging.utils import canonicalize_name

from kitbuild.errors import ResolveError
from kitbuild.lock.models import LockedWheel
from kitbuild.lock.platform import Platform
from kitbuild.lock.resolver import Resolver
from kitbuild.lock.sdists import build_sdists
from kitbuild.lock.uv import Sources
from kitbuild.lock.wheel_places import address_of, remember
from kitbuild.store.download import Download, fetch, remote_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from packaging.pylock import Package, Pylock

    from kitbuild.progress import Progress
    from kitbuild.store import Store


def resolve_wheels(
    requirements: Mapping[str, str],
    *,
    python: str,
    glibc: str,
    architecture: str,
    torch_backend: str | None,
    indexes: Mapping[str, str],
    store: Store,
    environ: Mapping[str, str],
    progress: Progress,
    preferences: Mapping[str, str] | None = None,
) -> tuple[LockedWheel, ...]:
    """Resolve `requirements` (package to version or specifier) and all that they need, sorted by name.

    `preferences` are versions that stay where they still fit. What is published only as source and is known to
    `sdists` is built. ResolveError (4) where there is no solution or no answer.
    """
    platform = Platform(python=python, glibc=glibc, architecture=architecture)
    wanted = {str(canonicalize_name(name)): value for name, value in requirements.items()}
    sources = Sources.read(indexes, environ)
    built = build_sdists(wanted, platform=platform, sources=sources, store=store, progress=progress)
    with built as (folder, built_wheels):
        sources = sources.with_links(folder) if folder else sources
        resolver = Resolver(platform, sources, store, progress, dict(preferences or {}))
        found = resolver.resolve(wanted, torch_backend)
        chosen = [
            (package, wheel) for package, wheel in _select(found.pylock, platform) if package.name not in built_wheels
        ]
        names = resolver.index_names(chosen, found)
        locked = [_lock(*item, names=names, store=store) for item in _with_digests(chosen, resolver)]
    return tuple(sorted([*locked, *built_wheels.values()], key=lambda wheel: wheel.name))


def _select(pylock: Pylock, platform: Platform) -> Iterator[tuple[Package, PackageWheel]]:
    try:
        for package, item in pylock.select(environment=platform.environment, tags=platform.tags):
            if not isinstance(item, PackageWheel):
                raise ResolveError(f"{package.name} {package.version} has no wheel for the target")
            yield package, item
    except PylockSelectError as error:
        raise ResolveError(f"no wheel for the target: {error}") from error


def _with_digests(
    chosen: Sequence[tuple[Package, PackageWheel]], resolver: Resolver
) -> Iterator[tuple[Package, PackageWheel, str, int]]:
    """With digest and size of each wheel; what an index does not say is asked for, at worst by fetching."""
    environ = resolver.sources.environ
    for package, wheel in chosen:
        address = address_of(wheel)
        headers = resolver.sources.headers(address)
        sha256 = wheel.hashes.get("sha256")
        if sha256 is None:
            item = Download(name=wheel.filename, url=address, headers=headers)
            sha256 = fetch(resolver.store, [item], progress=resolver.progress, environ=environ)[item]
        size = wheel.size
        if size is None and resolver.store.has(sha256):
            size = resolver.store.path(sha256).stat().st_size
        if size is None:
            size = remote_size(Download(name=wheel.filename, url=address, headers=headers), environ=environ)
        if size is None:
            item = Download(name=wheel.filename, url=address, sha256=sha256, headers=headers)
            fetch(resolver.store, [item], progress=resolver.progress, environ=environ)
            size = resolver.store.path(sha256).stat().st_size
        yield package, wheel, sha256, size


def _lock(
    package: Package,
    wheel: PackageWheel,
    sha256: str,
    size: int,
    *,
    names: Mapping[str, str],
    store: Store,
) -> LockedWheel:
    remember(sha256, address_of(wheel), store=store)
    return LockedWheel(
        name=package.name,
        version=str(package.version),
        file=unquote(wheel.filename),
        size=size,
        sha256=sha256,
        index=names.get(package.name, "pypi"),
    )
