"""What is recorded is what TRL computes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.guest.conftest import Guest

pytestmark = pytest.mark.train
SCRIPT = Path(__file__).parent / "plain_trl.py"
MODEL = {"path": "model", "dtype": "float32"}


@pytest.mark.parametrize("train", [{}, {"packing": True, "max_length": 64}])
def test_the_same_losses_as_trl_itself(guest: Guest, train_python: str, tmp_path: Path, train: dict[str, Any]) -> None:
    """Loss and gradient norm of each step are those of TRL's own SFTTrainer with the same arguments, to the last bit."""
    asked = {"max_length": 128, "learning_rate": 1e-3, "max_steps": 4, **train}
    guest.build(model=MODEL, kernels={"attention": "sdpa", "layers": {}}, train=asked)
    ours = guest.run()
    assert ours.rc == 0, ours.terminal
    environ = {**guest.root.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [train_python, str(SCRIPT), guest.root.environ["KIT_ROOT"], str(tmp_path / "out")],
        env={**environ, "HOME": str(tmp_path), "PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    plain = json.loads(done.stdout.splitlines()[-1])
    assert [float.fromhex(line["loss"]) for line in ours.metrics] == plain["loss"]
    assert [float.fromhex(line["grad_norm"]) for line in ours.metrics] == plain["grad_norm"]
