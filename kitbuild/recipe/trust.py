"""Step 1: whose code a recipe runs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kitbuild.recipe.findings import Finding, Findings

if TYPE_CHECKING:
    from kitbuild.recipe.models import Located, Recipe
    from kitbuild.recipe.strict_yaml import Path


def remote_code(recipe: Recipe) -> Findings:
    """A repo's own Python runs only where the policy names the repo, and at one commit: a branch brings new code."""
    model = recipe.model
    if not model.trust_remote_code:
        return
    places: tuple[tuple[Path, Located], ...] = ((("model",), model),)
    places += ((("model", "tokenizer"), model.tokenizer),) if model.tokenizer else ()
    for path, place in places:
        if place.repo is None:
            continue
        if place.repo not in recipe.policy.remote_code:
            yield Finding(
                ("model", "trust_remote_code"),
                f"policy.remote_code does not name {place.repo}",
                f"add {place.repo} to policy.remote_code once you have read its code",
            )
        elif not re.fullmatch(r"[0-9a-f]{40}", place.revision or ""):
            yield Finding(
                (*path, "revision" if place.revision else "repo"),
                f"with trust_remote_code, {place.revision or 'main'} would bring code that nobody here has read",
                "write the 40 digits of the commit whose code you have read",
            )
