"""A base in the store is all there, or not there."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from kitbuild.base import bases, oci
from kitbuild.errors import ResolveError, VerificationError
from kitbuild.progress import Silent
from tests.base import made

if TYPE_CHECKING:
    from kitbuild.store import Store


def test_what_is_added_is_found(store: Store) -> None:
    """A base comes back by its manifest digest, and its manifest's bytes have that digest."""
    base = made.add(store)
    assert base == bases.recorded(store, base.manifest_digest)
    assert base.manifest_digest == oci.digest_of(bases.manifest(store, base))
    assert base.config_digest == oci.digest_of(bases.config(store, base))
    assert base.diff_ids == tuple(digest for digest, _path in bases.layers(store, base))


def test_a_base_without_a_layer_is_not_there(store: Store) -> None:
    """A record whose bytes are gone is no base; asking for the layer is exit 4."""
    base = made.add(store)
    store.path(base.diff_ids[1].removeprefix("sha256:")).unlink()
    assert bases.recorded(store, base.manifest_digest) is None
    with pytest.raises(ResolveError, match="a layer of kitbuild/base-cpu"):
        bases.layers(store, base)


def test_a_layer_that_is_not_the_configurations_is_refused(store: Store) -> None:
    """Exit 7, and nothing is recorded."""
    data = made.layer(made.DEBIAN)
    with pytest.raises(VerificationError, match="b: layer 1 of 1: sha256 is"):
        bases.add(
            store,
            name="b",
            config=made.config([data]),
            openers=[partial(made.opened, data + b"x")],
            progress=Silent(),
        )
    assert not store.records("bases")


def test_layers_missing_from_the_source_are_refused(store: Store) -> None:
    """A configuration that names more layers than there are is exit 7."""
    data = made.layer(made.DEBIAN)
    with pytest.raises(VerificationError, match="b names 2 layers and has 1"):
        bases.add(
            store,
            name="b",
            config=made.config([data, data]),
            openers=[partial(made.opened, data)],
            progress=Silent(),
        )


def test_bytes_without_a_record_are_taken(store: Store) -> None:
    """What came in a bundle has no record: the lock's description is enough, once the bytes give its digests."""
    base = made.add(store)
    (store.root / "records/bases" / base.manifest_digest[7:]).unlink()
    assert bases.recorded(store, base.manifest_digest) is None
    bases.take(store, base)
    assert bases.recorded(store, base.manifest_digest) == base


@pytest.mark.parametrize("field", ["manifest_digest", "diff_ids"])
def test_bytes_that_are_another_base_are_not_taken(store: Store, field: str) -> None:
    """A description whose digests do not follow from the bytes is exit 7, and nothing is recorded."""
    base = made.add(store)
    other = {"manifest_digest": "sha256:" + "0" * 64, "diff_ids": base.diff_ids[::-1]}[field]
    (store.root / "records/bases" / base.manifest_digest[7:]).unlink()
    with pytest.raises(VerificationError, match="its layers give another manifest"):
        bases.take(store, base.model_copy(update={field: other}))
    assert not store.records("bases")


def test_a_base_that_is_not_all_there_is_not_taken(store: Store) -> None:
    """Without each layer there is nothing to record."""
    base = made.add(store)
    (store.root / "records/bases" / base.manifest_digest[7:]).unlink()
    store.path(base.diff_ids[1][7:]).unlink()
    bases.take(store, base)
    assert not store.records("bases")
