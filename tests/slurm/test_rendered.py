"""`kitbuild render slurm`, run by a real Slurm: it trains, it stops with a checkpoint, it goes on bit for bit."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.slurm.conftest import wait

if TYPE_CHECKING:
    from pathlib import Path

    from tests.slurm.conftest import Job, Slurm

pytestmark = [pytest.mark.slow_extra, pytest.mark.train]
STEPS = 60


@pytest.fixture(scope="module")
def recipe(slurm: Slurm) -> Path:
    """Long enough to be stopped; it saves a checkpoint only when it is asked to stop."""
    return slurm.recipe("long", train={"max_steps": STEPS, "save_steps": 10_000})


@pytest.fixture(scope="module")
def whole(slurm: Slurm, recipe: Path) -> Job:
    """The same recipe, never stopped."""
    job = slurm.submit(recipe)
    ended = job.wait()
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), job.log
    return job


def stopped(job: Job) -> dict[str, Any]:
    """exit.json of a job's run; it must have left a checkpoint."""
    assert list(job.run_dir.glob("checkpoints/checkpoint-*/kit.json")), job.log
    told: dict[str, Any] = json.loads((job.run_dir / "exit.json").read_bytes())
    return told


def identical(slurm: Slurm, left: Job, right: Job) -> bool:
    verdict = json.loads(slurm.run("kitbuild", "compare", str(left.run_dir), str(right.run_dir), "--json"))
    return bool(verdict["verdict"] == "IDENTICAL")


def test_trains_like_anywhere_else(slurm: Slurm, recipe: Path, whole: Job) -> None:
    """One node, one job: the archive is IDENTICAL to that of `kitbuild run` without Slurm."""
    slurm.run("kitbuild", "run", recipe.name, "--engine", "local", "--out", "direct")
    (direct,) = (slurm.folder / "direct").iterdir()
    verdict = json.loads(slurm.run("kitbuild", "compare", str(whole.run_dir), str(direct), "--json"))
    assert verdict["verdict"] == "IDENTICAL"


@pytest.mark.parametrize("words", [("--signal=TERM",), ()], ids=["signal", "cancel"])
def test_cancelled_with_a_checkpoint(words: tuple[str, ...], slurm: Slurm, recipe: Path) -> None:
    """SIGTERM to the job's tasks, and a plain scancel: the guest ends with exit 10, a checkpoint is there."""
    job = slurm.submit(recipe)
    job.wait_for_step(3)
    slurm.run("scancel", *words, job.number)
    ended = job.wait()
    told = stopped(job)
    assert (told["exit_code"], told["code"]) == (10, "stopped")
    assert 3 <= told["steps_done"] < STEPS
    assert ended["ExitCode"] == ("10:0" if words else "0:15")
    assert ended["Restarts"] == "0"


def test_time_limit(slurm: Slurm) -> None:
    """Slurm signals ahead of the limit, and the job has ended, with exit 10, before it."""
    job = slurm.submit(slurm.recipe("endless", train={"max_steps": 100_000}), "--time=1", "--signal=TERM@30")
    ended = job.wait()
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "10:0"), job.log
    assert stopped(job)["steps_done"] > 0


def test_queued_again_goes_on(slurm: Slurm, recipe: Path, whole: Job) -> None:
    """KIT_REQUEUE=yes: stopped, queued, resumed from the checkpoint, and IDENTICAL to the run that never stopped."""
    job = slurm.submit(recipe, KIT_REQUEUE="yes")
    job.wait_for_step(5)
    slurm.run("scancel", "--signal=TERM", job.number)
    finish(slurm, job)
    assert job.show()["Restarts"] == "1"
    assert job.log.count("a checkpoint is saved") == 1
    assert identical(slurm, whole, job)


def test_preempted_goes_on(slurm: Slurm, recipe: Path, whole: Job) -> None:
    """Preempted, it saves its checkpoint within the grace time and asks to be queued again; the same bits come out."""
    job = slurm.submit(recipe)
    job.wait_for_step(5)
    slurm.run("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--wait", "--wrap=true")
    finish(slurm, job)
    assert job.show()["Restarts"] == "1"
    assert identical(slurm, whole, job)


def test_two_nodes_are_as_one(slurm: Slurm) -> None:
    """Two nodes of one process give what one node of two gives; stopped on both and queued again, too."""
    train = {"max_steps": 40, "save_steps": 10_000}
    one = slurm.submit(
        slurm.recipe("one-node", train=train, launch={"processes_per_node": 2, "threads_per_process": 1})
    )
    whole = one.wait()
    assert whole["ExitCode"] == "0:0", one.log
    two = slurm.submit(
        slurm.recipe("two-nodes", train=train, launch={"nodes": 2, "threads_per_process": 1}), KIT_REQUEUE="yes"
    )
    two.wait_for_step(5)
    slurm.run("scancel", "--signal=TERM", two.number)
    finish(slurm, two)
    assert two.log.count("a checkpoint is saved") == 2
    assert identical(slurm, one, two)


def finish(slurm: Slurm, job: Job) -> None:
    """Wait for a second start, without the two minutes that Slurm holds a job that was queued again."""
    wait(lambda: job.show()["JobState"] == "PENDING", f"job {job.number} in the queue again: {job.log}")
    slurm.run("scontrol", "update", f"JobId={job.number}", "StartTime=now")
    ended = job.wait()
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), job.log
