"""A run that is stopped or killed goes on bit for bit, from the last checkpoint that is whole."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from kitbuild.errors import RunError, UsageError
from kitbuild.guest import checkpoints, config, record
from tests.guest.conftest import REPOSITORY
from tests.guest.root import recipe
from tests.guest.test_train import EVALUATE, PLAIN, same, wait_for
from tests.hub import content

if TYPE_CHECKING:
    from pathlib import Path

    from tests.guest.conftest import Guest, Run

pytestmark = pytest.mark.train
STEPS = 6
RESUME = {"KIT_RESUME": "1"}
TRAIN: dict[str, Any] = {"max_length": 128, "learning_rate": 1e-3, "max_steps": STEPS}
SCHEDULE = {"lr_scheduler_type": "cosine", "warmup_steps": 2}
ATTENTION_DROPOUT = {**content.qwen3_config(tied=True), "attention_dropout": 0.2}
GPT2 = {
    "model_type": "gpt2", "vocab_size": content.qwen3_config(tied=True)["vocab_size"], "n_positions": 256, "n_embd": 32, "n_layer": 2,
    "n_head": 2, "resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2,
}  # fmt: skip
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.2}


def model(config: dict[str, Any]) -> dict[str, Any]:
    return {"model": {**recipe()["model"], "config": config}, **PLAIN}


FEATURES: dict[str, dict[str, Any]] = {
    "packing": {"train": {**TRAIN, "packing": True, "max_length": 256}},
    "accumulation": {"batch": {"global": 8, "micro": 2}, "train": {**TRAIN, "max_steps": 5}},
    "attention-dropout": model(ATTENTION_DROPOUT),
    "hidden-dropout": model(GPT2),
    "workers": {**model(GPT2), "train": {**TRAIN, "dataloader_num_workers": 2}},
    "epochs": {**model(GPT2), "batch": {"global": 12, "micro": 2}, "train": {**TRAIN, "max_steps": 5}},
    "lora": {"lora": LORA},
    "schedule": {**PLAIN, "train": {**TRAIN, **SCHEDULE}},
    "bf16": {"model": {"path": "model", "dtype": "bfloat16"}},
    "evaluate": {**model(GPT2), "evaluate": {"dataset": {"path": "x.jsonl"}, "examples": 4, "max_new_tokens": 4}},
    "two-processes": {**model(GPT2), "launch": {"processes_per_node": 2}},
}
EVERYTHING: dict[str, dict[str, Any]] = {
    # 24 rows are packed into about 12: with 4 rows a step an epoch ends at steps 3 and 6.
    "packed-workers-schedule": {
        "train": {**TRAIN, **SCHEDULE, "packing": True, "max_length": 256, "dataloader_num_workers": 2},
        "lora": LORA,
    },
    # 24 rows, 8 a step in 4 micro-batches: an epoch ends at steps 3 and 6.
    "dropout-accumulation-epochs": {**model(GPT2), "batch": {"global": 8, "micro": 2}, "train": {**TRAIN, **SCHEDULE}},
    "two-processes": {**model(GPT2), "launch": {"processes_per_node": 2}, "batch": {"global": 8, "micro": 2}},
}


def epoch(checkpoint: Path) -> float:
    return float(json.loads((checkpoint / "trainer_state.json").read_bytes())["epoch"])


def steps_of(guest: Guest) -> int:
    return int(json.loads((guest.root.path / "kit/lock.json").read_bytes())["recipe"]["train"]["max_steps"])


@pytest.mark.parametrize("changes", EVERYTHING.values(), ids=EVERYTHING)
def test_stopped_after_every_step(guest: Guest, changes: dict[str, Any]) -> None:
    """A run that is stopped after each of its steps has the losses, norms, batches and weights of one never stopped."""
    guest.build(**{"train": TRAIN, **changes})
    whole = guest.run()
    epochs: list[float] = []
    out: Path | None = None
    environ: dict[str, str] = {}
    for step in range(1, STEPS):
        run = guest.run(out=out, environ=environ, terminate_after=step)
        assert {"exit_code": 10, "steps_done": step, "steps": STEPS}.items() <= run.exit.items(), run.terminal
        assert run.values == whole.values[:step]
        epochs.append(epoch(run.out / f"checkpoints/checkpoint-{step}"))
        out, environ = run.out, RESUME
    resumed = guest.run(out=out, environ=environ)
    same(whole, resumed)
    assert (epochs[0] < 1.0, 1.0 in epochs[:-1]) == (True, True), epochs
    assert (whole.manifest["resumed"], resumed.manifest["resumed"]) == ([], [1, 2, 3, 4, 5])
    assert resumed.manifest["data"] == whole.manifest["data"]
    assert resumed.manifest["kernels"] == whole.manifest["kernels"]


@pytest.mark.slow_extra
@pytest.mark.parametrize("changes", FEATURES.values(), ids=FEATURES)
def test_resumed_from_each_step(guest: Guest, changes: dict[str, Any]) -> None:
    """From the checkpoint of any step, a run of each kind goes on to the same values; writing them changes none."""
    changes = {"train": TRAIN, **changes}
    guest.build(**changes)
    whole, steps = guest.run(), steps_of(guest)
    guest.build(**{**changes, "train": {**changes["train"], "save_steps": 1, "save_strategy": "steps"}})
    saved = guest.run()
    same(whole, saved)
    for step in range(1, steps + 1):
        out = cut_after(guest, saved, step)
        same(whole, guest.run(out=out, environ=RESUME))


def cut_after(guest: Guest, run: Run, step: int) -> Path:
    """The run as it was when it was killed after a step."""
    out = guest.folder / f"cut-{guest.count}-{step}"
    shutil.copytree(run.out, out, ignore=shutil.ignore_patterns("model", "adapter", "manifest.json", "exit.json"))
    for path in (out / "checkpoints").iterdir():
        if path.name != f"checkpoint-{step}":
            shutil.rmtree(path)
    return out


SAVED: dict[str, Any] = {**model(GPT2), "train": {**TRAIN, "save_steps": 2}}
"""Dropout, and a checkpoint after steps 2, 4 and 6."""


def resumable(guest: Guest) -> tuple[Run, Path]:
    """A whole run of SAVED, and one that was killed after step 5."""
    guest.build(**SAVED)
    whole = guest.run()
    run = guest.run(kill_after=5)
    assert run.manifest["resumed"] == []
    assert (run.rc, len(run.metrics), run.manifest["complete"]) == (6, 5, False)
    assert "worker 0 was killed" in run.exit["message"]
    return whole, run.out


def damaged(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(data[: len(data) // 2] if how == "cut" else bytes([data[0] ^ 1]) + data[1:])


def test_damaged_checkpoint_is_not_used(guest: Guest) -> None:
    """Whichever file of the newest checkpoint is cut off, gone or another: it is told, and the one before is used."""
    whole, out = resumable(guest)
    folder = out / "checkpoints"
    found, told = checkpoints.last_whole(folder)
    assert (found and found.step, told) == (4, ())
    names = sorted(path.name for path in (folder / "checkpoint-4").iterdir())
    assert {"kit.json", "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"} <= {
        *names
    }
    for name in names:
        for how in ("cut", "missing", "flipped"):
            data = (folder / "checkpoint-4" / name).read_bytes()
            damaged(folder / "checkpoint-4" / name, how)
            found, told = checkpoints.last_whole(folder)
            assert (found and found.step, len(told)) == (2, 1), (name, how)
            assert told[0].startswith("checkpoint-4 is not whole: ")
            (folder / "checkpoint-4" / name).write_bytes(data)
    damaged(folder / "checkpoint-4/optimizer.pt", "cut")
    again = guest.run(out=out, environ=RESUME)
    same(whole, again)
    assert re.search(r"kit: checkpoint-4 is not whole: optimizer.pt has \d+ bytes of \d+\n", again.terminal)
    assert "kit: resume: from checkpoint-2" in again.terminal
    assert again.manifest["resumed"] == [2]


def test_killed_while_a_checkpoint_is_written(guest: Guest) -> None:
    """All files but the mark are there: the checkpoint does not count, and the run goes on from the one before."""
    guest.build(**SAVED)
    whole, run = guest.run(), guest.run(kill_in_save=4)
    assert (run.rc, (run.out / "checkpoints/checkpoint-4/model.safetensors").exists()) == (6, True)
    again = guest.run(out=run.out, environ=RESUME)
    same(whole, again)
    assert "kit: checkpoint-4 is not whole: it was not written to its end" in again.terminal


@pytest.mark.parametrize("tail", [b"", b'{"step": 2, "lo', b'{"step": 2}', b"\xff\x00\x00\n", b"[]\n", None])
def test_what_a_crash_left_of_the_metrics(tail: bytes | None, tmp_path: Path) -> None:
    """A line that is cut off or garbled, or no file: what is before it counts, and a resume takes the checkpoint's copy."""
    metrics = record.Metrics(tmp_path / "metrics.jsonl")
    metrics.start()
    metrics.append({"step": 1, "loss": 0.5})
    if tail is None:
        metrics.path.unlink()
    else:
        metrics.path.write_bytes(metrics.path.read_bytes() + tail)
    assert [line["step"] for line in record.read_metrics(metrics.path)] == ([] if tail is None else [1])


def test_resumes_whatever_became_of_the_other_files(guest: Guest) -> None:
    """Torn metrics, status, exit and manifest files change nothing of a resumed run."""
    whole, out = resumable(guest)
    (out / "metrics.jsonl").write_bytes(b'{"step": 1, "loss"')
    for name in ("status.json", "exit.json", "manifest.json"):
        (out / name).write_bytes(b'{"exit_code": 0, "complete": tr')
    same(whole, guest.run(out=out, environ=RESUME))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "metrics.jsonl"])
def test_disk_full(guest: Guest, name: str) -> None:
    """Where a file of the second checkpoint, or a line, finds no room: exit 6 says so, and the first is whole."""
    guest.build(**SAVED)
    whole = guest.run()
    size = (whole.out / "checkpoints/checkpoint-2" / name).stat().st_size
    run = guest.run(limit_after=[3, size - 1])
    assert (run.rc, run.exit["message"]) == (6, "no space left on the device while training"), run.terminal
    assert "resume" in run.exit["hint"]
    found, told = checkpoints.last_whole(run.out / "checkpoints")
    assert (found and found.step, told) == (2, ())
    assert not (run.out / "checkpoints/checkpoint-4").exists()
    same(whole, guest.run(out=run.out, environ=RESUME))


@pytest.mark.parametrize("name", ["manifest.json", "exit.json"])
def test_a_run_that_cannot_be_recorded(guest: Guest, name: str) -> None:
    """No room for the last files: exit 6, told where it can be, never a run that seems complete."""
    guest.build(**PLAIN, train={**TRAIN, "max_steps": 1})
    run = guest.run(full=name)
    assert run.rc == 6
    assert "No space left on device" in run.terminal
    held = {path.name for path in run.out.iterdir()}
    assert name not in held
    assert "exit.json" not in held or run.exit["exit_code"] == 6


def test_out_of_a_clock(guest: Guest) -> None:
    """A checkpoint is due by the clock where the recipe says nothing; the last two stay, and go when the run is done."""
    guest.build(**model(GPT2), train=TRAIN)
    whole = guest.run()
    run = guest.run(environ={"KIT_CHECKPOINT_SECONDS": "1e-6"}, kill_after=STEPS)
    assert run.rc == 6
    assert sorted(path.name for path in (run.out / "checkpoints").iterdir()) == ["checkpoint-4", "checkpoint-5"]
    again = guest.run(out=run.out, environ=RESUME)
    same(whole, again)
    assert not (run.out / "checkpoints").exists()


def test_two_clocks_are_one(guest: Guest) -> None:
    """With two processes the first one's clock counts, and both write the same checkpoint."""
    guest.build(**model(GPT2), train=TRAIN, launch={"processes_per_node": 2})
    run = guest.run(environ={"KIT_CHECKPOINT_SECONDS": "1e-6"}, terminate_after=4)
    assert run.rc == 10, run.terminal
    found, told = checkpoints.last_whole(run.out / "checkpoints")
    assert (found and found.step, told) == (run.exit["steps_done"], ())
    assert found
    assert {"rng_state_0.pth", "rng_state_1.pth", "calls-0.json", "calls-1.json"} <= {*found.mark["files"]}
    (found.folder / "rng_state_1.pth").unlink()
    mark = {
        **found.mark,
        "files": {name: facts for name, facts in found.mark["files"].items() if name != "rng_state_1.pth"},
    }
    record.write_json(found.folder / "kit.json", mark)
    again = guest.run(out=run.out, environ=RESUME)
    assert (again.rc, again.exit["message"]) == (6, f"{found.folder.name} lacks rng_state_1.pth of rank 1")


def test_killed_after_the_last_step(guest: Guest) -> None:
    """A run whose last step has a checkpoint is evaluated and saved without a step more."""
    guest.build(**{**SAVED, "train": {**SAVED["train"], "max_steps": 4}}, evaluate=EVALUATE)  # an epoch has six
    whole = guest.run()
    again = guest.run(out=cut_after(guest, whole, 4), environ=RESUME)
    same(whole, again)
    assert again.manifest["results"]["evaluate"] == whole.manifest["results"]["evaluate"]


@pytest.mark.parametrize(
    ("phase", "told"),
    [
        ("verify: every locked file", "verify"),
        ("preflight", "verify"),
        ("launch", "load"),
        ("load: data and trainer", "evaluate"),
        ("evaluate: before training", "evaluate"),
    ],
)
def test_stopped_before_training(guest: Guest, phase: str, told: str) -> None:
    """A stop before the first step is exit 10 with nothing done, and a word of where."""
    guest.build(**PLAIN, train=TRAIN, evaluate=EVALUATE)
    run = guest.run(terminate_in=phase)
    assert (run.rc, run.exit["steps_done"]) == (10, 0), run.terminal
    assert run.exit["message"] == f"stopped in phase {told}, before the first step"
    assert list((run.out / "checkpoints").glob("*")) == []


@pytest.mark.parametrize(
    "moment",
    [
        {"terminate_after": 1},
        {"terminate_in": "evaluate: after training"},
        {"terminate_in": "record: saving the model"},
    ],
    ids=lambda moment: "-".join(map(str, moment.values())),
)
def test_stopped_after_training(guest: Guest, moment: dict[str, Any]) -> None:
    """A stop in the last step or after it lets the run be completed."""
    guest.build(**PLAIN, train={**TRAIN, "max_steps": 1}, evaluate=EVALUATE)
    run = guest.run(**moment)
    assert (run.rc, run.manifest["complete"]) == (0, True)


def test_resumed_and_stopped_at_once(guest: Guest) -> None:
    """A stop before a resumed run's first step of its own loses nothing of what was done."""
    guest.build(**PLAIN, train=TRAIN)
    whole, run = guest.run(), guest.run(terminate_after=3)
    again = guest.run(out=run.out, environ=RESUME, terminate_in="load: data and trainer")
    assert (again.rc, again.exit["steps_done"]) == (10, 3)
    assert "--resume" in again.exit["hint"]
    same(whole, guest.run(out=run.out, environ=RESUME))


def test_without_a_checkpoint(guest: Guest) -> None:
    """Killed before the first one: a resume says so; a scheduler's restart begins anew, and does nothing once done."""
    guest.build(**SAVED)
    whole, run = guest.run(), guest.run(kill_after=1)
    again = guest.run(out=run.out, environ=RESUME)
    assert (again.rc, again.exit["message"]) == (6, "there is no whole checkpoint to resume from")
    auto = {"KIT_RESUME": "auto"}
    same(whole, guest.run(out=run.out, environ=auto))
    before = contents(run.out)
    assert guest.run(out=run.out, environ=auto).rc == 0
    again = guest.run(out=run.out, environ=RESUME)
    assert again.rc == 6
    assert f"the run in {run.out} is finished: there is nothing to go on with" in again.terminal
    assert contents(run.out) == before


def contents(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"seed": 8}, "recipe.seed is 8, the run has 7"),
        ({"launch": {"processes_per_node": 2}}, "recipe.launch.processes_per_node is 2, the run has 1"),
        ({"batch": {"global": 2, "micro": 2}}, "recipe.batch.global is 2, the run has 4"),
        ({"dataset": [{"path": "a"}, {"path": "b"}]}, "datasets is "),
    ],
)
def test_another_lock_is_refused(guest: Guest, changes: dict[str, Any], told: str) -> None:
    """A resume with another seed, world size, batch or data says what differs, and touches nothing."""
    guest.build(**PLAIN, train=TRAIN)
    run = guest.run(terminate_after=1)
    before = contents(run.out)
    guest.build(**{**PLAIN, "train": TRAIN, **changes})
    again = guest.run(out=run.out, environ=RESUME)
    assert again.rc == 6
    assert f"the run in {run.out} was started from another lock: " in again.terminal
    assert told in again.terminal
    assert contents(run.out) == before
    (run.out / "lock.json").unlink()
    again = guest.run(out=run.out, environ=RESUME)
    assert again.rc == 6
    assert again.exit["message"].startswith("checkpoint-1 has ")
    assert "the lock " in again.exit["message"]


@pytest.mark.parametrize(("mode", "code"), [("strict", 6), ("record", 0)])
def test_another_device(guest: Guest, mode: str, code: int) -> None:
    """Strict refuses to go on on another device, naming it; record goes on."""
    guest.build(**PLAIN, train=TRAIN, determinism=mode)
    run = guest.run(terminate_after=1)
    path = run.out / "checkpoints/checkpoint-1/kit.json"
    mark = json.loads(path.read_bytes())
    mark["device"]["isa"] = "Z80"
    path.write_text(json.dumps(mark))
    again = guest.run(out=run.out, environ=RESUME)
    assert again.rc == code
    assert code == 0 or "checkpoint-1 was written elsewhere: isa is " in again.exit["message"]
    assert code == 0 or 'the run has "Z80"' in again.exit["message"]


def test_one_guest_at_a_time(guest: Guest) -> None:
    """While a run goes on, a pasted `docker run` line is refused, resumed or not, and changes nothing."""
    guest.build(**PLAIN, train={**TRAIN, "max_steps": 5000})
    run = guest.start()
    wait_for(lambda: len(run.metrics) > 2, run)
    for environ, text in (({}, "holds a run already"), (RESUME, "a run in {} is still going on")):
        code, said = pasted(guest, run.out, environ)
        assert (code, text.format(run.out) in said) == (6, True), said
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait().rc == 10
    assert len(run.metrics) == run.exit["steps_done"]


def test_a_run_that_has_only_begun(guest: Guest) -> None:
    """The lock holds from the first moment, when nothing in the directory tells of a run yet."""
    guest.build(**PLAIN)
    out = guest.folder / "begun"
    (out / "logs").mkdir(parents=True)
    with (out / "logs/guest.log").open("w") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        code, said = pasted(guest, out, {})
    assert (code, f"a run in {out} is still going on" in said) == (6, True), said


def pasted(guest: Guest, out: Path, environ: dict[str, str]) -> tuple[int, str]:
    """A second guest, without the training libraries: it must not come that far."""
    held = {**guest.root.environ, "KIT_OUT": str(out), "PYTHONPATH": str(REPOSITORY), "PYTHONHASHSEED": "0", **environ}
    command = [sys.executable, "-S", "-m", "kitbuild.guest", "train"]
    done = subprocess.run(command, env=held, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def test_old_ones_go_when_a_new_one_is_whole(tmp_path: Path) -> None:
    """The last whole ones stay, whatever lies beside them; without a limit all whole ones."""
    for keep, left in ((1, [8]), (2, [6, 8]), (3, [2, 6, 8]), (9, [2, 6, 8]), (None, [2, 6, 8])):
        folder = tmp_path / str(keep)
        for step in (2, 4, 6, 8):
            (folder / f"checkpoint-{step}").mkdir(parents=True)
            if step != 4:
                (folder / f"checkpoint-{step}/kit.json").write_text("{}")
        (folder / "checkpoint-10").mkdir()  # not older: nobody's business here
        checkpoints.prune(folder, keep=keep, newest=folder / "checkpoint-8")
        assert sorted(int(path.name[11:]) for path in folder.iterdir()) == [*left, 10]


def test_a_checkpoint_that_lacks_a_rank(tmp_path: Path) -> None:
    """No mark is set where a rank's random numbers are missing."""
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    for name in ("rng_state_0.pth", "calls-0.json", "calls-1.json"):
        (folder / name).write_bytes(b"x")
    with pytest.raises(RunError, match=r"checkpoint-1 lacks rng_state_1.pth"):
        checkpoints.seal(folder, {"step": 1}, ["rng_state_0.pth", "rng_state_1.pth"])
    assert not (folder / "kit.json").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"resumed": None},
        {"device": []},
        {"files": {"a": None}},
        {"files": {"a": {"size": 1}}},
        {"files": 1},
        {"step": "1"},
    ],
)
def test_a_mark_that_lost_something(change: dict[str, Any], tmp_path: Path) -> None:
    """A mark without all that a resume reads is none: the checkpoint before it is used."""
    facts = {"steps": 2, "resumed": [], "device": {}, "evaluate_before": None}
    for step in (1, 2):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "a").write_bytes(b"x")
        checkpoints.seal(folder, {"step": step, **facts}, ["a"])
    mark = checkpoints.read_mark(tmp_path / "checkpoint-2")
    assert mark is not None
    record.write_json(tmp_path / "checkpoint-2/kit.json", {**mark, **change})
    found, told = checkpoints.last_whole(tmp_path)
    assert (found and found.step, told) == (1, ("checkpoint-2 is not whole: it was not written to its end",))


def test_everything_is_on_the_disk_before_the_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file and folder is synced, then the mark is written, then its name is synced."""
    folder = tmp_path / "checkpoint-1"
    (folder / "global_step1").mkdir(parents=True)
    for name in ("rng_state.pth", "calls-0.json", "global_step1/states.pt"):
        (folder / name).write_bytes(b"x")
    order: list[str] = []
    monkeypatch.setattr(record, "sync", lambda path: order.append(path.name))
    monkeypatch.setattr(record, "write_json", lambda path, _: order.append(path.name))
    checkpoints.seal(folder, {"step": 1}, ["rng_state.pth"])
    files = ["calls-0.json", "states.pt", "rng_state.pth"]
    assert order == [*files, "checkpoint-1", "global_step1", "kit.json", "checkpoint-1", tmp_path.name]


def test_digest_is_of_all_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces: the order, the length and each byte count."""
    monkeypatch.setattr(checkpoints, "CHUNK_BYTES", 4)
    found = set()
    for data in (b"", b"abcd", b"abcdefgh", b"efghabcd", b"abcdefg", b"abcdefgi", b"abcdefghi"):
        (tmp_path / "x").write_bytes(data)
        found.add(checkpoints.digest(tmp_path / "x"))
    assert len(found) == 7


@pytest.mark.parametrize("text", ["soon", "1e"])
def test_clock_that_is_none(text: str) -> None:
    """A wrong KIT_CHECKPOINT_SECONDS is named."""
    with pytest.raises(UsageError, match="KIT_CHECKPOINT_SECONDS is '" + text):
        config.checkpoint_seconds(text)


NODES: dict[str, Any] = {
    **model(GPT2),
    "launch": {"nodes": 2, "processes_per_node": 1},
    "train": {**TRAIN, "max_steps": 60, "save_steps": 10, "save_total_limit": 2},
}


@pytest.mark.slow_extra
def test_two_nodes_go_on_from_what_both_have(guest: Guest, train_python: str) -> None:
    """Each node keeps checkpoints of its own; where one of them lost its last, both go on from the one before."""
    guest.build(**NODES)

    def run(name: str, environ: dict[str, str], *, stop: int | None = None) -> list[tuple[int, Path]]:
        outs = [guest.folder / f"{name}-{rank}" for rank in range(2)]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        processes = []
        for rank, out in enumerate(outs):
            out.mkdir(exist_ok=True)
            held = {
                **os.environ, **guest.root.environ, **environ, "KIT_OUT": str(out), "PYTHONHASHSEED": "0",
                "KIT_CACHE": str(guest.folder / f"cache-{rank}"), "PYTHONPATH": str(REPOSITORY), "PYTHONSAFEPATH": "1",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": str(rank),
            }  # fmt: skip
            command = [train_python, "-m", "kitbuild.guest", "train"]
            processes.append(subprocess.Popen(command, env=held, stderr=subprocess.DEVNULL))
        metrics = outs[0] / "metrics.jsonl"
        while stop and all(item.poll() is None for item in processes):
            if metrics.exists() and metrics.read_bytes().count(b"\n") >= stop:
                processes[1].send_signal(signal.SIGTERM)  # to one of them
                break
            time.sleep(0.01)
        return [(item.wait(timeout=120), out) for item, out in zip(processes, outs, strict=True)]

    whole = run("whole", {})
    assert [code for code, _ in whole] == [0, 0], (whole[0][1] / "logs/guest.log").read_text()
    stopped = run("cut", {}, stop=25)
    assert [code for code, _ in stopped] == [10, 10]
    found = [checkpoints.last_whole(out / "checkpoints")[0] for _, out in stopped]
    assert found[0]
    assert found[1]
    assert found[0].step == found[1].step >= 25
    assert ("rng_state_0.pth" in found[0].mark["files"], "rng_state_1.pth" in found[1].mark["files"]) == (True, True)
    (found[1].folder / "optimizer.pt").write_bytes(b"")
    resumed = run("cut", RESUME)
    assert [code for code, _ in resumed] == [0, 0], (resumed[1][1] / "logs/rank-1.log").read_text()
    for left, right in zip(whole, resumed, strict=True):
        names = ("step", "loss", "grad_norm", "learning_rate", "batch_sha256")
        held = [
            [[json.loads(line)[name] for name in names] for line in (out / "metrics.jsonl").read_text().splitlines()]
            for _, out in (left, right)
            if (out / "metrics.jsonl").exists()
        ]
        assert len(held) in {0, 2}
        assert held == [] or held[0] == held[1]
    weights = [json.loads((out / "manifest.json").read_bytes())["weights"] for out in (whole[0][1], resumed[0][1])]
    assert weights[0] == weights[1] != {}
