"""Step 1, the other way: values written into a recipe's file, its comments and order kept."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from kitbuild.errors import RecipeError
from kitbuild.recipe.reading import read
from kitbuild.store.blobs import write_atomically

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def edit(path: Path, changes: Mapping[str, Any]) -> None:
    """Set dotted keys, a parent that is no mapping made one. The file is replaced whole, and only by one that reads as a recipe."""
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 10**6  # no line is folded
    yaml.representer.add_representer(
        type(None), lambda made, _: made.represent_scalar("tag:yaml.org,2002:null", "null")
    )
    document = yaml.load(path.read_text(encoding="utf-8"))
    for key, value in changes.items():
        *parents, last = key.split(".")
        place = document
        for name in parents:
            if not isinstance(place.get(name), CommentedMap):
                place[name] = CommentedMap()
            place = place[name]
        place[last] = CommentedMap(value) if isinstance(value, dict) else value
    text = io.StringIO()
    yaml.dump(document, text)
    beside = path.with_name(f".{path.stem}.edited.yaml")
    try:
        write_atomically(beside, text.getvalue().encode())
        read(beside)
        write_atomically(path, text.getvalue().encode(), mode=path.stat().st_mode & 0o777)
    except OSError as error:
        raise RecipeError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        beside.unlink(missing_ok=True)
