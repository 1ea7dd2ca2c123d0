"""Step 1: what a plain YAML scalar is, by the core schema of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema).

What YAML 1.1 readers take for something else (`0123`, `no`, `1_000`, `12:30:45`, a date) is either right here or
a problem: nothing changes silently.
"""

from __future__ import annotations

import math
import re

NULLS = frozenset({"", "~", "null", "Null", "NULL"})
BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
YES_NO = {"yes": True, "on": True, "y": True, "no": False, "off": False, "n": False}
_INTEGER = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_PREFIXED = re.compile(r"0[oxb][0-9a-fA-F]+")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_UNDERSCORES = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?")
_BASE_60 = re.compile(r"[-+]?[0-9]+(:[0-5]?[0-9])+(\.[0-9]*)?")
_DATE = re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt ].*)?")
_MOST_DIGITS = 18

Resolved = bool | int | float | str | None


class BadScalarError(ValueError):
    """A plain scalar that is refused wherever it stands."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def resolve(text: str) -> Resolved:
    """The value of a plain (unquoted) scalar."""
    if text in NULLS:
        return None
    if text in BOOLEANS:
        return BOOLEANS[text]
    if _NOT_FINITE.fullmatch(text):
        raise BadScalarError(f"{text} is not a finite number", "leave the key out, or write null where that is allowed")
    if _PREFIXED.fullmatch(text):
        raise BadScalarError(f"{text} is not a decimal number", f'write it in decimal, or "{text}" in quotes')
    if _INTEGER.fullmatch(text):
        return _integer(text)
    return _float(text) if _FLOAT.fullmatch(text) else text


def _integer(text: str) -> int:
    digits = text.lstrip("+-")
    if digits[0] == "0" and len(digits) > 1:
        decimal = digits.lstrip("0") or "0"
        raise BadScalarError(
            f"{text} is decimal to some YAML readers and octal to others",
            f'write {decimal[:_MOST_DIGITS]} for a number, or "{text}" in quotes',
        )
    if len(digits) > _MOST_DIGITS:
        raise BadScalarError(f"{shorten(text)} has more than {_MOST_DIGITS} digits", "quote it if it is not a number")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise BadScalarError(f"{shorten(text)} is too large for a number", f'write "{shorten(text)}" in quotes')
    return value


def look_alike(text: str) -> tuple[str, str] | None:
    """(fact, hint) of a string that another YAML reader, or a person, takes for something else."""
    if text.lower() in YES_NO:
        word = "true" if YES_NO[text.lower()] else "false"
        return (f"`{text}` is a string in YAML 1.2, not a boolean", f"write {word}")
    if "_" in text and _UNDERSCORES.fullmatch(text):
        return (f"`{text}` is a string in YAML 1.2, not a number", f"write {text.replace('_', '')}")
    if _BASE_60.fullmatch(text):
        return (f"`{text}` is a string in YAML 1.2, not a number in base 60", "write the number in decimal")
    if _DATE.fullmatch(text):
        return (f"`{text}` is a string in YAML 1.2, not a date", "")
    return None


def shorten(text: str, limit: int = 60) -> str:
    """The text for a message, cut where it is long."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
