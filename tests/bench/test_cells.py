"""Cells: a recipe crossed with axes, each a recipe of its own that reads; rows of a stated length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kitbuild.bench.cells import Cell, Grid, bench_rows, grid, own, recipe_for
from kitbuild.errors import UsageError
from kitbuild.recipe import Recipe, read

TINY = read(Path(__file__).resolve().parents[2] / "recipes/tiny-cpu.yaml").recipe
CELL = own(TINY)


def test_own_cell_is_the_recipe() -> None:
    """With no axis given there is one cell: what the recipe says."""
    assert grid(TINY, Grid()) == (CELL,)
    made, _ = recipe_for(TINY, CELL, steps=5)
    assert made.kernels == TINY.kernels
    assert made.batch == TINY.batch
    assert made.train["max_length"] == TINY.train["max_length"]
    assert made.train["learning_rate"] == TINY.train["learning_rate"]


def test_cross_product_has_distinct_names() -> None:
    """Each combination once, each with a name that is fit for a directory."""
    wanted = Grid(
        attention=("sdpa", "org/flash@v2:fn"), liger=("off", "all", "rope"), lengths=(512, 1024),
        checkpointing=(True, False), packing=(True, False), micro=(4, 8),
    )  # fmt: skip
    cells = grid(TINY, wanted)
    assert len({cell.name for cell in cells}) == len(set(cells)) == 2 * 3 * 2 * 2 * 2 * 2
    assert not any({"/", ":", "@", " "} & set(cell.name) for cell in cells)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (Grid(liger=("ropes",)), "--liger ropes is not known"),
        (Grid(micro=(3,)), "--micro 3 does not divide batch.global 16"),
    ],
)
def test_bad_axes(wanted: Grid, words: str) -> None:
    """Exit 2 that names the option, before anything runs."""
    with pytest.raises(UsageError, match=words):
        grid(TINY, wanted)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"liger": "off"}, None),
        ({"liger": "all"}, {"rope": True, "rms_norm": True, "swiglu": True, "fused_linear_cross_entropy": True}),
        ({"liger": "rms_norm"}, {"rms_norm": True}),
    ],
)
def test_liger_axis(changed: dict[str, Any], expected: dict[str, bool] | None) -> None:
    """Off, all, or one option alone."""
    made, _ = recipe_for(TINY, Cell(**{**CELL.as_json(), **changed}), steps=5)
    found = made.liger.model_dump() if made.liger else None
    assert (found and {name: value for name, value in found.items() if value}) == expected


def test_a_cell_is_a_recipe(tmp_path: Path) -> None:
    """Its bytes read back as the same recipe; nothing of it evaluates, tracks or follows the data's own columns."""
    made, content = recipe_for(TINY, Cell(**{**CELL.as_json(), "max_length": 32, "micro": 4}), steps=7)
    (tmp_path / "cell.yaml").write_bytes(content)
    assert read(tmp_path / "cell.yaml").recipe == made
    assert (made.train["max_steps"], made.train["max_length"], made.batch.micro) == (7, 32, 4)
    assert made.evaluate is None
    assert not {"assistant_only_loss", "num_train_epochs"} & set(made.train)


def test_rows() -> None:
    """Full rows have a token or more for each of `max_length`; varied ones never more, their median near a quarter."""
    full = [
        json.loads(line)["text"].split()
        for line in bench_rows(count=20, max_length=64, kind="full", seed=1).splitlines()
    ]
    assert {len(row) for row in full} == {66}
    varied = [
        len(json.loads(line)["text"].split())
        for line in bench_rows(count=999, max_length=400, kind="varied", seed=1).splitlines()
    ]
    assert max(varied) == 400
    assert sorted(varied)[500] == pytest.approx(100, rel=0.1)
    assert bench_rows(count=9, max_length=40, kind="varied", seed=1) == bench_rows(
        count=9, max_length=40, kind="varied", seed=1
    )
    assert isinstance(TINY, Recipe)
