"""A run on several processes, with DistributedDataParallel, goes on bit for bit where it was stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.guest.test_resume import GPT2, RESUME, TRAIN, epoch, model
from tests.guest.test_train import PLAIN, same
from tests.hub import content

if TYPE_CHECKING:
    from tests.guest.conftest import Guest

pytestmark = pytest.mark.train
WIDE: dict[str, Any] = {
    **content.qwen3_config(tied=True), "hidden_size": 128, "intermediate_size": 1024, "num_hidden_layers": 4,
}  # fmt: skip
"""Of 7 MB: several buckets of gradients, where each may have one."""


def test_stopped_in_later_epochs(guest: Guest) -> None:
    """An epoch has three steps: stopped in the second and the third one, two processes see the batches never stopped."""
    changes = {"launch": {"processes_per_node": 2}, "batch": {"global": 8, "micro": 2}}
    guest.build(**{**model(GPT2), **changes, "train": {**TRAIN, "max_steps": 10}})
    whole = guest.run()
    run = guest.run(terminate_after=3)  # of several processes, each learns of it a step later
    assert [epoch(path) for path in (run.out / "checkpoints").iterdir()] == [pytest.approx(4 / 3)]
    run = guest.run(out=run.out, environ=RESUME, terminate_after=7)
    assert epoch(run.out / "checkpoints/checkpoint-8") == pytest.approx(8 / 3)
    same(whole, guest.run(out=run.out, environ=RESUME))


def test_gradients_in_several_buckets(guest: Guest) -> None:
    """Four processes that go on after a stop add gradients up as those that were never stopped."""
    changes = {"launch": {"processes_per_node": 4}, "batch": {"global": 8, "micro": 2}}
    guest.build(**{**model(WIDE), **PLAIN, **changes, "train": {**TRAIN, "ddp_bucket_cap_mb": 1, "max_steps": 5}})
    whole = guest.run()
    run = guest.run(terminate_after=2)
    assert run.exit["steps_done"] == 3  # the buckets would have been made anew before the second
    same(whole, guest.run(out=run.out, environ=RESUME))
