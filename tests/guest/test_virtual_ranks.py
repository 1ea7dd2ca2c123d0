"""virtual_ranks: the same bits on 1, 2, 4 and 8 processes, and from one number of them to another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kitbuild.archive import read
from kitbuild.compare import compare
from tests.guest.root import recipe

if TYPE_CHECKING:
    from pathlib import Path

    from tests.guest.conftest import Guest, Run

pytestmark = pytest.mark.train
PLAIN: dict[str, Any] = {"kernels": {"attention": "sdpa", "layers": {}}}
# Plain descent: each bit of a gradient reaches the weights, where Adam's first steps hide most of them.
TRAIN: dict[str, Any] = {"max_length": 64, "learning_rate": 0.5, "max_steps": 4, "optim": "sgd"}
# Likewise, half precision rounds a sum where its order shows.
MODEL = {**recipe()["model"], "dtype": "bfloat16"}
DROPOUT = {**MODEL, "config": {**MODEL["config"], "attention_dropout": 0.3}}
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.3}


def built(processes: int, *, ranks: int | None = 8, **changes: Any) -> dict[str, Any]:
    """Eight micro-batches of one row: 24 rows, or packed fewer, so that the steps cross the end of an epoch."""
    given: dict[str, Any] = {"batch": {"global": 8, "micro": 1}, "train": TRAIN, "model": MODEL, **PLAIN, **changes}
    given |= {"launch": {"processes_per_node": processes}}
    return given | {"determinism": {"mode": "strict", "virtual_ranks": ranks}}


def trained(guest: Guest, processes: int, *, out: Path | None = None, **changes: Any) -> Run:
    guest.build(**built(processes, **changes))
    run = guest.run(out=out, environ={"KIT_RESUME": "1"} if out else None)
    assert run.rc == 0, run.terminal
    return run


def same(left: Run, right: Run) -> None:
    assert left.values == right.values
    assert left.weights == right.weights
    assert len(left.weights) > 10


def test_the_same_bits_on_any_number_of_processes(guest: Guest) -> None:
    """1, 2, 4 and 8 processes give the same losses, norms, batches and weights: dropout, packing, an epoch's end."""
    changes: dict[str, Any] = {"model": DROPOUT, "train": {**TRAIN, "packing": True, "max_length": 320, "max_steps": 3}}
    one = trained(guest, 1, **changes)
    assert one.manifest["results"]["steps"] == 3
    assert "train: 11 rows" in one.terminal
    for processes in (2, 4, 8):
        other = trained(guest, processes, **changes)
        same(one, other)
        verdict = compare(read(one.out, weights=True), read(other.out, weights=True))
        assert (verdict.verdict, verdict.reasons) == ("IDENTICAL", ())
        assert f"differs: launch world_size 1 vs {processes}" in verdict.notes


def test_plain_ddp_differs(guest: Guest) -> None:
    """Without virtual ranks four processes see the data of one and give other bits: what is tested above is not for free."""
    one, four = trained(guest, 1, ranks=None), trained(guest, 4, ranks=None)
    assert [line["batch_sha256"] for line in one.metrics] == [line["batch_sha256"] for line in four.metrics]
    assert [line["loss"] for line in one.metrics] != [line["loss"] for line in four.metrics]
    assert one.weights != four.weights
    virtual = trained(guest, 4)
    assert [line["batch_sha256"] for line in one.metrics] == [line["batch_sha256"] for line in virtual.metrics]
    for left, right in zip(one.metrics, virtual.metrics, strict=True):
        assert float.fromhex(left["loss"]) == pytest.approx(float.fromhex(right["loss"]), rel=1e-3)
        assert float.fromhex(left["grad_norm"]) == pytest.approx(float.fromhex(right["grad_norm"]), rel=1e-2)


def test_from_one_number_of_processes_to_another(guest: Guest, tmp_path: Path) -> None:
    """A run on four processes goes on with one, and that on two: LoRA's dropout, Adam, over an epoch's end."""
    changes: dict[str, Any] = {"lora": LORA, "model": {"path": "model", "dtype": "float32"}}
    changes |= {"train": {"max_length": 64, "learning_rate": 1e-2, "max_steps": 6}}
    whole = trained(guest, 8, **changes)
    out = tmp_path / "out"
    for processes, last in ((4, 2), (1, 4)):  # several processes hear of a signal one step later
        guest.build(**built(processes, **changes))
        stopped = guest.run(out=out, terminate_after=last, environ={"KIT_RESUME": "1" if out.exists() else "0"})
        assert (stopped.rc, stopped.exit["steps_done"]) == (10, last + (processes > 1)), stopped.terminal
    resumed = trained(guest, 2, out=out, **changes)
    same(whole, resumed)


def test_rows_that_are_read_ahead_and_dropout(guest: Guest) -> None:
    """A worker of the data loader changes nothing; dropout does, with the same batches."""
    one = trained(guest, 1)
    two = trained(guest, 2, train={**TRAIN, "dataloader_num_workers": 1})
    same(one, two)
    dropped = trained(guest, 1, model=DROPOUT)
    assert [line["batch_sha256"] for line in one.metrics] == [line["batch_sha256"] for line in dropped.metrics]
    assert one.metrics[0]["loss"] != dropped.metrics[0]["loss"]


@pytest.mark.parametrize(("when", "steps"), [("before the first step", 0), ("after the last step", 4)])
def test_a_process_with_other_weights(guest: Guest, when: str, steps: int) -> None:
    """Nothing but equal sums keeps the processes equal, so it is looked at: exit 6, and no model is left."""
    guest.build(**built(2))
    run = guest.run(other_weights=when)
    assert (run.rc, (run.out / "model").exists()) == (6, False)
    assert run.exit["message"] == f"{when}, process 1 has other weights than process 0"
    assert len(run.metrics) in (steps, steps - 1)  # the last is written when training has ended


def test_an_epoch_that_ends_within_a_batch(guest: Guest) -> None:
    """24 rows by 16 are filled up from the epoch's first ones, as is told, on any number of processes."""
    changes: dict[str, Any] = {"ranks": 16, "batch": {"global": 16, "micro": 1}}
    one, four = (trained(guest, processes, **changes) for processes in (1, 4))
    same(one, four)
    told = "kit: the last batch of an epoch has 8 of 16 rows: it is filled up from the epoch's first ones"
    assert [run.terminal.count(told) for run in (one, four)] == [1, 1]


def test_too_few_rows(guest: Guest) -> None:
    """Fewer rows than a global batch, and no part of one wanted, is exit 6."""
    train = {**TRAIN, "dataloader_drop_last": True}
    guest.build(**built(1, ranks=32, batch={"global": 32, "micro": 1}, train=train))
    run = guest.run()
    assert run.rc == 6
    assert run.exit["message"] == ("24 rows are less than one global batch of 32, and dataloader_drop_last is on")
