"""Step 2: exact wheels for the target, each with its digest and the name of the index that it came from."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote

from packaging.pylock import PackageWheel, PylockSelectError
from packaging.utils import canonicalize_name

from kitbuild.errors import ResolveError
from kitbuild.lock.models import LockedWheel
from kitbuild.lock.platform import Platform
from kitbuild.lock.pylock import index_of
from kitbuild.lock.resolver import Resolver
from kitbuild.lock.sdists import build_sdists
from kitbuild.lock.torch_builds import cuda_fits, torch_build, wrong_cuda
from kitbuild.lock.uv import Sources
from kitbuild.lock.wheel_places import address_of, remember
from kitbuild.store.download import Download, fetch, remote_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

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
        locked = _lock(chosen, names, sources=sources, store=store, progress=progress)
    return _sorted(locked, built_wheels)


def given_wheels(
    pylock: Pylock,
    *,
    python: str,
    glibc: str,
    architecture: str,
    torch_backend: str | None,
    indexes: Mapping[str, str],
    store: Store,
    environ: Mapping[str, str],
    progress: Progress,
) -> tuple[LockedWheel, ...]:
    """The wheels of a pylock.toml that fit the target; what it has as source and `sdists` knows is built."""
    platform = Platform(python=python, glibc=glibc, architecture=architecture)
    sources = Sources.read(indexes, environ)
    fitting = list(_fitting(pylock, platform))
    chosen = [(package, item) for package, item in fitting if isinstance(item, PackageWheel)]
    if torch_backend is not None and not cuda_fits(pylock, torch_backend, "older"):
        raise wrong_cuda(pylock, torch_backend)
    source = {str(package.name): package for package, item in fitting if not isinstance(item, PackageWheel)}
    wanted = {name: str(package.version) for name, package in source.items()}
    with build_sdists(wanted, platform=platform, sources=sources, store=store, progress=progress) as (_, built):
        for name, package in source.items():
            expected = package.sdist.hashes.get("sha256") if package.sdist else None
            facts = built[name].built if name in built else None
            if facts is None or facts.sdist_sha256 != expected:
                raise ResolveError(
                    f"the pylock file has {name} {package.version} without a wheel for the target",
                    hint="as source there may be only what kitbuild builds repeatably, from the file that the index has",
                )
    by_address = {url.rstrip("/"): name for name, url in indexes.items()}
    names = {
        str(package.name): by_address.get(str(package.index).rstrip("/")) or index_of(package) for package, _ in chosen
    }
    names |= {str(package.name): f"pytorch-{build}" for package, _ in chosen if (build := torch_build(package))}
    return _sorted(_lock(chosen, names, sources=sources, store=store, progress=progress), built)


def _sorted(found: Iterable[LockedWheel], built: Mapping[str, LockedWheel]) -> tuple[LockedWheel, ...]:
    return tuple(sorted([*found, *built.values()], key=lambda wheel: wheel.name))


def _select(pylock: Pylock, platform: Platform) -> Iterator[tuple[Package, PackageWheel]]:
    for package, item in _fitting(pylock, platform):
        if not isinstance(item, PackageWheel):
            raise ResolveError(f"{package.name} {package.version} has no wheel for the target")
        yield package, item


def _fitting(pylock: Pylock, platform: Platform) -> Iterator[tuple[Package, object]]:
    try:
        yield from pylock.select(environment=platform.environment, tags=platform.tags)
    except PylockSelectError as error:
        raise ResolveError(f"no wheel for the target: {error}") from error


def _lock(
    chosen: Sequence[tuple[Package, PackageWheel]],
    names: Mapping[str, str],
    *,
    sources: Sources,
    store: Store,
    progress: Progress,
) -> Iterator[LockedWheel]:
    """With digest and size of each wheel; what an index does not say is asked for, at worst by fetching."""
    environ = sources.trusting
    for package, wheel in chosen:
        address = address_of(wheel)
        headers = sources.headers(address)
        sha256 = wheel.hashes.get("sha256")
        if sha256 is None:
            item = Download(name=wheel.filename, url=address, headers=headers)
            sha256 = fetch(store, [item], progress=progress, environ=environ)[item]
        size = wheel.size
        if size is None and store.has(sha256):
            size = store.path(sha256).stat().st_size
        if size is None:
            size = remote_size(Download(name=wheel.filename, url=address, headers=headers), environ=environ)
        if size is None:
            item = Download(name=wheel.filename, url=address, sha256=sha256, headers=headers)
            fetch(store, [item], progress=progress, environ=environ)
            size = store.path(sha256).stat().st_size
        remember(sha256, address, store=store)
        yield LockedWheel(
            name=package.name,
            version=str(package.version),
            file=unquote(wheel.filename),
            size=size,
            sha256=sha256,
            index=names.get(package.name, "pypi"),
        )
