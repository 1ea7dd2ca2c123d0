"""Every file of tests/data/recipes/good reads to the values beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kitbuild.recipe import read

GOOD = Path(__file__).parents[1] / "data" / "recipes" / "good"


def value_at(data: Any, key: str) -> Any:
    for part in key.split("."):
        data = data[int(part)] if isinstance(data, list) else data[part]
    return data


@pytest.mark.parametrize("path", sorted(GOOD.glob("*.yaml")), ids=lambda path: path.stem)
def test_good_recipe(path: Path) -> None:
    """A good recipe reads to exactly these values, of exactly these types."""
    expected = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    dumped = read(path).recipe.model_dump(mode="json", by_alias=True)
    assert repr(expected) == repr({key: value_at(dumped, key) for key in expected})
