"""Step 1: recipe.yaml to a `Recipe`, or one error with every problem and its place.

bytes → strict YAML → models, trainers' keys, rules between keys.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from kitbuild.errors import Problem, RecipeError
from kitbuild.recipe import explain, rules, strict_yaml, train_keys
from kitbuild.recipe.models import Recipe

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from kitbuild.recipe.strict_yaml import Document

_LEAST = {
    "kitbuild": 1,
    "name": "stand-in",
    "model": {"repo": "stand/in"},
    "dataset": {"repo": "stand/in"},
    "image": {"cuda": "cpu"},
    "batch": {"global": 1, "micro": 1},
}


@dataclass(frozen=True, kw_only=True)
class LoadedRecipe:
    """A recipe, the file that it came from, and where each key stands."""

    recipe: Recipe
    path: Path
    content: bytes
    sha256: str
    places: Mapping[str, tuple[int, int]]

    @property
    def directory(self) -> Path:
        """What the recipe's relative paths start from."""
        return self.path.parent

    def locate(self, key: str) -> tuple[int, int]:
        """Line and column of a dotted key (`dataset.0.path`), or of its nearest parent that is written."""
        while key and key not in self.places:
            key = key.rpartition(".")[0]
        return self.places.get(key, (1, 1))

    def problem(self, key: str, message: str, hint: str | None = None) -> Problem:
        """A problem of a later step (lock, advisory, strict refusal) at its key."""
        line, column = self.locate(key)
        return Problem(message=message, hint=hint, file=str(self.path), line=line, column=column, key=key or None)


def read(path: Path) -> LoadedRecipe:
    """Read and check a recipe; `RecipeError` holds every problem at once."""
    content = _content(path)
    document = strict_yaml.parse(content, str(path))
    problems = list(document.problems)
    recipe = None
    if document.data is not None or not problems:
        recipe, more = _check(document)
        problems.extend(more)
    if problems or recipe is None:
        raise error(path, problems)
    return LoadedRecipe(
        recipe=recipe,
        path=path,
        content=content,
        sha256=hashlib.sha256(content).hexdigest(),
        places=_places(document),
    )


def missing_inputs(loaded: LoadedRecipe) -> Iterator[Problem]:
    """Local files and directories that the recipe names and that are not there."""
    recipe = loaded.recipe
    single = len(recipe.dataset) == 1
    named: list[tuple[str, str | None]] = [
        ("model.path", recipe.model.path),
        ("model.chat_template", recipe.model.chat_template),
        ("image.pylock", recipe.image.pylock),
        ("model.tokenizer.path", recipe.model.tokenizer.path if recipe.model.tokenizer else None),
        *((f"dataset.{'' if single else f'{index}.'}path", item.path) for index, item in enumerate(recipe.dataset)),
        ("evaluate.dataset.path", recipe.evaluate.dataset.path if recipe.evaluate else None),
    ]
    for key, value in named:
        if value is not None and not (loaded.directory / value).exists():
            yield loaded.problem(key, f"{value} does not exist", "paths start from the recipe's directory")


def notes(loaded: LoadedRecipe) -> Iterator[Problem]:
    """Facts worth knowing about a recipe that is right; they refuse nothing."""
    for finding in rules.notes(loaded.recipe):
        yield loaded.problem(strict_yaml.dotted(finding.path), finding.message, finding.hint)


def error(path: Path, problems: list[Problem]) -> RecipeError:
    """One error of all problems, in the order of the file."""
    ordered = sorted(problems, key=lambda problem: (problem.line or 0, problem.column or 0))
    count = f"{len(ordered)} problem{'s' if len(ordered) > 1 else ''}"
    return RecipeError(f"{path} cannot be used: {count}", problems=ordered)


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            return stream.read(strict_yaml.MOST_BYTES + 1)
    except FileNotFoundError as cause:
        message, hint = "there is no such file", "`kitbuild init` writes a starter recipe"
        raise error(path, [Problem(message=message, hint=hint, file=str(path))]) from cause
    except IsADirectoryError as cause:
        message, hint = "this is a directory", "name the recipe file in it"
        raise error(path, [Problem(message=message, hint=hint, file=str(path))]) from cause
    except (OSError, ValueError) as cause:
        reason = getattr(cause, "strerror", None) or str(cause)
        hint = "name a file that you may read"
        raise error(path, [Problem(message=f"cannot be read: {reason}", hint=hint, file=str(path))]) from cause


def _check(document: Document) -> tuple[Recipe | None, list[Problem]]:
    if not isinstance(document.data, dict):
        hint = "a recipe starts with `kitbuild: 1`"
        return None, [document.problem((), "the file is not a mapping of keys to values", hint)]
    found = list(_trainer_keys(document))
    recipe = None
    try:
        recipe = Recipe.model_validate(document.data)
    except ValidationError as cause:
        found.extend(explain.problems(cause, document))
    keys = {problem.key or "" for problem in (*found, *document.problems)}
    # `train` and `lora` lose nothing to their own problems: the rules still see what is written.
    wrong = frozenset(key.partition(".")[0] for key in keys) - {"train", "lora"}
    asked = recipe or _stand_in(document.data, wrong)
    found.extend(
        document.problem(_written(finding.path, document), finding.message, finding.hint)
        for finding in (rules.findings(asked, without=wrong) if asked else ())
        if strict_yaml.dotted(finding.path) not in keys
    )
    return recipe, found


def _stand_in(data: dict[str, Any], wrong: frozenset[str]) -> Recipe | None:
    """The sections that are right, so that rules between them are asked although others are wrong."""
    right = {key: value for key, value in data.items() if key in Recipe.model_fields and key not in wrong}
    for section in ("train", "lora"):
        right[section] = _mapping(data, section)
    try:
        return Recipe.model_validate({**_LEAST, **right})
    except ValidationError:
        return None


def _trainer_keys(document: Document) -> Iterator[Problem]:
    known = train_keys.table()
    packages = _mapping(_mapping(document.data, "image"), "packages")
    for section in (train_keys.TRAIN, train_keys.LORA):
        values = _mapping(document.data, section.name)
        others = any(name in packages for name in section.packages)
        declared = getattr(known, section.name)
        for path, (message, hint) in train_keys.check(section, values, known, document, other_versions=others):
            if path not in document.bad:
                at_key = path[1] not in declared or path[1] in section.owned
                yield document.problem(path, message, hint, at_key=at_key)
    config = _mapping(_mapping(document.data, "model"), "config")
    for path, (message, hint) in train_keys.look_alikes(("model", "config"), config, document):
        yield document.problem(path, message, hint)


def _mapping(data: Any, key: str) -> dict[str, Any]:
    value = data.get(key) if isinstance(data, dict) else None
    return value if isinstance(value, dict) else {}


def _written(path: strict_yaml.Path, document: Document) -> strict_yaml.Path:
    """A rule says `dataset.0`; a single dataset is written without the index."""
    if path[:2] == ("dataset", 0) and isinstance(document.data["dataset"], dict):
        return (path[0], *path[2:])
    return path


def _places(document: Document) -> dict[str, tuple[int, int]]:
    places = {strict_yaml.dotted(path): (place.line, place.column) for path, place in document.keys.items()}
    values = {strict_yaml.dotted(path): (place.line, place.column) for path, place in document.values.items()}
    return {**places, **values}
