"""Records: facts that can be made again, so a damaged one is no fact."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import filelock
import pytest

from kitbuild.errors import ResolveError

if TYPE_CHECKING:
    from kitbuild.store import Store

VALUE = {"files": {"/a": "0" * 64}, "size": 12}


@pytest.mark.parametrize("value", [VALUE, None, [], "text", {}])
def test_what_was_written_is_read(store: Store, value: object) -> None:
    """Any JSON comes back, and alone among its kind."""
    store.write_record("layers", "key", value)
    assert store.record("layers", "key") == value
    assert store.record("layers", "other") is None
    assert store.records("layers") == ({} if value is None else {"key": value})


def test_each_flipped_bit_is_found(store: Store) -> None:
    """A record that was damaged anywhere is none: neither another value, nor an error."""
    store.write_record("layers", "key", VALUE)
    path = store.root / "records/layers/key"
    whole = path.read_bytes()
    for place in range(len(whole) - 1):  # the last byte is the final newline
        for bit in (1, 32):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
            assert store.record("layers", "key") is None, place
    for size in range(len(whole) - 1):
        path.write_bytes(whole[:size])
        assert store.record("layers", "key") in (None, VALUE), size


def test_a_lock_file_of_somebody_else(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that another user (or sudo) wrote is told as such, not as a bug."""

    def refuse(*_arguments: object, **_named: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    with pytest.raises(ResolveError, match="cannot be written: Permission denied"), store.making("a thing"):
        pass


def test_a_record_without_a_digest_is_read(store: Store) -> None:
    """An older kitbuild wrote the JSON alone."""
    store.write_record("layers", "key", VALUE)
    path = store.root / "records/layers/key"
    path.write_bytes(path.read_bytes().rstrip().rpartition(b"\n")[0])
    assert store.record("layers", "key") == VALUE
