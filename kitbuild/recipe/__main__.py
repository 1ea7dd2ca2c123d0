"""`python -m kitbuild.recipe` writes docs/recipe.md of the checkout that this file stands in."""

from __future__ import annotations

from pathlib import Path

from kitbuild.recipe import reference_markdown

if __name__ == "__main__":
    (Path(__file__).parents[2] / "docs" / "recipe.md").write_text(reference_markdown(), encoding="utf-8")
