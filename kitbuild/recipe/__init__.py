"""Step 1: the recipe, as a person writes it, read and checked before anything slow."""

from kitbuild.recipe.edit import edit
from kitbuild.recipe.models import Recipe
from kitbuild.recipe.reading import LoadedRecipe, missing_inputs, notes, read
from kitbuild.recipe.reference import reference_markdown, schema
from kitbuild.recipe.template import starter

__all__ = [
    "LoadedRecipe",
    "Recipe",
    "edit",
    "missing_inputs",
    "notes",
    "read",
    "reference_markdown",
    "schema",
    "starter",
]
