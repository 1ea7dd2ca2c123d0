"""Sums over virtual ranks: the tree as it is defined, whatever the number of processes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.train
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def told(train_python: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    command = [
        train_python,
        str(HERE / "tree_processes.py"),
        str(HERE.parents[1]),
        str(tmp_path_factory.mktemp("tree")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_the_tree_on_any_number_of_processes(told: dict[str, Any]) -> None:
    """Every process of 1, 2, 4 and 8 ends with the recursive sum of eight, several types and odd sizes, bit for bit."""
    found = told["found"]
    assert sorted(found) == sorted(f"{world}-{rank}" for world in (1, 2, 4, 8) for rank in range(world))
    assert {item["digest"] for item in found.values()} == {told["expected"]}
    assert told["one_after_the_other"] != told["expected"]


def test_partial_sums_that_wait(told: dict[str, Any]) -> None:
    """Between micro-batches at most log2(N/W) partial sums are held, and one at the end."""
    waiting = {world: told["found"][f"{world}-0"]["waiting"] for world in (1, 2, 4, 8)}
    assert waiting == {1: 3, 2: 2, 4: 1, 8: 1}


def test_fingerprints(told: dict[str, Any]) -> None:
    """One bit more or two values swapped is another fingerprint; equal tensors have equal ones."""
    assert len(set(told["fingerprints"])) == 3
    assert len({item["fingerprint"] for item in told["found"].values()}) == 1


def test_losses_are_paired(told: dict[str, Any]) -> None:
    """In float32, (1e8 + 1) + (-1e8 + 1) is 0, where one after the other gives 1."""
    assert told["scalar"] == 0.0
