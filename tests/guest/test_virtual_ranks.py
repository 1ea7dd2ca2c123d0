"""virtual_ranks: the same bits on 1, 2, 4 and 8 processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.guest.conftest import Guest, Run

pytestmark = pytest.mark.train
TRAIN: dict[str, Any] = {"max_length": 64, "learning_rate": 1e-3, "max_steps": 4}
DROPOUT = {"lora": {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.3}}


def tree(guest: Guest, processes: int, *, ranks: int | None = 8, **changes: Any) -> None:
    """Eight micro-batches of one row; 24 rows are three steps an epoch."""
    given: dict[str, Any] = {
        "kernels": {"attention": "sdpa", "layers": {}},
        "batch": {"global": 8, "micro": 1},
        "train": TRAIN,
        "launch": {"processes_per_node": processes},
        "determinism": {"mode": "strict", "virtual_ranks": ranks},
    }
    guest.build(**given | changes)


def trained(guest: Guest, processes: int, **changes: Any) -> Run:
    tree(guest, processes, **changes)
    run = guest.run()
    assert run.rc == 0, run.terminal
    return run


def same(left: Run, right: Run) -> None:
    assert left.values == right.values
    assert left.weights == right.weights


def test_the_same_bits_on_any_number_of_processes(guest: Guest) -> None:
    """1, 2, 4 and 8 processes give the same losses, norms, batches and weights, over the end of an epoch."""
    one = trained(guest, 1)
    for processes in (2, 4, 8):
        same(one, trained(guest, processes))
