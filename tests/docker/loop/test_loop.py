"""recipe → lock → image → run → archive → compare, with the tiny recipe."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kitbuild.lock.files import lock_path
from tests.docker.loop.command import eventually
from tests.docker.loop.recipes import read_lock, recipe
from tests.docker.loop.stores import new_machine

if TYPE_CHECKING:
    import docker

    from kitbuild.store import Store
    from tests.docker.loop.command import Kitbuild
    from tests.docker.loop.conftest import Baseline

pytestmark = pytest.mark.docker


def manifest(run: dict[str, Any]) -> dict[str, Any]:
    found = json.loads((Path(run["run_dir"]) / "manifest.json").read_bytes())
    assert isinstance(found, dict)
    return found


def test_run_archive(kit: Kitbuild, baseline: Baseline) -> None:
    """A run gives a complete archive that verifies and says which image and which locked environment made it."""
    assert baseline.run["schema"] == "kitbuild.run/1"
    assert baseline.run["exit_code"] == 0
    found = manifest(baseline.run)
    assert found["complete"] is True
    assert found["lock_sha256"] == baseline.image["lock_sha256"]
    assert found["image"] == {
        "config_digest": baseline.image["image_id"],
        "manifest_digest": baseline.image["manifest_digest"],
        "engine_id": baseline.image["engine_id"],
        "content_sha256": baseline.image["content_sha256"],
    }
    assert found["environment"]["locked"] is True
    verified = kit("archive", "verify", baseline.run_dir)
    assert (verified["schema"], verified["steps"]) == ("kitbuild.archive-verify/1", 10)
    assert verified["archive_sha256"] == baseline.run["archive_sha256"]
    listed = json.loads((baseline.run_dir / "archive.json").read_bytes())["files"]
    assert {"manifest.json", "model/config.json", "model/tokenizer.json", "logs/guest.log", "logs/rank-0.log"} <= {
        *listed
    }


def test_image_in_engine(baseline: Baseline, engine: docker.DockerClient) -> None:
    """The engine holds the image under its tag, with the labels by which it is recognised."""
    held = engine.images.get(f"kitbuild/tiny-cpu:{baseline.image['lock_sha256'][:12]}")
    assert baseline.image["engine_id"] == held.id
    assert held.labels["org.kitbuild.lock"] == baseline.image["lock_sha256"]
    assert held.labels["org.kitbuild.content"] == baseline.image["content_sha256"]


def test_unchanged_image_sends_nothing(kit: Kitbuild, baseline: Baseline) -> None:
    """The same lock again is the same image, and every layer is reused."""
    again = kit("image", baseline.recipe)
    assert baseline.image["image_id"] == again["image_id"]
    assert all(layer["reused"] for layer in again["layers"])


def test_packed_archive_reproduces_elsewhere(kit: Kitbuild, baseline: Baseline, store: Store, tmp_path: Path) -> None:
    """A packed archive is enough for a store that holds nothing but upstream's wheels and base: IDENTICAL."""
    packed = tmp_path / "x.kit.tar"
    assert kit("archive", "pack", baseline.run_dir, "--output", packed)["path"] == str(packed)
    home = new_machine(store, tmp_path / "home", baseline.lock)
    elsewhere = kit.given(KITBUILD_HOME=str(home))
    report = tmp_path / "report.html"
    again = elsewhere("reproduce", packed, "--out", tmp_path / "runs", "--report", report)
    assert "Every value is the same, bit for bit" in report.read_text(encoding="utf-8")
    assert (again["schema"], again["verdict"]) == ("kitbuild.reproduce/1", "IDENTICAL")
    assert again["first_difference"] is None
    unpacked = elsewhere("archive", "unpack", packed, tmp_path / "unpacked")
    assert elsewhere("archive", "verify", unpacked["path"])["steps"] == 10
    compared = kit("compare", baseline.run_dir, again["run_dir"])
    assert (compared["schema"], compared["verdict"]) == ("kitbuild.compare/1", "IDENTICAL")


def test_other_seed_differs(kit: Kitbuild, baseline: Baseline, tmp_path: Path) -> None:
    """Another seed is exit 8 at step 1, and the seed is the first cause."""
    path = recipe(tmp_path, changed={"seed: 42": "seed: 43"})
    other = kit("run", path, "--out", tmp_path / "runs")
    verdict = kit("compare", baseline.run_dir, other["run_dir"], exit_code=8)
    assert verdict["verdict"] == "DIFFERENT"
    assert verdict["first_difference"]["step"] == 1
    assert verdict["causes"][0]["kind"] == "seed"
    assert (verdict["causes"][0]["left"], verdict["causes"][0]["right"]) == ("42", "43")


def test_other_row_differs(kit: Kitbuild, baseline: Baseline, tmp_path: Path) -> None:
    """One changed data row is exit 8 at the step that reads it, and the dataset is the first cause."""
    path = recipe(tmp_path)
    data = tmp_path / "data" / "commands-train.jsonl"
    rows = data.read_text(encoding="utf-8").splitlines(keepends=True)
    changed = json.loads(rows[0])
    rows[0] = rows[1]
    assert changed != json.loads(rows[1])
    data.write_text("".join(rows), encoding="utf-8")
    other = kit("run", path, "--out", tmp_path / "runs")
    verdict = kit("compare", baseline.run_dir, other["run_dir"], exit_code=8)
    assert verdict["verdict"] == "DIFFERENT"
    assert verdict["first_difference"]["field"] == "batch_sha256"
    assert verdict["first_difference"]["step"] in range(1, 11)
    assert verdict["causes"][0]["kind"] == "dataset"


def test_container_is_hardened_and_its_line_works(
    kit: Kitbuild, baseline: Baseline, engine: docker.DockerClient, tmp_path: Path
) -> None:
    """No network, read-only root, no capability, an ordinary user; the printed `docker run` line gives the same run."""
    running = kit.start("run", baseline.recipe, "--out", tmp_path / "runs", "--json", "--verbose")
    try:
        (run_dir,) = eventually("a run directory", lambda: list((tmp_path / "runs").glob("*/status.json")))[0].parents[
            :1
        ]
        container = engine.containers.get(run_dir.name)
        host, config = container.attrs["HostConfig"], container.attrs["Config"]
    finally:
        code, out, err = running.end()
    assert code == 0, err
    assert host["NetworkMode"] == "none"
    assert host["ReadonlyRootfs"] is True
    assert host["CapDrop"] == ["ALL"]
    assert host["CapAdd"] is None
    assert host["Privileged"] is False
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert config["User"].split(":")[0] not in {"", "0", "root"}
    assert config["Image"] == baseline.image["engine_id"]
    assert {mount["Destination"] for mount in container.attrs["Mounts"] if mount["RW"]} == {"/out"}
    first = json.loads(out)["run_dir"]
    assert first == str(run_dir)

    (line,) = [text.removeprefix("equal to: ") for text in err.splitlines() if text.startswith("equal to: ")]
    bare = tmp_path / "runs" / "bare"
    bare.mkdir()
    if os.geteuid() == 0:
        os.chown(bare, 10001, 10001)
    done = subprocess.run(line.replace(first, str(bare)), shell=True, capture_output=True, text=True, check=False)  # noqa: S602 - a line for a shell
    assert done.returncode == 0, done.stdout + done.stderr
    for run in (first, bare):
        assert kit("archive", "verify", run)["archive_sha256"]
        assert kit("compare", baseline.run_dir, run)["verdict"] == "IDENTICAL"


def test_local_engine(kit: Kitbuild, baseline: Baseline, tmp_path: Path) -> None:
    """The same guest in a locked environment without a container gives the same values."""
    dead = kit.given(DOCKER_HOST=f"unix://{tmp_path}/no-engine.sock")
    run = dead("run", baseline.recipe, "--engine", "local", "--out", tmp_path / "runs")
    found = manifest(run)
    assert (found["engine"], found["environment"]["locked"]) == ("local", True)
    verdict = kit("compare", baseline.run_dir, run["run_dir"])
    assert verdict["verdict"] == "IDENTICAL", verdict


@pytest.mark.train
def test_local_engine_with_own_python(kit: Kitbuild, baseline: Baseline, tmp_path: Path) -> None:
    """A Python of the user's own runs, is recorded as not locked, and every verdict says so."""
    python = os.environ["KITBUILD_TRAIN_PYTHON"]
    run = kit("run", baseline.recipe, "--engine", "local", "--python", python, "--out", tmp_path / "runs")
    assert manifest(run)["environment"]["locked"] is False
    code, out, _ = kit.ends("compare", baseline.run_dir, run["run_dir"], "--json")
    verdict = json.loads(out)
    assert code in {0, 8}
    assert any("not locked" in note for note in verdict["notes"]), verdict["notes"]


def test_stale_lock_is_refused(kit: Kitbuild, tmp_path: Path) -> None:
    """A recipe, a lock or a data file that changed after locking is exit 3 with the command to use; nothing is run."""
    path = recipe(tmp_path)
    kit("lock", path)
    locked = lock_path(path).read_bytes()
    assert read_lock(path).name == "tiny-cpu"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("max_steps: 10", "max_steps: 11"), encoding="utf-8")
    stale = kit.fails(3, "run", path, "--out", tmp_path / "runs")
    assert stale["message"] == f"{lock_path(path)} is stale: {path} changed since"
    assert stale["hint"] == f"kitbuild lock {path}"
    assert kit.fails(3, "image", path)["message"] == stale["message"]
    assert kit.fails(3, "lock", path, "--check")["message"] == stale["message"]
    path.write_text(text, encoding="utf-8")

    lock_path(path).write_bytes(locked.replace(b'"max_steps": 10', b'"max_steps": 12'))
    assert "was edited" in kit.fails(3, "run", path, "--out", tmp_path / "runs")["message"]
    lock_path(path).write_bytes(locked[:-100])
    assert kit.fails(3, "image", path)["code"] == "lock"
    lock_path(path).write_bytes(locked)

    data = tmp_path / "data" / "commands-train.jsonl"
    data.write_bytes(data.read_bytes() + data.read_bytes().splitlines(keepends=True)[0])
    edited = kit.fails(3, "run", path, "--out", tmp_path / "runs")
    assert edited["message"] == f"{lock_path(path)} is stale: local files changed since"
    assert [problem["file"] for problem in edited["problems"]] == [str(data)]
    assert not (tmp_path / "runs").exists()


def test_bad_recipe_is_refused(kit: Kitbuild, tmp_path: Path) -> None:
    """A bad recipe is exit 2 with place and key, for programs and for people."""
    path = recipe(tmp_path, changed={"learning_rate: 1.0e-2": "learning_rat: 1.0e-2"})
    error = kit.fails(2, "run", path)
    (problem,) = error["problems"]
    assert (problem["file"], problem["key"]) == (str(path), "train.learning_rat")
    assert problem["line"] == path.read_text(encoding="utf-8").splitlines().index("  learning_rat: 1.0e-2") + 1
    assert "learning_rate" in (problem["hint"] or problem["message"])
    assert f"{path}:{problem['line']}:" in kit.says(2, "run", path)
    assert kit.fails(2, "run", tmp_path / "none.yaml")["message"]
    assert kit.fails(2, "run", path, "--engine", "podman-machine")["code"] in {"usage", "recipe"}
