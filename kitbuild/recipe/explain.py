"""Step 1: Pydantic's errors in the words of a recipe, at their place in the file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from kitbuild.recipe.kinds import PATTERN_WORDS, Closed
from kitbuild.recipe.models import Recipe
from kitbuild.recipe.scalars import shorten
from kitbuild.recipe.words import Words, either, not_a_choice, suggestion, wrong_kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

    from kitbuild.errors import Problem
    from kitbuild.recipe.strict_yaml import Document, Path

_KINDS: Mapping[str, tuple[str, ...]] = {
    "string_type": ("str",),
    "bool_type": ("bool",),
    "int_type": ("int",),
    "int_from_float": ("int",),
    "float_type": ("float",),
    "dict_type": ("dict",),
    "tuple_type": ("list",),
    "model_type": ("dict",),
    "model_attributes_type": ("dict",),
}
_FIXED: Mapping[str, Words] = {
    "missing": ("this key is required", None),
    "too_short": ("an empty list; one entry is needed", None),
    "string_too_short": ("an empty string", "remove the key, or give it a value"),
}
_BOUNDS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}
# Keys that are known elsewhere, or that other tools use.
_ELSEWHERE = {
    ("datasets",): "dataset",
    ("model_name_or_path",): "model.repo",
    ("version",): "kitbuild: 1",
    ("cuda",): "image.cuda",
    ("attention",): "kernels.attention",
    ("attn_implementation",): "kernels.attention",
    ("peft",): "lora",
    ("micro",): "batch.micro",
    ("model", "name"): "repo",
    ("model", "torch_dtype"): "dtype",
    ("model", "attn_implementation"): "kernels.attention",
    ("dataset", "name"): "repo",
    ("dataset", "file"): "path",
    ("launch", "gpus"): "processes_per_node",
    ("batch", "size"): "global",
    ("batch", "gradient_accumulation_steps"): "global",
}
# Keys that take a short form beside the one that their model declares.
_SHORT_FORMS = {
    ("liger",): ("false or a mapping of options", "write false to turn it off"),
    ("dataset",): ("a mapping or a list of mappings", None),
    ("determinism",): ("strict, record or a mapping", None),
}


def problems(error: ValidationError, document: Document) -> Iterator[Problem]:
    """Every error that does not stand where the document already has a problem."""
    for details in error.errors(include_url=False):
        path = _path_in_file(details["loc"], document)
        if any(path[:length] in document.bad for length in range(len(path) + 1)):
            continue
        if details["type"] == "too_short" and details["input"]:
            continue  # Pydantic counts the items that are right
        message, hint = _words(details, path, document)
        yield document.problem(path, message, hint, at_key=details["type"] == "extra_forbidden")


def _path_in_file(location: tuple[int | str, ...], document: Document) -> Path:
    """The path as written: a single dataset has no index, `determinism: strict` has no `mode`."""
    path: Path = ()
    for part in location:
        if part == "[key]":
            break
        if isinstance(part, int) and isinstance(_at(document.data, path), dict):
            continue
        if isinstance(part, str) and path == ("determinism",) and not isinstance(_at(document.data, path), dict):
            continue
        path = (*path, part)
    return path


def _at(data: Any, path: Path) -> Any:
    for part in path:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return None
    return data


def _words(details: ErrorDetails, path: Path, document: Document) -> Words:
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    place = document.values.get(path)
    plain = place.plain if place else None
    if kind in _FIXED:
        return _FIXED[kind]
    if kind in _KINDS:
        return _kind(value, plain, path, _KINDS[kind])
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        return f"{value} is out of range: {words} {_number(context[key])} is needed", None
    if kind in _SPECIAL:
        return _SPECIAL[kind](details, path, plain)
    return details["msg"], None


def _value_error(details: ErrorDetails, _path: Path, _plain: str | None) -> Words:
    cause = details["ctx"]["error"]
    return str(cause), getattr(cause, "hint", None)


def _pattern(details: ErrorDetails, _path: Path, _plain: str | None) -> Words:
    return f"{shorten(str(details['input']))!r} is refused", PATTERN_WORDS.get(details["ctx"]["pattern"])


def _unknown(_details: ErrorDetails, path: Path, _plain: str | None) -> Words:
    return "no such key", _meant(path)


def _number(value: float) -> str:
    return f"{value:g}" if value < 10**6 else str(value)


def _kind(value: Any, plain: str | None, path: Path, wanted: tuple[str, ...]) -> Words:
    message, hint = wrong_kind(value, plain, wanted)
    if path in _SHORT_FORMS:
        form, form_hint = _SHORT_FORMS[path]
        need = either({"dict": "a mapping", "list": "a list"}[kind] for kind in wanted)
        return message.replace(need, form), hint or form_hint
    return message, hint


def _choice(details: ErrorDetails, path: Path, plain: str | None) -> Words:
    if path == ("kitbuild",):
        return f"this kitbuild reads format 1, not {shorten(repr(details['input']))}", "write kitbuild: 1"
    choices = _literals(_field(path)) or _literals(_field((*path, "mode")))
    return not_a_choice(details["input"], plain, choices)


def _literals(annotation: Any) -> tuple[Any, ...]:
    found: list[Any] = []
    for part in get_args(annotation):
        found.extend(_literals(part) if get_args(part) else [part] if isinstance(part, str | int) else [])
    return tuple(found)


def _field(path: Path) -> Any:
    """The annotation at a path, or None."""
    annotation: Any = Recipe
    for part in path:
        model = _model(annotation)
        if isinstance(part, int) or model is None:
            continue
        fields = {field.alias or name: field for name, field in model.model_fields.items()}
        if part not in fields:
            return None
        annotation = fields[part].annotation
    return annotation


def _model(annotation: Any) -> type[Closed] | None:
    if isinstance(annotation, type) and issubclass(annotation, Closed):
        return annotation
    return next(filter(None, map(_model, get_args(annotation))), None)


def _meant(path: Path) -> str | None:
    word = str(path[-1])
    names = tuple(part for part in path if isinstance(part, str))
    if names in _ELSEWHERE:
        return f"did you mean {_ELSEWHERE[names]}?"
    model = _model(_field(path[:-1]))
    known = [field.alias or name for name, field in model.model_fields.items()] if model else []
    meant = suggestion(word, known)
    if meant is None and len(path) == 1:
        from kitbuild.recipe.train_keys import table  # noqa: PLC0415 - only to help with a wrong key

        meant = f"did you mean train.{word}?" if word in table().train else None
    return meant or f"the keys here are {', '.join(known)}"


_SPECIAL: Mapping[str, Callable[[ErrorDetails, Path, str | None], Words]] = {
    "extra_forbidden": _unknown,
    "literal_error": _choice,
    "string_pattern_mismatch": _pattern,
    "value_error": _value_error,
}
