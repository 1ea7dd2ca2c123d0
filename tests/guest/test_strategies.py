"""DDP and ZeRO over several processes on a CPU: the same data and values, resumed, saved whole, and proven."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.guest.conftest import REPOSITORY
from tests.guest.test_train import ASSISTANT, EVALUATE, PLAIN, TRAIN, replace_data, same

if TYPE_CHECKING:
    from tests.guest.conftest import Guest, Run

pytestmark = pytest.mark.train
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1}


def launch(processes: int, stage: int = 0, **options: Any) -> dict[str, Any]:
    if not stage:
        return {"processes_per_node": processes}
    given = {"processes_per_node": processes, "strategy": "deepspeed", "zero_stage": stage}
    # The tiny model's parameters are below the threshold under which ZeRO-3 keeps them whole.
    return given | {"deepspeed": options or {"persistence_threshold": 0}}


def trained(guest: Guest, **changes: Any) -> Run:
    guest.build(**PLAIN, **changes)
    run = guest.run()
    assert run.rc == 0, run.terminal
    return run


def stopped_and_resumed(guest: Guest, step: int = 2) -> Run:
    stopped = guest.run(terminate_after=step)
    assert stopped.rc == 10, stopped.terminal
    return guest.run(out=stopped.out, environ={"KIT_RESUME": "1"})


def close(left: Run, right: Run) -> None:
    """The same rows in the same order, and values that differ by rounding alone."""
    assert [line["batch_sha256"] for line in left.metrics] == [line["batch_sha256"] for line in right.metrics]
    for name in ("loss", "grad_norm", "learning_rate"):
        pairs = [
            (float.fromhex(a[name]), float.fromhex(b[name])) for a, b in zip(left.metrics, right.metrics, strict=True)
        ]
        assert [a for a, _ in pairs] == pytest.approx([b for _, b in pairs], rel=1e-5)
    assert left.weights.keys() == right.weights.keys()


def shapes(run: Run) -> dict[str, tuple[Any, ...]]:
    return {name: (facts["dtype"], *facts["shape"]) for name, facts in run.manifest["weights"].items()}


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_on_two_processes(zero: Guest, stage: int) -> None:
    """ZeRO trains as DDP does but for rounding, resumes bit for bit, and saves the same tensors in the same layout."""
    ddp = trained(zero, launch=launch(2), evaluate=EVALUATE)
    whole = trained(zero, launch=launch(2, stage), evaluate=EVALUATE)
    close(ddp, whole)
    assert shapes(ddp) == shapes(whole)
    same(whole, stopped_and_resumed(zero))
    after = [run.manifest["results"]["evaluate"]["after"]["loss"] for run in (ddp, whole)]
    assert float.fromhex(after[0]) == pytest.approx(float.fromhex(after[1]), rel=1e-5)
    proven = whole.manifest["launch"]["proven"]
    assert [(item["rank"], item["distributed_type"]) for item in proven] == [(0, "DEEPSPEED"), (1, "DEEPSPEED")]
    shares = [item["sharing"] for item in proven]
    assert [(item["zero_stage"], item["here"] * 2 >= item["whole"]) for item in shares] == [(stage, True)] * 2
    assert all(item["here"] < item["whole"] for item in shares)
    # Nothing was compiled.
    assert not list((zero.folder / "cache" / "extensions").rglob("*"))
    assert whole.manifest["lock"]["launch"]["deepspeed"]["zero_optimization"]["stage"] == stage


@pytest.mark.slow_extra
@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_repeats_and_resumes(zero: Guest, stage: int, processes: int) -> None:
    """Each stage on 1, 2 and 4 processes: equal twice, stopped at any step and resumed, and close to DDP."""
    batch = {"batch": {"global": 8, "micro": 1}}
    ddp = trained(zero, launch=launch(processes), **batch)
    whole = trained(zero, launch=launch(processes, stage), **batch)
    close(ddp, whole)
    same(whole, zero.run())
    for step in (1, 3):
        same(whole, stopped_and_resumed(zero, step))


@pytest.mark.slow_extra
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    "changes",
    [
        {"lora": LORA, "evaluate": EVALUATE},
        {"model": {"path": "model", "dtype": "bfloat16"}},
        {"train": {**TRAIN, "packing": True, "max_length": 256}},
        {"train": {**TRAIN, "max_grad_norm": 0.5, "gradient_checkpointing": False}},
    ],
    ids=["lora", "checkpoint-bf16", "packing", "clipped"],
)
def test_zero_variants(zero: Guest, stage: int, changes: dict[str, Any]) -> None:
    """Each way to train under ZeRO repeats, resumes, and writes what DDP writes."""
    ddp = trained(zero, launch=launch(2), **changes)
    whole = trained(zero, launch=launch(2, stage), **changes)
    assert shapes(ddp) == shapes(whole)
    if "model" not in changes:  # ZeRO keeps bfloat16's optimizer states and sums in float32, DDP does not
        close(ddp, whole)
    same(whole, stopped_and_resumed(zero))
    adapters = [sorted(path.name for path in (run.out / "adapter").glob("*.safetensors")) for run in (ddp, whole)]
    assert adapters[0] == adapters[1]


def test_ddp_repeats_and_sees_the_batches_of_one(guest: Guest) -> None:
    """Two processes by one micro-batch and one by two are equal bit for bit; each rank holds the whole model."""
    batch = {"batch": {"global": 4, "micro": 2}}
    one = trained(guest, launch=launch(1), **batch)
    two = trained(guest, launch=launch(2), **batch)
    assert one.values == two.values
    assert one.weights == two.weights
    shares = [item["sharing"] for item in two.manifest["launch"]["proven"]]
    assert [(item["rank"], item["world_size"], item["here"] == item["whole"]) for item in shares] == [
        (0, 2, True),
        (1, 2, True),
    ]


@pytest.mark.slow_extra
def test_the_printed_line_trains_the_same(guest: Guest, train_python: str) -> None:
    """The line of `kit launch --print`, in a shell, records the steps that `kit train` records."""
    ours = trained(guest, launch=launch(2))
    places = {**guest.root.environ, "KIT_OUT": str(guest.folder / "out-line")}
    environ = {**os.environ, **places, "PYTHONPATH": str(REPOSITORY), "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    environ["PATH"] = f"{Path(train_python).parent}:{environ['PATH']}"
    line = guest.run("launch", "--print").terminal.strip()
    line = line.replace("torchrun", f"{train_python} -m torch.distributed.run")
    subprocess.run(line, shell=True, check=True, env=environ, cwd=guest.folder, timeout=300)  # noqa: S602
    theirs = [json.loads(text) for text in Path(places["KIT_OUT"], "metrics.jsonl").read_text().splitlines()]
    names = ("step", "loss", "grad_norm", "learning_rate", "tokens", "batch_sha256")
    assert ours.values == [tuple(step[name] for name in names) for step in theirs]


@pytest.mark.slow_extra
def test_ddp_on_four_processes(guest: Guest) -> None:
    """Four processes repeat and resume bit for bit, on the rows of one; their sums are in another order than one's."""
    batch = {"batch": {"global": 8, "micro": 1}}
    one = trained(guest, launch=launch(1), **batch)
    four = trained(guest, launch=launch(4), **batch)
    close(one, four)
    assert one.weights != four.weights
    same(four, guest.run())
    same(four, stopped_and_resumed(guest))


@pytest.mark.parametrize(
    ("lie", "given", "text"),
    [
        ("alone", launch(2, 2), "deepspeed on 2 processes was asked for; rank "),
        ("lower_stage", launch(2, 3), "rank 0 runs ZeRO stage 1, not 3"),
        ("unwrapped", launch(2), "rank 0 trains a transformers.models.qwen3.modeling_qwen3.Qwen3ForCausalLM"),
        (
            "fsdp_on_a_cpu",
            {"processes_per_node": 2, "strategy": "fsdp"},
            "fsdp on 2 processes was asked for; rank ",
        ),
    ],
)
def test_another_strategy_than_asked_for(zero: Guest, lie: str, given: dict[str, Any], text: str) -> None:
    """What a library silently runs instead is exit 6 before the first step."""
    zero.build(**PLAIN, launch=given)
    run = zero.run(lie=lie)
    assert (run.rc, run.metrics) == (6, []), run.terminal
    assert text in run.exit["message"]


MASKED: dict[str, Any] = {
    "train": {**TRAIN, "assistant_only_loss": True, "max_length": 80, "num_train_epochs": 1, "max_steps": -1},
    "model": ASSISTANT,
}


def test_rows_without_a_label(guest: Guest) -> None:
    """Rows whose labels are all cut off are dropped, on two processes as on one."""
    question = {"role": "user", "content": "far too long " * 40}
    row = json.dumps({"messages": [question, {"role": "assistant", "content": "cut off"}]}) + "\n"
    found = []
    for processes in (1, 2):
        guest.build(**PLAIN, **MASKED, launch=launch(processes))
        replace_data(guest, lambda held: row * 3 + held + row)
        found.append(guest.run())
    same(*found)
    assert [(run.manifest["data"]["rows"], len(run.metrics)) for run in found] == [(24, 6)] * 2


def test_no_row_has_a_label(guest: Guest) -> None:
    """Where max_length cuts off every answer, that is told; a library says num_samples=0."""
    guest.build(**PLAIN, **{**MASKED, "train": {**MASKED["train"], "max_length": 24}})
    run = guest.run()
    assert run.rc == 6
    assert run.exit["message"] == "none of the 24 rows has a token to learn from within max_length"


@pytest.mark.parametrize(("rows", "same_rows"), [(22, True), (23, False)])
def test_uneven_last_batch(guest: Guest, rows: int, *, same_rows: bool) -> None:
    """An epoch's short last step is the one of one process; where a rank would get nothing, what fills up is told."""
    train = {**TRAIN, "num_train_epochs": 2, "max_steps": -1}
    found = []
    for processes in (1, 2):
        guest.build(**PLAIN, batch={"global": 4, "micro": 1}, train=train, launch=launch(processes))
        replace_data(guest, lambda held: "".join(held.splitlines(keepends=True)[:rows]))
        found.append(guest.run())
    one, two = found
    assert (one.rc, two.rc, len(one.metrics)) == (0, 0, 12), one.terminal + two.terminal
    pairs = zip(one.metrics, two.metrics, strict=True)
    differ = [left["step"] for left, right in pairs if left["batch_sha256"] != right["batch_sha256"]]
    assert differ == ([] if same_rows else [6, 12])
    text = "the last micro-batches of an epoch are 1 for 2 processes: rows of its beginning are trained once more"
    assert (text in one.terminal, text in two.terminal) == (False, not same_rows)
