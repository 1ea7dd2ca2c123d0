"""Ctrl-C and kills while an image is made and while a run goes on: what is left is valid, and work goes on."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kitbuild.errors import RunError
from kitbuild.progress import Silent
from kitbuild.run import docker_engine
from kitbuild.run.docker_engine import container_spec, remove_abandoned
from kitbuild.run.follow import Stop
from tests.docker.loop.command import Kitbuild, Running, checked_error, eventually, one_object
from tests.docker.loop.conftest import Baseline
from tests.docker.loop.recipes import recipe
from tests.docker.loop.stores import new_machine

if TYPE_CHECKING:
    import docker

    from kitbuild.store import Store

pytestmark = pytest.mark.docker
STEPS = 150
LONG = {
    "max_steps: 10": f"max_steps: {STEPS}",
    "evaluate:                            # before and after training\n": "",
    "  dataset:\n    path: data/commands-heldout.jsonl\n  metric: exact_match\n": "",
    "  max_new_tokens: 16\n  examples: 16\n  batch: 16\n": "",
}


@pytest.fixture(scope="module")
def long(kit: Kitbuild, tmp_path_factory: pytest.TempPathFactory) -> Baseline:
    """A run of forty steps that nobody interrupted."""
    folder = tmp_path_factory.mktemp("long")
    path = recipe(folder, changed=LONG)
    return Baseline(recipe=path, image=kit("image", path), run=kit("run", path, "--out", folder / "runs"))


def status(runs: Path) -> dict[str, Any]:
    """What the one run below says of itself."""
    for path in runs.glob("*/status.json"):
        found = json.loads(path.read_bytes())
        assert isinstance(found, dict)
        return found
    return {}


def at_step(running: Running, runs: Path, step: int) -> None:
    def there() -> bool:
        assert running.process.poll() is None, running.end()
        said = status(runs)  # a resumed run has the last words of the one before, for a moment
        return said.get("phase") == "train" and int(said.get("step") or 0) >= step

    eventually(f"step {step}", there)


def interrupted(running: Running, exit_code: int) -> dict[str, Any]:
    code, out, err = running.end(timeout_seconds=90)
    assert (code, err) == (exit_code, ""), out
    return checked_error(one_object(out), exit_code)


def containers(engine: docker.DockerClient, runs: Path) -> list[str]:
    names = {path.name for path in runs.glob("*")}
    return [
        container.name for container in engine.containers.list(all=True, ignore_removed=True) if container.name in names
    ]


def test_stop_and_resume(kit: Kitbuild, long: Baseline, engine: docker.DockerClient, tmp_path: Path) -> None:
    """A signal during training is exit 10 with a checkpoint; resumed, the run has the values of one never stopped."""
    run_dir, done = None, 0
    arguments: tuple[object, ...] = ("run", long.recipe, "--out", tmp_path)
    for number in (signal.SIGINT, signal.SIGTERM):
        running = kit.start(*arguments, "--json")
        at_step(running, tmp_path, done + 3)
        running.interrupt(number)
        error = interrupted(running, 10)
        assert error["message"].endswith("a checkpoint is saved")
        assert run_dir in {None, Path(error["run_dir"])}
        run_dir = Path(error["run_dir"])
        before, done = done, len((run_dir / "metrics.jsonl").read_bytes().splitlines())
        assert before + 3 <= done < STEPS
        assert containers(engine, tmp_path) == []
        assert kit("compare", long.run_dir, run_dir, exit_code=9)["verdict"] == "NOT_COMPARABLE"
        arguments = ("run", long.recipe, "--resume", run_dir)
    assert kit(*arguments)["run_dir"] == str(run_dir)
    verdict = kit("compare", long.run_dir, run_dir)
    assert verdict["verdict"] == "IDENTICAL", verdict


@pytest.mark.parametrize("moment", ["created", "verify"])
def test_interrupted_before_training(
    kit: Kitbuild, long: Baseline, engine: docker.DockerClient, tmp_path: Path, moment: str
) -> None:
    """Ctrl-C after the container was made and before the first step is exit 130; no container is left."""
    running = kit.start("run", long.recipe, "--out", tmp_path, "--json")
    eventually("a container", lambda: containers(engine, tmp_path))
    if moment != "created":
        eventually("the guest", lambda: status(tmp_path).get("phase") == moment)
    running.interrupt()
    assert interrupted(running, 130)["code"] == "interrupted"
    assert containers(engine, tmp_path) == []


def test_killed_with_a_run(kit: Kitbuild, long: Baseline, engine: docker.DockerClient, tmp_path: Path) -> None:
    """After kill -9 of kitbuild the container trains to its end: the archive counts; the next run removes it."""
    running = kit.start("run", long.recipe, "--out", tmp_path, "--json")
    at_step(running, tmp_path, 1)
    running.interrupt(signal.SIGKILL)
    running.end()
    (run_dir,) = tmp_path.iterdir()
    error = kit.fails(6, "run", long.recipe, "--resume", run_dir)
    assert error["message"] == f"the run {run_dir} is still going on"
    remove_abandoned(engine)
    engine.containers.get(run_dir.name).wait(timeout=120)
    assert kit("compare", long.run_dir, run_dir)["verdict"] == "IDENTICAL"
    assert containers(engine, tmp_path) == [run_dir.name]
    remove_abandoned(engine)
    assert containers(engine, tmp_path) == []


def test_guest_is_killed(kit: Kitbuild, long: Baseline, engine: docker.DockerClient, tmp_path: Path) -> None:
    """A container that somebody kills is exit 6, and the error says where to look."""
    running = kit.start("run", long.recipe, "--out", tmp_path, "--json")
    at_step(running, tmp_path, 1)
    (name,) = containers(engine, tmp_path)
    engine.containers.get(name).kill()
    error = interrupted(running, 6)
    assert "killed" in error["message"]
    assert error["run_dir"] == str(tmp_path / name)
    assert containers(engine, tmp_path) == []
    told = json.loads((tmp_path / name / "exit.json").read_bytes())
    assert (told["exit_code"], told["message"], told["phase"]) == (6, error["message"], "train")
    assert json.loads((tmp_path / name / "manifest.json").read_bytes())["complete"] is False
    (listed,) = kit("archive", "list", tmp_path)["runs"]
    assert (listed["state"], listed["error"]) == ("failed", error["message"])


def test_docker_stop(kit: Kitbuild, long: Baseline, engine: docker.DockerClient, tmp_path: Path) -> None:
    """`docker stop` from elsewhere, with no time limit named: a checkpoint and exit 10, however long the step takes."""
    running = kit.start("run", long.recipe, "--out", tmp_path, "--json")
    at_step(running, tmp_path, 2)
    (name,) = containers(engine, tmp_path)
    assert engine.containers.get(name).attrs["Config"]["StopTimeout"] == 600
    engine.api.stop(name)
    error = interrupted(running, 10)
    assert error["message"].endswith("a checkpoint is saved")
    assert f"--resume {tmp_path / name}" in error["hint"]


def test_out_of_memory(
    *,
    kit: Kitbuild,
    long: Baseline,
    engine: docker.DockerClient,
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A container that meets its memory limit is told as that, exit 6, in the archive too."""
    limits = {"mem_limit": "160m", "memswap_limit": "160m"}
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    spec = container_spec(
        long.lock, image={"engine_id": long.image["engine_id"]}, run_dir=run_dir, store=store, resume=False
    )
    given = spec.engine_arguments()
    monkeypatch.setattr(type(spec), "engine_arguments", lambda _: {**given, **limits})
    monkeypatch.setattr(docker_engine, "HOST_CONFIG", (*docker_engine.HOST_CONFIG, *limits))
    with pytest.raises(RunError) as raised:
        docker_engine.run_container(spec, run_dir, client=engine, progress=Silent(), stop=Stop())
    assert raised.value.message.startswith("the run was ended by the system: out of memory (at step "), raised.value
    told = json.loads((run_dir / "exit.json").read_bytes())
    assert (told["exit_code"], "out of memory" in told["message"]) == (6, True)
    (listed,) = kit("archive", "list", tmp_path)["runs"]
    assert listed["state"] == "failed"


def test_interrupted_while_layers_are_made(kit: Kitbuild, baseline: Baseline, store: Store, tmp_path: Path) -> None:
    """Ctrl-C while an image is assembled or sent is exit 130, and the same command gives the same image."""
    home = new_machine(store, tmp_path / "home", baseline.lock)
    mine = kit.given(KITBUILD_HOME=str(home))
    running = mine.start("image", baseline.recipe, "--json")
    eventually("layers in the making", lambda: [path for path in (home / "work").rglob("*") if path.is_file()])
    running.interrupt()
    error = interrupted(running, 130)
    assert error["code"] == "interrupted"
    assert list((home / "work").iterdir()) == []
    assert mine("store", "verify")["damaged"] == 0

    output = tmp_path / "image.tar"
    running = mine.start("image", baseline.recipe, "--output", output, "--json")
    eventually("an archive in the making", lambda: list(tmp_path.glob(".image.tar*")))
    running.interrupt()
    interrupted(running, 130)
    assert list(tmp_path.glob("*image.tar*")) == []
    again = mine("image", baseline.recipe)
    assert (baseline.image["image_id"], baseline.image["manifest_digest"]) == (
        again["image_id"],
        again["manifest_digest"],
    )


def test_interrupted_after_the_lock(kit: Kitbuild, engine: docker.DockerClient, tmp_path: Path) -> None:
    """Ctrl-C right after the lock was written, on the way into the engine, is exit 130; the next try loads the image."""
    path = recipe(tmp_path, changed={"name: tiny-cpu": "name: tiny-load"})
    running = kit.start("image", path, "--json")
    eventually("a lock", lambda: path.with_suffix(".lock.json").exists())
    running.interrupt()
    code, out, err = running.end(timeout_seconds=60)
    assert (code, err) == (130, ""), out
    image = kit("image", path)
    assert engine.images.get(image["tag"]).id == image["engine_id"]
    engine.images.remove(image["tag"])
