"""Step 2: the lock of a recipe that differs from a locked one in settings alone. Pure; nothing is resolved.

The same wheels, model, base and kernels; other attention, batch, length, Liger options, arguments, rows.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from kitbuild.errors import RecipeError
from kitbuild.lock.arguments import resolve_arguments
from kitbuild.lock.launcher import launch
from kitbuild.lock.resolve import as_locked

if TYPE_CHECKING:
    from kitbuild.lock.models import Lock, LockedDataset, LockedKernel
    from kitbuild.recipe.models import Recipe


def vary(lock: Lock, recipe: Recipe, *, content: bytes, datasets: tuple[LockedDataset, ...] | None = None) -> Lock:
    """The lock of `recipe`, whose file has `content`. A kernel that `lock` does not hold is exit 2."""
    wanted = recipe.kernels.attention_reference
    attention = [kernel for kernel in lock.kernels if kernel.role == "attention"]
    if wanted is not None and lock.recipe["kernels"]["attention"] != recipe.kernels.attention:
        raise RecipeError(
            f"{recipe.kernels.attention} is not in the lock",
            hint="name it in the recipe's kernels.attention, then lock",
        )
    if "liger-kernel" not in {wheel.name for wheel in lock.wheels} and recipe.liger is not None:
        raise RecipeError("liger-kernel is not in the lock", hint="set liger in the recipe, then lock")
    kernels = lock.kernels if wanted is not None else _without(lock, attention)
    arguments, device_dependent = resolve_arguments(recipe, lock.defaults.declared)
    defaults = lock.defaults.model_copy(update={"arguments": arguments, "device_dependent": device_dependent})
    return lock.model_copy(
        update={
            "name": recipe.name,
            "recipe_sha256": hashlib.sha256(content).hexdigest(),
            "recipe": as_locked(recipe),
            "launch": launch(recipe),
            "defaults": defaults,
            "kernels": kernels,
            "datasets": lock.datasets if datasets is None else datasets,
            "evaluate": lock.evaluate if recipe.evaluate else None,
        }
    )


def _without(lock: Lock, dropped: list[LockedKernel]) -> tuple[LockedKernel, ...]:
    """The kernels that are left, with what they depend on."""
    held = {kernel.repo: kernel for kernel in lock.kernels if kernel not in dropped}
    needed, waiting = set(), [kernel.repo for kernel in held.values() if kernel.role == "layers"]
    while waiting:
        name = waiting.pop()
        if name in held and name not in needed:
            needed.add(name)
            waiting += [item.partition("@")[0] for item in held[name].dependencies]
    return tuple(kernel for kernel in lock.kernels if kernel not in dropped and kernel.repo in needed)
