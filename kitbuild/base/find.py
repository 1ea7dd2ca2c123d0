"""Find a base: in the store, in the engine, in a registry; while locking, make a default one that is nowhere.

A default base is called `kitbuild/base-<target>`; `KITBUILD_BASE_REGISTRY` (say `ghcr.io/team`) is where it is
shared. No registry is asked for it otherwise.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kitbuild.base import bases, engine
from kitbuild.base.bootstrap import bootstrap, host_architecture
from kitbuild.base.build import build, definition
from kitbuild.base.models import LockedBase, Upstream
from kitbuild.base.reference import Reference
from kitbuild.base.registry import Registry
from kitbuild.base.targets import Target, load_bootstrap, load_target
from kitbuild.errors import KitbuildError, ResolveError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import docker

    from kitbuild.progress import Progress
    from kitbuild.store import Store

    ClientFactory = Callable[[], docker.DockerClient]

REGISTRY_VARIABLE = "KITBUILD_BASE_REGISTRY"


def find(
    reference: str | None,
    *,
    target: str,
    store: Store,
    environ: Mapping[str, str],
    client_factory: ClientFactory,
    progress: Progress,
    digest: str | None = None,
) -> LockedBase:
    """The base that `reference` means (None: the default of `target`), with every byte in the store.

    With `digest`, which an existing lock names, exactly that base, never another; without, while locking, a default
    base that is nowhere is made.
    """
    places = _Places(store=store, environ=environ, client_factory=client_factory, progress=progress)
    chosen = load_target(target)
    name = reference or chosen.base
    remote = places.remote(name, default=reference is None)
    if digest is not None:
        locked = places.exactly(name, digest, candidates=_candidates(remote, digest))
        places.report_moved(locked, remote)
        return locked
    made_from = _definition(chosen) if reference is None else None
    base = places.in_store(name, made_from, remote) or places.in_engine(name) or places.in_registry(name, remote)
    if base is not None:
        return base
    if reference is None:
        return places.make(chosen, remote)
    raise ResolveError(
        f"the base {name} is nowhere: not in {places.looked}",
        hint="check the name; or leave `image.base` out for the default base",
    )


def ensure(
    base: LockedBase,
    *,
    store: Store,
    environ: Mapping[str, str],
    client_factory: ClientFactory,
    progress: Progress,
) -> LockedBase:
    """Bring every byte of a locked base into the store; exit 4 where that base is nowhere."""
    places = _Places(store=store, environ=environ, client_factory=client_factory, progress=progress)
    default = base.name.startswith("kitbuild/base-")
    remote = places.remote(base.name, default=default)
    upstream = base.upstream.digest if base.upstream else None
    candidates = _candidates(remote, base.manifest_digest, upstream)
    bases.take(store, base)
    places.exactly(base.name, base.manifest_digest, candidates=candidates, config_digest=base.config_digest)
    return base


class _Places:
    """The places that are looked at, in order; `looked` tells where we have been."""

    def __init__(
        self, *, store: Store, environ: Mapping[str, str], client_factory: ClientFactory, progress: Progress
    ) -> None:
        self._store = store
        self._environ = environ
        self._client_factory = client_factory
        self._progress = progress
        self._looked = ["the store"]
        self._engine_asked = False
        self._engine: docker.DockerClient | None = None

    @property
    def looked(self) -> str:
        """For the message that it is nowhere."""
        return " or ".join(self._looked)

    def remote(self, name: str, *, default: bool) -> Reference | None:
        """Where a registry would have it; a default base is in no registry but the one that is configured."""
        if not default:
            return Reference.parse(name)
        prefix = self._environ.get(REGISTRY_VARIABLE, "").rstrip("/")
        return Reference.parse(f"{prefix}/{name}") if prefix else None

    def in_store(self, name: str, made_from: str | None, remote: Reference | None) -> LockedBase | None:
        """What the name meant last; a default base only while it would be made from the same definition."""
        known = bases.named(self._store, name)
        if known is None or (made_from and known["definition"] not in {made_from, None}):
            return None
        base = bases.recorded(self._store, known["manifest"])
        if base is None:
            return None
        self._progress.note(f"base {name} @ {base.manifest_digest} (store)")
        self._report_moved(known, remote)
        return base.model_copy(update={"name": name})  # recorded by digest, perhaps under another name

    def _report_moved(self, known: dict[str, str | None], remote: Reference | None) -> None:
        """Say so where the tag means another image by now; no registry is no reason to stop."""
        now = self._points_to(remote) if known["origin"] is not None else None
        if now is not None and now != known["origin"]:
            self._progress.note(f"base {remote} now points to {now}; the store's {known['origin']} is used")

    def report_moved(self, locked: LockedBase, remote: Reference | None) -> None:
        """Say so where the tag of a locked base means another image by now: it is never followed."""
        known = bases.named(self._store, locked.name)
        origin = known["origin"] if known and known["manifest"] == locked.manifest_digest else None
        now = self._points_to(remote)
        same = {locked.manifest_digest, origin, locked.upstream.digest if locked.upstream else None}
        if now is not None and now not in same:
            self._progress.note(f"base {remote} now points to {now}; the lock's {locked.manifest_digest} is used")

    def _points_to(self, remote: Reference | None) -> str | None:
        if remote is None or remote.digest:
            return None
        try:
            return Registry(remote, environ=self._environ).head()
        except ResolveError:
            return None

    def in_engine(self, name: str) -> LockedBase | None:
        """The engine's image of this name."""
        client = self._client()
        image = engine.find_image(client, name) if client else None
        if client is None or image is None:
            return None
        base = engine.import_base(client, image, name=name, store=self._store, progress=self._progress)
        origin = engine.origin_of(image)
        bases.remember_name(self._store, base, origin=origin.digest if origin else None)
        self._progress.note(f"base {name} @ {base.manifest_digest} (engine)")
        return base

    def in_registry(self, name: str, remote: Reference | None) -> LockedBase | None:
        """The registry's image of this name, pulled."""
        if remote is None:
            return None
        self._looked.append(f"the registry {remote.host}")
        base, origin = self._pull(name, remote)
        if base is not None:
            bases.remember_name(self._store, base, origin=origin)
            self._progress.note(f"base {name} @ {base.manifest_digest} (registry {remote.host})")
        return base

    def _pull(self, name: str, remote: Reference) -> tuple[LockedBase | None, str | None]:
        registry = Registry(remote, environ=self._environ)
        image = registry.image(architecture=host_architecture())
        if image is None:
            return None, None
        with self._store.scratch() as folder:
            base = bases.add(
                self._store,
                name=name,
                config=image.config,
                openers=[
                    partial(registry.layer, digest, folder=folder, progress=self._progress) for digest in image.layers
                ],
                progress=self._progress,
                origin=Upstream(name=remote.familiar, digest=image.digest),
            )
        return base, image.digest

    def make(self, target: Target, remote: Reference | None) -> LockedBase:
        """A default base that is nowhere, made on the spot."""
        self._progress.note(f"base {target.base} is not in {self.looked}: making it")
        if target.dockerfile is None:
            base = bootstrap(target.target, store=self._store, progress=self._progress, environ=self._environ)
        else:
            base = build(target.target, client=self._client_factory(), store=self._store, progress=self._progress)
        where = str(remote) if remote else f"REGISTRY/{target.base}, with {REGISTRY_VARIABLE}=REGISTRY for everyone"
        verb = "bootstrap" if target.dockerfile is None else "build"
        self._progress.note(
            f"others need this very base for the same image: kitbuild base {verb} {target.target} --push {where}"
        )
        return base

    def exactly(
        self, name: str, digest: str, *, candidates: Sequence[Reference], config_digest: str | None = None
    ) -> LockedBase:
        """The base with this manifest digest, from wherever it is."""
        if base := bases.recorded(self._store, digest):
            self._report_other_name(name, digest)
            return base.model_copy(update={"name": name})
        base = self._engine_exactly(name, digest, config_digest) or self._registry_exactly(name, digest, candidates)
        if base is not None:
            return base
        raise ResolveError(
            f"the base {name} @ {digest} that the lock names is nowhere: not in {self.looked}",
            hint="get it from whoever has it: set KITBUILD_BASE_REGISTRY to the registry it was pushed to, or "
            "`kitbuild fetch --from BUNDLE`; or lock anew on the base that is here",
        )

    def _report_other_name(self, name: str, digest: str) -> None:
        known = bases.named(self._store, name)
        if known and known["manifest"] != digest:
            self._progress.note(f"base {name} now means {known['manifest']} here; the lock's {digest} is used")

    def _engine_exactly(self, name: str, digest: str, config_digest: str | None) -> LockedBase | None:
        client = self._client()
        for candidate in filter(None, (config_digest, digest, name)):
            image = engine.find_image(client, candidate) if client else None
            if client is None or image is None:
                continue
            base = engine.import_base(client, image, name=name, store=self._store, progress=self._progress)
            if base.manifest_digest == digest:
                self._progress.note(f"base {name} @ {digest} (engine)")
                return base
            self._progress.note(f"base {name} in the engine is {base.manifest_digest}, not the lock's {digest}")
        return None

    def _registry_exactly(self, name: str, digest: str, candidates: Sequence[Reference]) -> LockedBase | None:
        for candidate in candidates:
            place = f"the registry {candidate.host}"
            self._looked += [] if place in self._looked else [place]
            base, _origin = self._pull(name, candidate)
            if base is not None and base.manifest_digest == digest:
                self._progress.note(f"base {name} @ {digest} (registry {candidate.host})")
                return base
            if base is not None:
                self._progress.note(f"base {candidate} now points to {base.manifest_digest}, not the lock's {digest}")
        return None

    def _client(self) -> docker.DockerClient | None:
        """The engine, where one answers."""
        if not self._engine_asked:
            self._engine_asked = True
            try:
                self._engine = self._client_factory()
            except KitbuildError:
                self._looked.append("the engine (none answers)")
            else:
                self._looked.append("the engine")
        return self._engine


def _candidates(remote: Reference | None, *digests: str | None) -> tuple[Reference, ...]:
    """Where in a registry an exact base may be: by these digests, then where its name points."""
    return (*(remote.at(digest) for digest in digests if digest), remote) if remote else ()


def _definition(target: Target) -> str:
    return load_bootstrap(target.target).sha256 if target.dockerfile is None else definition(target)
