"""Step 2: exact wheels for the target, resolved by uv, and where to fetch them from.

The lock names files and digests only. Where they were found is remembered in the store; on another machine they
are found again by asking uv for the exact versions and taking the files of the locked digest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from packaging.pylock import PackageWheel, PylockSelectError
from packaging.utils import canonicalize_name

from kitbuild.errors import ResolveError
from kitbuild.lock.models import LockedWheel
from kitbuild.lock.platform import Platform
from kitbuild.lock.sdists import build_sdists, rebuild
from kitbuild.lock.torch_builds import attempts, cuda_fits, requirement, torch_build, wrong_cuda
from kitbuild.lock.uv import NoSolutionError, Sources, UnreachableError, compile_pylock, indexes_of
from kitbuild.progress import Silent
from kitbuild.store.download import Download, fetch, remote_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from packaging.pylock import Package, Pylock

    from kitbuild.lock.models import Lock
    from kitbuild.progress import Progress
    from kitbuild.store import Store

ADDRESSES = "wheel-addresses"


@dataclass(frozen=True, kw_only=True)
class _Found:
    """A resolution and how it was reached."""

    pylock: Pylock
    torch_backend: str | None
    spare: bool


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
        resolver = _Resolver(platform, sources, store, progress, dict(preferences or {}))
        found = resolver.resolve(wanted, torch_backend)
        chosen = [
            (package, wheel) for package, wheel in _select(found.pylock, platform) if package.name not in built_wheels
        ]
        names = resolver.index_names(chosen, found)
        locked = [_lock(*item, names=names, store=store) for item in _with_digests(chosen, resolver)]
    return tuple(sorted([*locked, *built_wheels.values()], key=lambda wheel: wheel.name))


def locate_wheels(
    wheels: Iterable[LockedWheel],
    *,
    lock: Lock,
    indexes: Mapping[str, str],
    store: Store,
    environ: Mapping[str, str],
    progress: Progress | None = None,
    anew: bool = False,
) -> list[Download]:
    """Where the files of `wheels` are that the store lacks. Addresses remembered are used unless `anew`.

    `indexes` are the recipe's: the lock has their names only. What was built from source is built again here and now.
    ResolveError (4) names the files that no index offers with the locked digest.
    """
    missing = [wheel for wheel in wheels if not store.has(wheel.sha256)]
    if not missing:
        return []
    sources = Sources.read(indexes, environ)
    platform = Platform(python=lock.base.python, glibc=lock.base.glibc, architecture=lock.base.architecture)
    progress = progress or Silent()
    for wheel in (wheel for wheel in missing if wheel.built):
        rebuild(wheel, platform=platform, sources=sources, store=store, progress=progress)
    missing = [wheel for wheel in missing if not wheel.built]
    addresses = {} if anew else _remembered(missing, store)
    unknown = [wheel for wheel in missing if wheel.sha256 not in addresses]
    if unknown:
        addresses |= _Resolver(platform, sources, store, progress, {}).find_again(unknown)
    return [_download(wheel, addresses[wheel.sha256], sources) for wheel in missing]


def fetch_wheels(
    wheels: Iterable[LockedWheel], *, store: Store, environ: Mapping[str, str], progress: Progress
) -> None:
    """Fetch wheels that this machine has just resolved, from the addresses that it remembers (else: `locate_wheels`)."""
    missing = [wheel for wheel in wheels if not store.has(wheel.sha256)]
    sources = Sources.read({}, environ)
    addresses = _remembered(missing, store)
    downloads = [_download(wheel, addresses[wheel.sha256], sources) for wheel in missing]
    fetch(store, downloads, progress=progress, environ=environ)


def _remembered(wheels: Iterable[LockedWheel], store: Store) -> dict[str, str]:
    found = {wheel.sha256: store.record(ADDRESSES, wheel.sha256) for wheel in wheels}
    return {sha256: address for sha256, address in found.items() if isinstance(address, str) and not _gone(address)}


def _gone(address: str) -> bool:
    return address.startswith("file:") and not Path(unquote(urlsplit(address).path)).is_file()


def _download(wheel: LockedWheel, url: str, sources: Sources) -> Download:
    return Download(name=wheel.file, url=url, sha256=wheel.sha256, size=wheel.size, headers=sources.headers(url))


@dataclass(frozen=True)
class _Resolver:
    platform: Platform
    sources: Sources
    store: Store
    progress: Progress
    preferences: dict[str, str]

    def resolve(self, wanted: Mapping[str, str], torch_backend: str | None) -> _Found:
        """Try torch's builds in turn (see `attempts`); the first reason is the one that is told."""
        reason: NoSolutionError | None = None
        torch_is_why = False
        tried: dict[tuple[str, str | None, bool], _Found | NoSolutionError] = {}
        has_spare = bool(self.sources.spare)
        for torch, backend, spare, fits in attempts(wanted, torch_backend, has_spare=has_spare):
            key = (torch, backend, spare)
            if key not in tried:
                tried[key] = self._once({**wanted, **({"torch": torch} if torch else {})}, backend, spare=spare)
            outcome = tried[key]
            if isinstance(outcome, _Found):
                if torch_backend is None or cuda_fits(outcome.pylock, torch_backend, fits):
                    return outcome
                outcome = wrong_cuda(outcome.pylock, torch_backend)
            reason = reason or outcome
            torch_is_why = torch_is_why or re.search(r"\btorch\b", outcome.message) is not None
            if not torch_is_why and spare == has_spare:
                break
        raise reason or ResolveError("no package is asked for")

    def _once(self, wanted: Mapping[str, str], backend: str | None, *, spare: bool) -> _Found | NoSolutionError:
        try:
            pylock = compile_pylock(
                [requirement(name, value) for name, value in sorted(wanted.items())],
                platform=self.platform,
                sources=self.sources,
                store=self.store,
                progress=self.progress,
                torch_backend=backend,
                spare=spare,
                preferences=self.preferences,
            )
        except NoSolutionError as error:
            return error
        except UnreachableError as error:
            if backend is None:
                raise
            raise ResolveError(
                f"torch for {backend} is not in your package indexes, and PyTorch's own: {error.message}",
                hint=f"put its {backend} wheel into a folder that pip's find-links or UV_FIND_LINKS names",
            ) from error
        return _Found(pylock=pylock, torch_backend=backend, spare=spare)

    def index_names(self, chosen: Sequence[tuple[Package, PackageWheel]], found: _Found) -> dict[str, str]:
        """The name of each package's index."""
        names: dict[str, str] = {}
        if self.sources.named:
            pins = [f"{package.name}=={package.version}" for package, _ in chosen if not torch_build(package)]
            names = indexes_of(
                pins,
                platform=self.platform,
                sources=self.sources,
                store=self.store,
                progress=self.progress,
                spare=found.spare,
            )
        for package, wheel in chosen:
            if build := torch_build(package):
                names[package.name] = f"pytorch-{build}"
            elif wheel.url and wheel.url.startswith("file:") and package.name not in names:
                names[package.name] = "find-links"
        return names

    def find_again(self, wheels: Sequence[LockedWheel]) -> dict[str, str]:
        """Addresses by digest, of exact versions."""
        addresses: dict[str, str] = {}
        backends = {wheel.index.removeprefix("pytorch-") for wheel in wheels if wheel.index.startswith("pytorch-")}
        tries = [(None, False), *([(None, True)] if self.sources.spare else []), *((name, False) for name in backends)]
        reason: ResolveError | None = None
        for backend, spare in tries:
            rest = [wheel for wheel in wheels if wheel.sha256 not in addresses]
            if not rest:
                break
            outcome = self._offered(rest, backend, spare=spare)
            if isinstance(outcome, NoSolutionError):
                reason = reason or outcome
                # One version that is gone hides the others: ask for each by itself.
                for wheel in rest if len(rest) > 1 else ():
                    single = self._offered([wheel], backend, spare=spare)
                    addresses |= {} if isinstance(single, NoSolutionError) else single
            else:
                addresses |= outcome
        absent = [wheel.file for wheel in wheels if wheel.sha256 not in addresses]
        if absent:
            raise ResolveError(
                f"no package index offers {', '.join(absent)} with the locked digest",
                hint="take it from a bundle (kitbuild fetch RECIPE --from BUNDLE), or lock anew",
            ) from reason
        return addresses

    def _offered(
        self, wheels: Sequence[LockedWheel], backend: str | None, *, spare: bool
    ) -> dict[str, str] | NoSolutionError:
        try:
            pylock = compile_pylock(
                [f"{wheel.name}=={wheel.version}" for wheel in wheels],
                platform=self.platform,
                sources=self.sources,
                store=self.store,
                progress=self.progress,
                torch_backend=backend,
                spare=spare,
                dependencies=False,
            )
        except NoSolutionError as error:
            return error
        return {
            wheel.hashes["sha256"]: _address(wheel)
            for package in pylock.packages
            for wheel in package.wheels or ()
            if "sha256" in wheel.hashes
        }


def _select(pylock: Pylock, platform: Platform) -> Iterator[tuple[Package, PackageWheel]]:
    try:
        for package, item in pylock.select(environment=platform.environment, tags=platform.tags):
            if not isinstance(item, PackageWheel):
                raise ResolveError(f"{package.name} {package.version} has no wheel for the target")
            yield package, item
    except PylockSelectError as error:
        raise ResolveError(f"no wheel for the target: {error}") from error


def _with_digests(
    chosen: Sequence[tuple[Package, PackageWheel]], resolver: _Resolver
) -> Iterator[tuple[Package, PackageWheel, str, int]]:
    """With digest and size of each wheel; what an index does not say is asked for, at worst by fetching."""
    environ = resolver.sources.environ
    for package, wheel in chosen:
        address = _address(wheel)
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
    address = _address(wheel)
    if store.record(ADDRESSES, sha256) != address:
        store.write_record(ADDRESSES, sha256, address)
    return LockedWheel(
        name=package.name,
        version=str(package.version),
        file=unquote(wheel.filename),
        size=size,
        sha256=sha256,
        index=names.get(package.name, "pypi"),
    )


def _address(wheel: PackageWheel) -> str:
    if wheel.url is not None:
        return wheel.url
    if wheel.path is None:
        raise ResolveError(f"{wheel.filename} has no address")
    return Path(wheel.path).absolute().as_uri()
