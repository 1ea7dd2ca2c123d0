"""Which locks a stopped run goes on with: the host and the guest say the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kitbuild.guest.config import Config
from kitbuild.guest.identity import identity_sha256
from kitbuild.lock.files import parse_lock

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.guest.root import Root

VIRTUAL = {"mode": "strict", "virtual_ranks": 4}


def identity(build: Callable[..., Root], **changes: Any) -> str:
    root = build(batch={"global": 4, "micro": 1}, **changes)
    data = (root.path / "kit/lock.json").read_bytes()
    host, guest = parse_lock(data, name="lock.json").identity_sha256, Config.read(root.environ)
    assert identity_sha256(guest.raw) == host
    root.out.rmdir()
    root.cache.rmdir()
    return host


def test_the_number_of_processes(build: Callable[..., Root]) -> None:
    """It is part of what a run is, but for virtual ranks."""
    one, two = {"processes_per_node": 1}, {"processes_per_node": 2}
    assert identity(build, launch=one) != identity(build, launch=two)
    virtual = identity(build, launch=one, determinism=VIRTUAL)
    assert virtual == identity(build, launch=two, determinism=VIRTUAL)
    assert virtual == identity(build, launch={"nodes": 2, "processes_per_node": 2}, determinism=VIRTUAL)


def test_all_the_rest(build: Callable[..., Root]) -> None:
    """With virtual ranks too, threads, seed, arguments and their number are part of it."""
    held = [
        identity(build, determinism=VIRTUAL),
        identity(build, determinism=VIRTUAL, launch={"threads_per_process": 2}),
        identity(build, determinism=VIRTUAL, seed=8),
        identity(build, determinism=VIRTUAL, train={"learning_rate": 0.5}),
        identity(build, determinism={"mode": "strict", "virtual_ranks": 2}),
    ]
    assert len(set(held)) == len(held)
