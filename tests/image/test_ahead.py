"""Bytes made ahead in a thread are the same bytes, and an error or an end on either side ends both."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from kitbuild.image.ahead import BATCH_BYTES, ahead, batches

if TYPE_CHECKING:
    from collections.abc import Iterator


def makers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "ahead"]


@pytest.mark.parametrize("sizes", [[], [0], [1, 2, 3], [BATCH_BYTES], [BATCH_BYTES - 1, 2], [5 * BATCH_BYTES] * 9])
def test_the_same_bytes(sizes: list[int]) -> None:
    """In order and whole, whatever the pieces."""
    pieces = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    with ahead(iter(pieces)) as made:
        assert b"".join(made) == b"".join(pieces)
    assert makers() == []


def test_small_pieces_are_joined() -> None:
    """A hundred thousand small pieces are a few batches."""
    assert len(list(batches(iter([b"x" * 512] * 10_000)))) == 5


def test_an_error_of_the_maker() -> None:
    """It is raised where the bytes are used."""

    def pieces() -> Iterator[bytes]:
        yield b"x" * BATCH_BYTES
        raise ValueError("no more")

    with pytest.raises(ValueError, match=r"^no more$"), ahead(pieces()) as made:
        list(made)
    assert makers() == []


def test_a_user_who_stops() -> None:
    """A maker that is far from its end is ended too."""

    def pieces() -> Iterator[bytes]:
        while True:
            yield b"x" * BATCH_BYTES

    with ahead(pieces()) as made:
        assert next(made) == b"x" * BATCH_BYTES
    assert makers() == []
