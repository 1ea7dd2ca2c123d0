"""Several datasets as one: every row, in shares that follow the weights, in an order that follows the seed."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.train
ROOT = Path(__file__).parents[2]
SIZES = {"a": 30, "b": 20, "c": 5}
SCRIPT = """
import json, sys
from pathlib import Path
from types import SimpleNamespace
from kitbuild.guest.data import training_rows

for weights, seed in json.loads(sys.argv[2]):
    folder = Path(sys.argv[1])
    held = [
        SimpleNamespace(folder=name, format="json", data_files=("rows.jsonl",), weight=weight)
        for name, weight in zip("abc", weights)
    ]
    places = SimpleNamespace(inputs=folder, scratch=folder / "scratch")
    rows = training_rows(SimpleNamespace(datasets=held, places=places, seed=seed, train={}))
    print(json.dumps([row["text"] for row in rows]))
"""
EQUAL, TWO_TO_ONE = (1.0, 1.0, 1.0), (2.0, 1.0, 1.0)
ASKED: tuple[tuple[tuple[float | None, ...], int], ...] = (
    ((None, None, None), 1),
    (TWO_TO_ONE, 1),
    (TWO_TO_ONE, 1),
    (TWO_TO_ONE, 2),
    ((4.0, 2.0, 2.0), 1),
    (EQUAL, 1),
)


@pytest.fixture(scope="module")
def mixed(train_python: str, tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The rows of each mixture in ASKED."""
    folder = tmp_path_factory.mktemp("mixture")
    for name, size in SIZES.items():
        (folder / name).mkdir()
        rows: list[dict[str, Any]] = [{"text": f"{name}{number}", f"only_{name}": number} for number in range(size)]
        (folder / name / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = subprocess.run(
        [train_python, "-c", SCRIPT, str(folder), json.dumps(ASKED)],
        env={"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_without_weights_one_after_the_other(mixed: list[list[str]]) -> None:
    """Each row once, in the recipe's order; columns that not all have are left out."""
    assert mixed[0] == [f"{name}{number}" for name, size in SIZES.items() for number in range(size)]


def test_no_row_is_lost(mixed: list[list[str]]) -> None:
    """A mixture ends when each dataset was seen whole: the smaller for its share begins again."""
    for rows in mixed[1:]:
        assert set(rows) == set(mixed[0])
        for name, size in SIZES.items():
            own = [row for row in rows if row[0] == name]
            assert own == [f"{name}{number % size}" for number in range(len(own))]


def test_shares(mixed: list[list[str]]) -> None:
    """Rows come in the proportion of the weights, whatever the sizes are; only the proportion counts."""
    counts = Counter(row[0] for row in mixed[1])
    total = sum(counts.values())
    for name, share in (("a", 0.5), ("b", 0.25), ("c", 0.25)):
        assert abs(counts[name] / total - share) < 0.12
    equal = Counter(row[0] for row in mixed[5])
    assert equal["c"] > 2 * SIZES["c"]
    assert mixed[4] == mixed[1]


def test_order(mixed: list[list[str]]) -> None:
    """The same seed gives the same order, another seed another one."""
    assert mixed[1] == mixed[2]
    assert mixed[1] != mixed[3]
