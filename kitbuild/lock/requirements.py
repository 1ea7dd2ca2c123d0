"""What a recipe needs installed, and whether that is known to be bad. Part of step 2; no network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from packaging.utils import canonicalize_name

from kitbuild.errors import RecipeError
from kitbuild.lock.advisories import Advisory, met_advisories
from kitbuild.lock.pylock import check_versions, versions_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from packaging.pylock import Pylock

    from kitbuild.base.targets import Target
    from kitbuild.lock.models import LockedKernel
    from kitbuild.recipe.models import Recipe


def requirements(recipe: Recipe, target: Target) -> dict[str, str]:
    """Package to version: the tested set, what this recipe needs of the optional ones, then the recipe's own."""
    wanted = dict(target.packages)
    asked: dict[str, bool] = {
        "lora": recipe.lora is not None,
        "liger": recipe.liger is not None,
        "deepspeed": recipe.launch.strategy == "deepspeed",
        **dict.fromkeys(recipe.track, True),
    }
    for feature, extra in target.extras.items():
        wanted |= extra if asked.get(feature) else {}
    named = {str(canonicalize_name(name)): version for name, version in wanted.items()}
    return named | {str(canonicalize_name(name)): version for name, version in recipe.image.packages.items()}


def expected_versions(recipe: Recipe, target: Target, *, given: Pylock | None = None) -> dict[str, str]:
    """Versions as far as they are known without resolving: of the tested set, or of the file in its place.

    RecipeError (2) where that file lacks what the recipe needs.
    """
    if given is not None:
        check_versions(given, requirements(recipe, target), recipe.image.packages, path=str(recipe.image.pylock))
        return versions_of(given)
    return {name: version.removeprefix("==") for name, version in requirements(recipe, target).items()}


def refuse_advisories(
    recipe: Recipe,
    *,
    versions: Mapping[str, str],
    model_config: Mapping[str, Any] | None,
    kernels: Iterable[LockedKernel] = (),
) -> tuple[Advisory, ...]:
    """The advisories met; an error-level one refuses the recipe."""
    met = tuple(met_advisories(recipe, versions=versions, model_config=model_config, kernels=kernels))
    errors = [advisory.as_problem() for advisory in met if advisory.severity == "error"]
    if errors:
        raise RecipeError("the recipe meets a known-bad combination", problems=errors)
    return met
