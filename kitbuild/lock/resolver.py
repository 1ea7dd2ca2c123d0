"""Step 2: a set of requirements resolved by uv, torch's build for the target first."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kitbuild.errors import ResolveError
from kitbuild.lock.torch_builds import attempts, cuda_fits, requirement, torch_build, wrong_cuda
from kitbuild.lock.uv import NoSolutionError, UnreachableError, compile_pylock, indexes_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from packaging.pylock import Package, PackageWheel, Pylock

    from kitbuild.lock.platform import Platform
    from kitbuild.lock.uv import Sources
    from kitbuild.progress import Progress
    from kitbuild.store import Store


@dataclass(frozen=True, kw_only=True)
class Found:
    """A resolution and how it was reached."""

    pylock: Pylock
    torch_backend: str | None
    spare: bool


@dataclass(frozen=True)
class Resolver:
    """Asks uv for one platform from one set of sources."""

    platform: Platform
    sources: Sources
    store: Store
    progress: Progress
    preferences: dict[str, str]

    def resolve(self, wanted: Mapping[str, str], torch_backend: str | None) -> Found:
        """Try torch's builds in turn (see `attempts`); the first reason is the one that is told."""
        reason: NoSolutionError | None = None
        torch_is_why = False
        tried: dict[tuple[str, str | None, bool], Found | NoSolutionError] = {}
        has_spare = self.sources.has_more
        for torch, backend, spare, fits in attempts(wanted, torch_backend, has_spare=has_spare):
            key = (torch, backend, spare)
            if key not in tried:
                tried[key] = self._once({**wanted, **({"torch": torch} if torch else {})}, backend, spare=spare)
            outcome = tried[key]
            if isinstance(outcome, Found):
                if torch_backend is None or cuda_fits(outcome.pylock, torch_backend, fits):
                    return outcome
                outcome = wrong_cuda(outcome.pylock, torch_backend)
            reason = reason or outcome
            torch_is_why = torch_is_why or re.search(r"\btorch\b", outcome.message) is not None
            if not torch_is_why and spare == has_spare:
                break
        raise reason or ResolveError("no package is asked for")

    def _once(self, wanted: Mapping[str, str], backend: str | None, *, spare: bool) -> Found | NoSolutionError:
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
        return Found(pylock=pylock, torch_backend=backend, spare=spare)

    def index_names(self, chosen: Sequence[tuple[Package, PackageWheel]], found: Found) -> dict[str, str]:
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
