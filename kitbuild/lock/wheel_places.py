"""Step 2: where the locked wheels are, and fetching them.

The lock names files and digests only. Where they were found is remembered in the store; on another machine they
are found again by asking uv for the exact versions and taking the files of the locked digest.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from kitbuild.errors import ResolveError
from kitbuild.lock.platform import Platform
from kitbuild.lock.sdists import rebuild
from kitbuild.lock.uv import NoSolutionError, Sources, compile_pylock
from kitbuild.progress import Silent
from kitbuild.store.download import Download, fetch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from packaging.pylock import PackageWheel

    from kitbuild.lock.models import Lock, LockedWheel
    from kitbuild.progress import Progress
    from kitbuild.store import Store

ADDRESSES = "wheel-addresses"


def address_of(wheel: PackageWheel) -> str:
    """Where uv found it: a URL, also of a local file."""
    if wheel.url is not None:
        return wheel.url
    if wheel.path is None:
        raise ResolveError(f"{wheel.filename} has no address")
    return Path(wheel.path).absolute().as_uri()


def remember(sha256: str, address: str, *, store: Store) -> None:
    """Where a file of this digest was found."""
    if store.record(ADDRESSES, sha256) != address:
        store.write_record(ADDRESSES, sha256, address)


@dataclass(frozen=True)
class _Ask:
    """For which platform, and whom."""

    platform: Platform
    sources: Sources
    store: Store
    progress: Progress


def locate_wheels(
    wheels: Iterable[LockedWheel],
    *,
    lock: Lock,
    indexes: Mapping[str, str],
    store: Store,
    environ: Mapping[str, str],
    progress: Progress | None = None,
    anew: bool = False,
    told: Mapping[str, str] | None = None,
) -> list[Download]:
    """Where the files of `wheels` are that the store lacks. Addresses remembered are used unless `anew`.

    `indexes` are the recipe's: the lock has their names only; `told` are addresses by digest that a pylock.toml beside
    it has. What was built from source is built again here and now.
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
    addresses = {} if anew else {**(told or {}), **_remembered(missing, store)}
    unknown = [wheel for wheel in missing if wheel.sha256 not in addresses]
    if unknown:
        addresses |= _find_again(unknown, _Ask(platform, sources, store, progress))
    return [_download(wheel, addresses[wheel.sha256], sources) for wheel in missing]


def addresses(
    lock: Lock, *, indexes: Mapping[str, str], store: Store, environ: Mapping[str, str], progress: Progress
) -> dict[str, str]:
    """Where each wheel is that is not built here and not on this machine alone, by digest; found anew where unknown."""
    published = [wheel for wheel in lock.wheels if not wheel.built]
    found = _remembered(published, store)
    unknown = [wheel for wheel in published if wheel.sha256 not in found and not store.has(wheel.sha256)]
    if unknown:
        platform = Platform(python=lock.base.python, glibc=lock.base.glibc, architecture=lock.base.architecture)
        found |= _find_again(unknown, _Ask(platform, Sources.read(indexes, environ), store, progress))
    return {sha256: url for sha256, url in found.items() if not url.startswith("file:")}


def fetch_wheels(
    wheels: Iterable[LockedWheel], *, store: Store, environ: Mapping[str, str], progress: Progress
) -> None:
    """Fetch wheels that this machine has just resolved, from the addresses that it remembers (else: `locate_wheels`)."""
    missing = [wheel for wheel in wheels if not store.has(wheel.sha256)]
    sources = Sources.read({}, environ)
    addresses = _remembered(missing, store)
    downloads = [_download(wheel, addresses[wheel.sha256], sources) for wheel in missing]
    fetch(store, downloads, progress=progress, environ=sources.trusting)


def _remembered(wheels: Iterable[LockedWheel], store: Store) -> dict[str, str]:
    found = {wheel.sha256: store.record(ADDRESSES, wheel.sha256) for wheel in wheels}
    return {sha256: address for sha256, address in found.items() if isinstance(address, str) and not _gone(address)}


def _gone(address: str) -> bool:
    return address.startswith("file:") and not Path(unquote(urlsplit(address).path)).is_file()


def _download(wheel: LockedWheel, url: str, sources: Sources) -> Download:
    return Download(name=wheel.file, url=url, sha256=wheel.sha256, size=wheel.size, headers=sources.headers(url))


def _find_again(wheels: Sequence[LockedWheel], ask: _Ask) -> dict[str, str]:
    """Addresses by digest, of exact versions."""
    addresses: dict[str, str] = {}
    backends = {wheel.index.removeprefix("pytorch-") for wheel in wheels if wheel.index.startswith("pytorch-")}
    tries = [(None, False), *([(None, True)] if ask.sources.has_more else []), *((name, False) for name in backends)]
    reason: ResolveError | None = None
    for backend, spare in tries:
        rest = [wheel for wheel in wheels if wheel.sha256 not in addresses]
        if not rest:
            break
        outcome = _offered(rest, ask, backend, spare=spare)
        if isinstance(outcome, NoSolutionError):
            reason = reason or outcome
            # One version that is gone hides the others: ask for each by itask.
            for wheel in rest if len(rest) > 1 else ():
                single = _offered([wheel], ask, backend, spare=spare)
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
    wheels: Sequence[LockedWheel], ask: _Ask, backend: str | None, *, spare: bool
) -> dict[str, str] | NoSolutionError:
    try:
        pylock = compile_pylock(
            [f"{wheel.name}=={wheel.version}" for wheel in wheels],
            platform=ask.platform,
            sources=ask.sources,
            store=ask.store,
            progress=ask.progress,
            torch_backend=backend,
            spare=spare,
            dependencies=False,
        )
    except NoSolutionError as error:
        return error
    return {
        wheel.hashes["sha256"]: address_of(wheel)
        for package in pylock.packages
        for wheel in package.wheels or ()
        if "sha256" in wheel.hashes
    }
