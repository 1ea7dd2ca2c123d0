from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kitbuild.guest.identity import content_sha256
from tests.guest.root import ATTENTION, ATTENTION_COMMIT, LAYERS, recipe, relist

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.guest.conftest import Guest, Run
    from tests.guest.root import Root

pytestmark = pytest.mark.train
EVALUATE = {"dataset": {"path": "heldout.jsonl"}, "examples": 6, "batch": 4, "max_new_tokens": 6}
PLAIN: dict[str, Any] = {"kernels": {"attention": "sdpa", "layers": {}}}
ASSISTANT = {**recipe()["model"], "chat_template": "generation.jinja"}
TRAIN: dict[str, Any] = {"max_length": 128, "learning_rate": 1e-3, "max_steps": 4}


def same(left: Run, right: Run) -> None:
    assert (left.rc, right.rc) == (0, 0), left.terminal + right.terminal
    assert left.values == right.values
    assert left.weights == right.weights
    assert len(left.weights) > 10


def test_two_runs_are_identical_and_everything_is_recorded(guest: Guest) -> None:
    """Two runs of one lock give the same steps and weights, with the kernels' calls counted in training only."""
    guest.build(evaluate=EVALUATE)
    first, second = guest.run(), guest.run()
    same(first, second)
    manifest = first.manifest
    assert (len(first.values), manifest["complete"], manifest["format"]) == (4, True, 1)
    # 4 steps of 2 micro-batches through 2 layers, twice (checkpointing recomputes); 4 norms a layer likewise, and the last one.
    assert [item["calls"] for item in manifest["kernels"]] == [{"0": 32}, {"0": 136}]
    assert [item["repo"] for item in manifest["kernels"]] == [ATTENTION, LAYERS]
    assert manifest["results"]["evaluate"]["after"]["loss"] != manifest["results"]["evaluate"]["before"]["loss"]
    assert manifest["results"]["evaluate"] == second.manifest["results"]["evaluate"]
    assert len(manifest["results"]["evaluate"]["after"]["shown"]) == 3
    assert set(manifest["results"]["evaluate"]["before"]["shown"][0]) == {"prompt", "answer", "expected", "right"}
    assert manifest["results"]["loss_last"] == first.metrics[-1]["loss"]
    assert f"{ATTENTION}@{ATTENTION_COMMIT}" == manifest["attention"]["used"]
    assert {"exit_code": 0, "code": "ok", "steps_done": 4, "steps": 4}.items() <= first.exit.items()
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {
        path.name for path in (first.out / "model").iterdir()
    }
    assert json.loads((first.out / "status.json").read_bytes())["phase"] == "done"


def test_only_short_lines_reach_the_terminal(guest: Guest) -> None:
    """No library's warning is shown: each line is the guest's own."""
    guest.build(**PLAIN)
    run = guest.run()
    lines = run.terminal.splitlines()
    assert run.rc == 0
    assert all(line.startswith("kit: ") for line in lines), run.terminal
    assert any(line.startswith("kit: step 4/4 loss ") for line in lines)


def test_evaluation_changes_no_step(guest: Guest) -> None:
    """The same values come of training with and without an evaluation before it."""
    guest.build(**PLAIN)
    without = guest.run()
    guest.build(**PLAIN, evaluate=EVALUATE)
    same(without, guest.run())


def test_another_seed_is_another_run(guest: Guest) -> None:
    """The seed decides weights and order."""
    guest.build(**PLAIN)
    left = guest.run()
    guest.build(**PLAIN, seed=8)
    right = guest.run()
    assert left.values[0][1] != right.values[0][1]
    assert left.values[0][5] != right.values[0][5]


@pytest.mark.parametrize(
    "changes",
    [
        {"train": {**TRAIN, "packing": True, "max_length": 256}},
        {"batch": {"global": 8, "micro": 2}, **PLAIN},
        {"lora": {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1}},
        {"model": {"path": "model", "dtype": "bfloat16"}},
        {"dataset": [{"path": "a.jsonl", "weight": 2.0}, {"path": "b.jsonl", "weight": 1.0}], **PLAIN},
        {"train": {**TRAIN, "assistant_only_loss": True}, "model": ASSISTANT},
        {"launch": {"processes_per_node": 2}, "evaluate": EVALUATE},
    ],
    ids=["packing", "accumulation", "lora", "checkpoint-bf16", "mixed", "assistant-only", "two-processes"],
)
def test_variants_repeat_and_resume(guest: Guest, changes: dict[str, Any]) -> None:
    """Each way to train gives the same bits twice, and once more when it is stopped and resumed."""
    guest.build(**changes)
    whole, again = guest.run(), guest.run()
    same(whole, again)
    stopped = guest.run(terminate_after=2)
    assert stopped.rc == 10, stopped.terminal
    resumed = guest.run(out=stopped.out, environ={"KIT_RESUME": "1"})
    same(whole, resumed)


def test_loss_is_the_normalised_one(guest: Guest) -> None:
    """Micro-batches of 1 and 4 give the same loss but for rounding: it is normalised over the whole batch."""
    guest.build(**PLAIN, batch={"global": 4, "micro": 4})
    whole = guest.run()
    guest.build(**PLAIN, batch={"global": 4, "micro": 1})
    parts = guest.run()
    for left, right in zip(whole.metrics, parts.metrics, strict=True):
        assert float.fromhex(left["loss"]) == pytest.approx(float.fromhex(right["loss"]), rel=1e-5)
        assert left["tokens"] == right["tokens"]


def test_two_processes_see_the_batches_of_one(guest: Guest) -> None:
    """Two processes and one with twice the accumulation see the same data and the same loss."""
    guest.build(**PLAIN)
    one = guest.run()
    guest.build(**PLAIN, launch={"processes_per_node": 2})
    two = guest.run()
    assert [line["batch_sha256"] for line in one.metrics] == [line["batch_sha256"] for line in two.metrics]
    assert one.values[0][1] == two.values[0][1]
    assert len(two.manifest["launch"]["proven"]) == 2
    assert two.manifest["launch"]["proven"][0]["distributed_type"] == "MULTI_CPU"
    # Each rank's own part is beside the merged values, so that one that goes astray can be named.
    for line in two.metrics:
        assert len({part["batch_sha256"] for part in line["ranks"]}) == 2
        parts = [float.fromhex(part["loss"]) for part in line["ranks"]]
        assert sum(parts) == pytest.approx(float.fromhex(line["loss"]), rel=1e-6)
    assert all("ranks" not in line for line in one.metrics)


@pytest.mark.parametrize(
    "name",
    [
        "inputs/model/model.safetensors",
        "inputs/data/0/chats.jsonl",
        "kit/lock.json",
        f"kit/kernels/kernels--kernels-community--flash-attn2/snapshots/{ATTENTION_COMMIT}/build/torch-cpu/flash_attn.py",
    ],
    ids=["model", "data", "lock", "kernel"],
)
def test_flipped_byte_trains_nothing(guest: Guest, name: str) -> None:
    """One wrong byte in a locked file is exit 7, names the file, and nothing is trained."""
    tree = guest.build(model={"path": "model", "dtype": "bfloat16"})
    path = tree.path / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    run = guest.run()
    assert (run.rc, run.metrics, (run.out / "model").exists()) == (7, [], False)
    assert [problem["file"] for problem in run.exit["problems"]] == [f"/{name}"]


def test_signal_to_the_entry_process(guest: Guest) -> None:
    """SIGTERM to the entry process stops at a step boundary with a checkpoint, exit 10."""
    guest.build(**PLAIN, train={**TRAIN, "max_steps": 5000})
    run = guest.start()
    wait_for(lambda: len(run.metrics) > 2, run)
    os.kill(run.pid, signal.SIGTERM)
    run.wait()
    assert run.rc == 10, run.terminal
    assert (run.out / f"checkpoints/checkpoint-{run.exit['steps_done']}/kit.json").exists()
    assert run.exit["steps_done"] == len(run.metrics)


@pytest.mark.parametrize("processes", [1, 2])
def test_killed_worker(guest: Guest, processes: int) -> None:
    """A worker killed by SIGKILL is exit 6 and the message speaks of memory."""
    guest.build(**PLAIN, train={**TRAIN, "max_steps": 5000}, launch={"processes_per_node": processes})
    run = guest.start()
    wait_for(lambda: len(run.metrics) > 2, run)
    os.kill(children(run.pid)[-1], signal.SIGKILL)
    run.wait()
    assert run.rc == 6, run.terminal
    assert f"worker {processes - 1} was killed" in run.exit["message"]
    assert run.manifest["results"]["steps"] == len(run.metrics)


def test_no_orphans(guest: Guest) -> None:
    """When the entry process is killed, the kernel ends its workers."""
    guest.build(**PLAIN, train={**TRAIN, "max_steps": 5000}, launch={"processes_per_node": 2})
    run = guest.start()
    wait_for(lambda: len(run.metrics) > 2, run)
    workers = children(run.pid)
    assert len(workers) == 2
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    wait_for(lambda: not any(alive(worker) for worker in workers), run)


def test_out_of_memory(guest: Guest) -> None:
    """Out of memory in a worker is exit 6 with advice, and no traceback on the terminal."""
    guest.build(**PLAIN)
    run = guest.run(out_of_memory=True)
    assert run.rc == 6
    assert "out of memory" in run.exit["message"]
    assert "batch.micro" in run.exit["hint"]
    assert "Traceback" not in run.terminal
    assert "Traceback" in (run.out / "logs/rank-0.log").read_text()


def test_other_defaults_are_refused(guest: Guest) -> None:
    """A library whose declared defaults are not the locked ones is exit 7, by name."""
    guest.build(**PLAIN, defaults={"packing": True, "max_length": 1024})
    run = guest.run()
    assert run.rc == 7
    assert "packing defaults to False, the lock says True" in run.exit["message"]


def test_resume_without_a_checkpoint(guest: Guest) -> None:
    """Resuming what has no whole checkpoint is exit 6."""
    guest.build(**PLAIN)
    run = guest.run(environ={"KIT_RESUME": "1"})
    assert (run.rc, run.exit["message"]) == (6, "there is no whole checkpoint to resume from")


def test_started_again_by_a_scheduler(guest: Guest) -> None:
    """KIT_RESUME=auto starts where there is no checkpoint, goes on where there is one, and leaves a finished run alone."""
    guest.build(**PLAIN)
    whole = guest.run(environ={"KIT_RESUME": "auto"})
    stopped = guest.run(terminate_after=2, environ={"KIT_RESUME": "auto"})
    assert (stopped.rc, stopped.exit["steps_done"]) == (10, 2)
    resumed = guest.run(out=stopped.out, environ={"KIT_RESUME": "auto"})
    same(whole, resumed)
    kept = (stopped.out / "manifest.json").read_bytes()
    again = guest.run(out=stopped.out, environ={"KIT_RESUME": "auto"})
    assert again.rc == 0
    assert "is finished" in again.terminal
    assert (stopped.out / "manifest.json").read_bytes() == kept


GENERATION: dict[str, Any] = {**PLAIN, "train": {**TRAIN, "assistant_only_loss": True}, "model": ASSISTANT}


@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        ('{"messages": [{"role"\n', PLAIN, "chats.jsonl cannot be read as json: "),
        ("", PLAIN, "data/0 has no rows"),
        ('{"messages": []}\n', PLAIN, "data/0: row 25 has no messages"),
        ('{"text": "plain"}\n', GENERATION, "data/0: row 25 has no messages"),
    ],
)
def test_bad_rows_are_told(guest: Guest, rows: str, changes: dict[str, Any], message: str) -> None:
    """Rows that no library can use are exit 6, with the file or the row, where a library says IndexError."""
    guest.build(**changes)
    replace_data(guest, lambda held: held + rows if rows else "")
    run = guest.run()
    assert (run.rc, run.exit["message"][: len(message)]) == (6, message)


def test_no_chat_template(guest: Guest) -> None:
    """Conversations without a chat template are exit 6 and say which key of the recipe helps."""
    root = guest.build(**PLAIN)
    for path in (root.path / "inputs").glob("*/chat_template.jinja"):
        path.unlink()
    for path in (root.path / "inputs").glob("*/tokenizer_config.json"):
        held = json.loads(path.read_bytes())
        held.pop("chat_template", None)
        path.write_text(json.dumps(held))
    relock(root)
    run = guest.run()
    assert (run.rc, run.exit["message"]) == (6, "the data are conversations and the tokenizer has no chat template")
    assert "model.chat_template" in run.exit["hint"]


def replace_data(guest: Guest, change: Callable[[str], str]) -> None:
    path = guest.root.path / "inputs/data/0/chats.jsonl"
    path.write_text(change(path.read_text()))
    relock(guest.root)


def relock(root: Root) -> None:
    """Make the lock say what is there."""
    lock = json.loads((root.path / "kit/lock.json").read_bytes())
    trees = [("data/0", lock["datasets"][0]["tree"])]
    trees += [(name, lock["model"][part]) for name, part in (("model", "weights"), ("tokenizer", "tokenizer"))]
    for folder, tree in trees:
        files = [root.path / "inputs" / folder / item["path"] for item in (tree or {"files": ()})["files"]]
        for item, path in list(zip((tree or {"files": ()})["files"], files, strict=True)):
            if not path.exists():
                tree["files"].remove(item)
                continue
            data = path.read_bytes()
            item |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    lock["content_sha256"] = content_sha256(lock)
    data = json.dumps(lock).encode()
    (root.path / "kit/lock.json").write_bytes(data)
    relist(root.path, "kit/lock.json")


def wait_for(condition: Any, run: Run) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError(run.log.read_text())


def children(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(path.parent.name))
    return sorted(found)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
