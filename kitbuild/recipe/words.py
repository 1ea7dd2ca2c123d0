"""Step 1: the words of a problem: what is wrong with a value, and what to write instead."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

from kitbuild.recipe.scalars import look_alike, shorten

if TYPE_CHECKING:
    from collections.abc import Iterable

Words = tuple[str, str | None]
_MOST_LISTED = 12
_LEAST_PREFIX = 4
KINDS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "a string",
    "dict": "a mapping",
    "list": "a list",
    "null": "null",
}


def kind_of(value: Any) -> str:
    """The kind of a plain value, as in `KINDS`."""
    if value is None:
        return "null"
    for kind, types in (("bool", bool), ("int", int), ("float", float), ("str", str), ("dict", dict)):
        if isinstance(value, types):
            return kind
    return "list"


def fits(value: Any, kinds: Iterable[str]) -> bool:
    """Whether a value is of one of the kinds; a whole number is a number too."""
    kind = kind_of(value)
    return kind in kinds or (kind == "int" and "float" in kinds)


def either(words: Iterable[str]) -> str:
    """`a, b or c`."""
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


def wrong_kind(value: Any, plain: str | None, wanted: tuple[str, ...]) -> Words:
    """Why a value is not of the wanted kinds."""
    need = either(KINDS[kind] for kind in wanted)
    if value is None and plain == "":
        return f"nothing stands here; {need} is needed", "remove the key, or give it a value"
    if plain is not None and isinstance(value, str):
        alike = look_alike(plain)
        if alike and not ("bool" in alike[0] and "bool" not in wanted):
            return alike[0] + f"; {need} is needed", alike[1] or None
    text = shorten(plain if plain is not None else str(value)) if kind_of(value) not in ("dict", "list") else ""
    if "str" in wanted and isinstance(value, bool | int | float) and plain is not None:
        is_a = {"bool": "a boolean", "int": "a number", "float": "a number"}[kind_of(value)]
        return f"{text} without quotes is {is_a}; {need} is needed", f'write "{text}" in quotes'
    if isinstance(value, str):
        quoted = plain is None and fits_unquoted(value, wanted)
        return f"{shorten(value)!r} is not {need}", "remove the quotes" if quoted else None
    return f"{text or KINDS[kind_of(value)]} is not {need}", None


def fits_unquoted(text: str, wanted: tuple[str, ...]) -> bool:
    """Whether a quoted string would be right without its quotes."""
    from kitbuild.recipe.scalars import BadScalarError, resolve  # noqa: PLC0415

    try:
        value = resolve(text)
    except BadScalarError:
        return False
    return text != "" and not isinstance(value, str) and fits(value, wanted)


def not_a_choice(value: Any, plain: str | None, choices: tuple[Any, ...]) -> Words:
    """Why a value is not one of the choices."""
    few = len(choices) <= _MOST_LISTED
    listed = either(str(choice) for choice in choices) if few else f"one of the {len(choices)} choices"
    suggested = suggestion(str(value), choices) or (None if few else "docs/recipe.md lists them")
    if isinstance(value, str) or not all(isinstance(choice, str) for choice in choices):
        return f"{repr(shorten(value)) if isinstance(value, str) else value} is not {listed}", suggested
    if value is None or plain is None:
        return wrong_kind(value, plain, ("str",))[0].replace("a string", listed), suggested
    if isinstance(value, bool):
        word = "no" if not value and "no" in choices else None
        return f"{plain} without quotes is a boolean; {listed} is needed", word and f"write {word}"
    is_a = "a number" if str(value) == plain else f"the number {value}"
    versions = any(choice[0].isdigit() for choice in choices)
    return (
        f"{plain} without quotes is {is_a}; {listed} is needed",
        f'write "{plain}" in quotes' if versions else suggested,
    )


def closest(word: str, known: Iterable[Any]) -> str | None:
    """The known word that was probably meant."""
    names = [str(name) for name in known]
    longer = [name for name in names if len(word) >= _LEAST_PREFIX and name.startswith(f"{word}_")]
    if longer:
        return longer[0]
    folded = {name.lower().replace("-", "_"): name for name in names}
    found = difflib.get_close_matches(word.lower().replace("-", "_"), folded, n=1, cutoff=0.6)
    return folded[found[0]] if found else None


def suggestion(word: str, known: Iterable[Any]) -> str | None:
    """`did you mean …?`, or nothing."""
    found = closest(word, known)
    return f"did you mean {found}?" if found else None
