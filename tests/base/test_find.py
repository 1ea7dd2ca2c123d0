"""A base is looked up in the store, the engine, the registry; a locked one is never replaced by another."""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING, Any

import pytest

from kitbuild.base import bases, oci
from kitbuild.base import find as finding
from kitbuild.base.models import Upstream
from kitbuild.base.registry import push
from kitbuild.base.targets import load_bootstrap
from kitbuild.errors import ImageError, ResolveError
from kitbuild.store import Store
from tests.base import made

if TYPE_CHECKING:
    from pathlib import Path

    from kitbuild.base.models import LockedBase

NO_ENGINE = made.raising(ImageError("no engine answers"))
NAME = "kitbuild/base-cpu"


@pytest.fixture
def elsewhere(tmp_path: Path) -> Store:
    """Another machine's store."""
    return Store.open({"KITBUILD_HOME": str(tmp_path / "elsewhere")})


def sent(base: LockedBase, store: Store, reference: str) -> None:
    push(
        reference,
        bases.manifest(store, base),
        bases.config(store, base),
        bases.layers(store, base),
        environ={},
        progress=made.Notes(),
    )


def look(store: Store, reference: str | None = None, **changes: Any) -> tuple[LockedBase, list[str]]:
    notes = made.Notes()
    arguments: dict[str, Any] = {"target": "cpu", "environ": {}, "client_factory": NO_ENGINE} | changes
    return finding.find(reference, store=store, progress=notes, **arguments), notes.lines


def ensured(base: LockedBase, store: Store, engine: Any, notes: made.Notes) -> LockedBase:
    return finding.ensure(base, store=store, environ={}, client_factory=lambda: engine, progress=notes)


def test_store_first(store: Store) -> None:
    """A default base that the store has, made from today's definition, is taken without asking anyone."""
    base = made.add(store)
    bases.remember_name(store, base, definition=load_bootstrap("cpu").sha256)
    assert look(store) == (base, [f"base {NAME} @ {base.manifest_digest} (store)"])


def test_one_image_under_two_names(store: Store) -> None:
    """A base that the store has under several names is called what was asked for: a lock does not tell what came before."""
    base = made.add(store)
    bases.remember_name(store, base, definition=load_bootstrap("cpu").sha256)
    made.add(store, "localhost:1/mine")
    assert look(store)[0] == base
    assert look(store, digest=base.manifest_digest)[0] == base


def test_old_definition_is_made_anew(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A default base that was made from another definition is not taken for a new lock; a fresh one is made."""
    bases.remember_name(store, made.add(store), definition="0" * 64)
    fresh = made.add(store, mark="fresh")
    monkeypatch.setattr(finding, "bootstrap", lambda *_args, **_keywords: fresh)
    base, notes = look(store)
    assert base == fresh
    assert notes == [
        f"base {NAME} is not in the store or the engine (none answers): making it",
        (
            f"others need this very base for the same image: kitbuild base bootstrap cpu --push REGISTRY/{NAME},"
            " with KITBUILD_BASE_REGISTRY=REGISTRY for everyone"
        ),
    ]


def test_engine_second(store: Store, elsewhere: Store) -> None:
    """What the engine has is taken into the store: the same digests as on the machine that made it."""
    base = made.add(elsewhere)
    engine = made.FakeEngine({NAME: held(base, elsewhere)})
    found, notes = look(store, client_factory=lambda: engine)
    assert (found, notes) == (base, [f"base {NAME} @ {base.manifest_digest} (engine)"])
    assert base == bases.recorded(store, base.manifest_digest)


def held(base: LockedBase, store: Store) -> tuple[bytes, list[bytes]]:
    return bases.config(store, base), [path.read_bytes() for _digest, path in bases.layers(store, base)]


def test_registry_third(store: Store, elsewhere: Store, registry: str) -> None:
    """A default base comes from the registry that KITBUILD_BASE_REGISTRY names."""
    base = made.add(elsewhere, mark="third")
    sent(base, elsewhere, f"{registry}/third/{NAME}:latest")
    found, notes = look(store, environ={"KITBUILD_BASE_REGISTRY": f"{registry}/third/"})
    assert found == base
    assert notes == [f"base {NAME} @ {base.manifest_digest} (registry {registry})"]


def test_locked_digest_from_registry(store: Store, elsewhere: Store, registry: str) -> None:
    """A lock's digest is pulled by that digest, wherever the tag points by now."""
    old, new = made.add(elsewhere, mark="old"), made.add(elsewhere, mark="new")
    for base in (old, new):
        sent(base, elsewhere, f"{registry}/moved/{NAME}:latest")
    environ = {"KITBUILD_BASE_REGISTRY": f"{registry}/moved"}
    found, _notes = look(store, digest=old.manifest_digest, environ=environ)
    assert found.manifest_digest == old.manifest_digest
    notes = made.Notes()
    arguments: dict[str, Any] = {"environ": environ, "client_factory": NO_ENGINE, "progress": notes}
    assert new == finding.ensure(new, store=store, **arguments)
    assert bases.held(store, new)


def test_locked_digest_from_engine_under_another_tag(store: Store, elsewhere: Store) -> None:
    """The engine is asked by configuration digest too, so a renamed base is found."""
    base = made.add(elsewhere)
    engine = made.FakeEngine({"other:name": held(base, elsewhere)})
    found = ensured(base, store, engine, made.Notes())
    assert found == base
    assert bases.held(store, base)


def test_locked_digest_nowhere(store: Store, registry: str) -> None:
    """Exit 4: the message tells the digest and where we looked, the hint how to get it. Nothing is made."""
    digest = "sha256:" + "1" * 64
    with pytest.raises(ResolveError) as caught:
        look(store, digest=digest, environ={"KITBUILD_BASE_REGISTRY": f"{registry}/x"})
    assert caught.value.message == (
        f"the base {NAME} @ {digest} that the lock names is nowhere: not in the store or the engine (none answers) or"
        f" the registry {registry}"
    )
    assert "KITBUILD_BASE_REGISTRY" in (caught.value.hint or "")
    assert "kitbuild fetch --from BUNDLE" in (caught.value.hint or "")


def test_default_name_that_now_means_another(store: Store) -> None:
    """A lock's base stays the lock's, and it is said that the name means another one by now."""
    old, new = made.add(store, mark="old"), made.add(store, mark="new")
    bases.remember_name(store, new)
    base, notes = look(store, digest=old.manifest_digest)
    assert base == old
    assert notes == [f"base {NAME} now means {new.manifest_digest} here; the lock's {old.manifest_digest} is used"]


def test_engine_tag_that_moved(store: Store, elsewhere: Store) -> None:
    """An engine whose tag means another base than the lock's says so, and it is not taken."""
    old, new = made.add(elsewhere, mark="old"), made.add(elsewhere, mark="new")
    engine = made.FakeEngine({NAME: held(new, elsewhere)})
    notes = made.Notes()
    with pytest.raises(ResolveError, match=r"that the lock names is nowhere: not in the store or the engine$"):
        ensured(old, store, engine, notes)
    assert notes.lines == [f"base {NAME} in the engine is {new.manifest_digest}, not the lock's {old.manifest_digest}"]


def test_registry_tag_that_moved(store: Store, elsewhere: Store, registry: str) -> None:
    """A tag that the store knows and that the registry moved since is reported; the store's base is used."""
    reference = f"{registry}/tag/base:1"
    first, second = made.add(elsewhere, reference, mark="1"), made.add(elsewhere, reference, mark="2")
    sent(first, elsewhere, reference)
    found, _notes = look(store, reference)
    sent(second, elsewhere, reference)
    again, notes = look(store, reference)
    assert again == found
    assert notes[1] == (
        f"base {reference} now points to {second.manifest_digest}; the store's {first.manifest_digest} is used"
    )


def test_registry_tag_of_a_lock_that_moved(store: Store, elsewhere: Store, registry: str) -> None:
    """A tag that the registry moved since a lock was made is reported when it is locked again, and is not followed."""
    reference = f"{registry}/locked/base:1"
    first, second = made.add(elsewhere, reference, mark="1"), made.add(elsewhere, reference, mark="2")
    sent(first, elsewhere, reference)
    for place in (elsewhere, store):
        base, notes = look(place, reference, digest=first.manifest_digest)
        assert base == first
        assert not [line for line in notes if "points to" in line]
    sent(second, elsewhere, reference)
    for place in (elsewhere, store):
        base, notes = look(place, reference, digest=first.manifest_digest)
        assert base == first
        told = f"base {reference} now points to {second.manifest_digest}; the lock's {first.manifest_digest} is used"
        assert notes[-1] == told


def test_named_base_nowhere(store: Store, registry: str) -> None:
    """A recipe's own base that does not exist is exit 4; it is not replaced by the default."""
    with pytest.raises(ResolveError) as caught:
        look(store, f"{registry}/team/none:1")
    assert caught.value.message == (
        f"the base {registry}/team/none:1 is nowhere: not in the store or the engine (none answers) or"
        f" the registry {registry}"
    )


def test_registry_down_while_locking(store: Store) -> None:
    """With a base registry that does not answer, no other base is made behind the team's back."""
    with pytest.raises(ResolveError, match="the registry localhost:9 does not answer"):
        look(store, environ={"KITBUILD_BASE_REGISTRY": "localhost:9"})


def test_cuda_base_needs_an_engine(store: Store) -> None:
    """A CUDA base that is nowhere is built; without an engine that is the factory's own error."""
    with pytest.raises(ImageError, match="no engine answers"):
        look(store, target="cuda129")


def test_foreign_base_is_found_again(store: Store, elsewhere: Store, registry: str) -> None:
    """A compressed image of someone else's has our digest in the lock, and is found again by the registry's own."""
    reference = f"{registry}/foreign/base:1"
    layers = [gzip.compress(made.layer(made.DEBIAN), mtime=0)]
    configuration = made.config([made.layer(made.DEBIAN)])
    manifest = oci.manifest_bytes(configuration, [(oci.digest_of(layers[0]), len(layers[0]))])
    packed = [(oci.digest_of(layers[0]), made.write(store.root, layers)[0])]
    push(reference, manifest, configuration, packed, environ={}, progress=made.Notes())
    base, _notes = look(store, reference)
    assert base.manifest_digest != oci.digest_of(manifest)
    assert base.upstream == Upstream(name=f"{registry}/foreign/base", digest=oci.digest_of(manifest))
    sent(made.add(elsewhere, mark="moved"), elsewhere, reference)
    notes = made.Notes()
    finding.ensure(base, store=elsewhere, environ={}, client_factory=NO_ENGINE, progress=notes)
    assert notes.lines == [f"base {reference} @ {base.manifest_digest} (registry {registry})"]
    assert bases.held(elsewhere, base)
