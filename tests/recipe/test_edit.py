"""Values written into a recipe: comments, quotes and order stay; a file is replaced whole or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kitbuild.errors import RecipeError
from kitbuild.recipe import edit, read

TINY = Path(__file__).resolve().parents[2] / "recipes/tiny-cpu.yaml"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    shutil.copytree(TINY.parent / "data", tmp_path / "data")
    return Path(shutil.copy(TINY, tmp_path / "tiny.yaml"))


def test_only_what_is_named_changes(recipe: Path) -> None:
    """Lines that do not hold a changed key are the same bytes; new sections come at the end."""
    before = recipe.read_text().splitlines()
    edit(recipe, {"batch.micro": 4, "train.gradient_checkpointing": True, "track": ["tensorboard"]})
    after = recipe.read_text().splitlines()
    changed = [line for line in after if line not in before]
    assert len(changed) <= 4, changed
    assert sum("#" in line for line in after) == sum("#" in line for line in before)
    found = read(recipe).recipe
    assert (found.batch.micro, found.train["gradient_checkpointing"], found.track) == (4, True, ("tensorboard",))


def test_section_in_place_of_a_word(recipe: Path) -> None:
    """`determinism: strict` becomes a mapping when one of its keys is set."""
    edit(recipe, {"determinism.mode": "record"})
    assert read(recipe).recipe.determinism.mode == "record"


def test_what_would_not_read_is_not_written(recipe: Path) -> None:
    """The file is as it was, and nothing is left beside it."""
    before = recipe.read_bytes()
    with pytest.raises(RecipeError):
        edit(recipe, {"batch.micro": 5})
    assert recipe.read_bytes() == before
    assert sorted(path.name for path in recipe.parent.iterdir()) == ["data", "tiny.yaml"]
