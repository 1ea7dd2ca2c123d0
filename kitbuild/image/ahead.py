"""Step 3: bytes made in one thread while another uses them. Inflating and hashing leave the interpreter lock."""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

BATCH_BYTES = 1 << 20
_BATCHES = 8
_POLL_SECONDS = 0.2


@contextlib.contextmanager
def ahead(pieces: Iterator[bytes]) -> Iterator[Iterator[bytes]]:
    """The same bytes in batches, made up to eight batches ahead; an error of the maker is raised where they are used."""
    ready: queue.Queue[bytes | BaseException | None] = queue.Queue(_BATCHES)
    stopped = threading.Event()

    def put(item: bytes | BaseException | None) -> None:
        while not stopped.is_set():
            with contextlib.suppress(queue.Full):
                ready.put(item, timeout=_POLL_SECONDS)
                return

    def make() -> None:
        try:
            for batch in batches(pieces):
                put(batch)
                if stopped.is_set():
                    return
            put(None)
        except BaseException as error:  # noqa: BLE001 - raised where the bytes are used
            put(error)

    def use() -> Iterator[bytes]:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    thread = threading.Thread(target=make, name="ahead", daemon=True)
    thread.start()
    try:
        yield use()
    finally:
        stopped.set()
        thread.join()


def batches(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Small pieces joined: a tar of forty thousand files is a hundred thousand of them."""
    held: list[bytes] = []
    size = 0
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= BATCH_BYTES:
            yield b"".join(held)
            held, size = [], 0
    if held:
        yield b"".join(held)
