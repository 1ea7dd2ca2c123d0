"""What really ran: kernels, Liger's patches and the attention path, counted in each rank and compared both ways."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kitbuild.errors import RunError
from kitbuild.guest import kernels, usage
from kitbuild.guest.config import Config
from tests.guest.root import ATTENTION, ATTENTION_COMMIT, LAYERS, LAYERS_COMMIT

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.guest.conftest import Guest
    from tests.guest.root import Root

REPOSITORY = Path(__file__).parents[2]
TRAIN: dict[str, Any] = {"max_length": 128, "learning_rate": 1e-3, "max_steps": 1}
PATH = f"{ATTENTION}@{ATTENTION_COMMIT}"


@pytest.fixture(scope="module")
def counting(train_python: str) -> dict[str, Any]:
    command = [train_python, str(Path(__file__).parent / "counting.py")]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.train
def test_liger_is_counted(counting: dict[str, Any]) -> None:
    """Each patch is found where it is, a layer's forward or a function of the model's module, and counted."""
    assert counting["patched"] == ["rms_norm", "rope"]
    assert counting["calls"] == {"rms_norm": 3, "rope": 3}


@pytest.mark.train
def test_liger_is_compared_both_ways(counting: dict[str, Any]) -> None:
    """An option that is on and patches nothing is refused, and so is a patch that nobody asked for."""
    assert counting["missing"] == "liger: swiglu is on and nothing of it is in the model"
    assert counting["unasked"] == "liger: rms_norm is off and in the model"


@pytest.mark.train
def test_counting_costs_no_compilation(counting: dict[str, Any]) -> None:
    """In compiled code a call is counted when it is compiled: one graph for all steps, and no break in it."""
    assert counting["compiled"] == {"calls": 1, "graphs": 1, "breaks": 0}


def test_liger_that_is_never_called() -> None:
    """A patch that no step reached is told by its option."""
    usage.check_liger({"rope": True, "swiglu": False}, {"liger rope": 4})
    with pytest.raises(RunError, match="liger: rms_norm was called 0 times in training"):
        usage.check_liger({"rope": True, "rms_norm": True}, {"liger rope": 4, "liger rms_norm": 0})


def test_another_attention_path(build: Callable[..., Root]) -> None:
    """A step that went through another path than the locked one is told with both and how often."""
    config = Config.read(build().environ)
    usage.check_attention(config, {f"attention path {PATH}": 4, "attention path sdpa": 0})
    usage.check_attention(config, {})
    with pytest.raises(RunError) as caught:
        usage.check_attention(config, {f"attention path {PATH}": 2, "attention path sdpa": 2})
    assert caught.value.message == (
        f"the attention paths in use are not the locked one: {PATH} (2 calls), sdpa (2 calls); the lock says {PATH}"
    )


def test_kernels_are_compared_both_ways(build: Callable[..., Root], monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded and not locked, locked and not loaded, loaded and never called: all told at once, by name."""
    config = Config.read(build().environ)
    folder = config.places.kernels / config.kernels[0].folder
    folders = {path: f"{path}/__init__.py" for path in (folder.resolve(), Path("/elsewhere/kernel"))}
    monkeypatch.setattr(kernels, "loaded_files", lambda: folders)
    with pytest.raises(RunError) as caught:
        kernels.compare(config, {f"{ATTENTION}@{ATTENTION_COMMIT}": 0})
    assert caught.value.message == (
        "kernels in use are not those of the lock: /elsewhere/kernel is loaded and not in the lock;"
        f" {LAYERS} @ bbbbbbb, variant torch-cpu is locked and not loaded;"
        f" {PATH} was called 0 times in training; {LAYERS}@{LAYERS_COMMIT}:LigerRMSNorm was called 0 times in training"
    )


@pytest.mark.train
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_path_is_recorded(guest: Guest, attention: str) -> None:
    """The archive has the path that was taken, with its calls in each rank, and none of another path."""
    guest.build(kernels={"attention": attention, "layers": {}}, train=TRAIN, launch={"processes_per_node": 2})
    run = guest.run()
    assert run.rc == 0, run.terminal
    # 1 step, 1 micro-batch in each rank, 2 layers, twice (checkpointing recomputes).
    assert run.manifest["attention"] == {
        "requested": attention,
        "used": attention,
        "calls": {"0": {attention: 4}, "1": {attention: 4}},
    }


@pytest.mark.train
def test_identity_file_and_calls_in_every_rank(guest: Guest) -> None:
    """Per kernel: repository, commit, variant, member, the file that was loaded, and calls, in every rank."""
    guest.build(train=TRAIN, launch={"processes_per_node": 2})
    run = guest.run()
    assert run.rc == 0, run.terminal
    place = f"kernels--{ATTENTION.replace('/', '--')}/snapshots/{ATTENTION_COMMIT}/build/torch-cpu/__init__.py"
    first, second = run.manifest["kernels"]
    assert first == {
        "role": "attention",
        "repo": ATTENTION,
        "commit": ATTENTION_COMMIT,
        "variant": "torch-cpu",
        "member": None,
        "file": place,
        "files": {"0": place, "1": place},
        "calls": {"0": 4, "1": 4},
    }
    assert (second["member"], second["calls"]) == ("LigerRMSNorm", {"0": 17, "1": 17})
    assert run.manifest["attention"]["calls"] == {"0": {PATH: 4}, "1": {PATH: 4}}


@pytest.mark.train
def test_a_layer_that_the_model_lacks(guest: Guest) -> None:
    """A layer kernel for which the model has no layer is exit 6 and says which."""
    guest.build(kernels={"attention": "sdpa", "layers": {"LayerNorm": f"{LAYERS}@v3:LigerRMSNorm"}})
    run = guest.run()
    assert run.rc == 6
    assert "has no layer LayerNorm for kernels-community/liger-kernels @ bbbbbbb" in run.exit["message"]
