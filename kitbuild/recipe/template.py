"""Step 1: the commented recipe that `kitbuild init` writes."""

from __future__ import annotations

import re
from importlib.resources import files

from kitbuild.errors import UsageError
from kitbuild.recipe.kinds import NAME, PATTERN_WORDS


def starter(name: str) -> str:
    """A commented recipe with this name; `read` accepts it as it is."""
    if not re.fullmatch(NAME, name):
        raise UsageError(f"{name!r} cannot name a recipe", hint=PATTERN_WORDS[NAME])
    text = files("kitbuild.recipe").joinpath("starter.yaml").read_text(encoding="utf-8")
    written = f'"{name}"' if _needs_quotes(name) else name
    before, after = text.split("name: my-model   ", 1)
    return f"{before}name: {written.ljust(8)}   {after}"


def _needs_quotes(name: str) -> bool:
    from kitbuild.recipe.scalars import BadScalarError, look_alike, resolve  # noqa: PLC0415

    try:
        return not isinstance(resolve(name), str) or look_alike(name) is not None
    except BadScalarError:
        return True
