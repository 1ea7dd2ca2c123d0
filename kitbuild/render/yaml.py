"""YAML with comments, out of plain values: every string in quotes, so that nothing in it is ever syntax."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
# What YAML 1.1, which Kubernetes and Compose still read, makes of a bare word: https://yaml.org/type/bool.html
_NO_KEY = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
_ESCAPED = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}


@dataclass(frozen=True)
class Noted:
    """A value with a comment above its key; `note` may have several lines."""

    value: Any
    note: str


def documents(*values: Mapping[str, Any], head: str) -> str:
    """A file: comment lines, then a document for each value."""
    between = ["---"] if len(values) > 1 else []
    lines = [*_comment(head, ""), *(line for value in values for line in (*between, *_mapping(value, "")))]
    return "\n".join(lines) + "\n"


def text(value: str) -> str:
    """A double-quoted scalar that every YAML reads back as `value`."""
    return '"' + "".join(_ESCAPED.get(sign) or _escape(sign) for sign in value) + '"'


def _escape(sign: str) -> str:
    if " " <= sign <= "~":
        return sign
    # `\U` is YAML's own for any character; JSON's pairs of `\u` are two characters to it.
    return f"\\U{ord(sign):08x}"


def _comment(note: str, indent: str) -> Iterator[str]:
    for line in note.strip("\n").split("\n"):
        shown = "".join(sign if sign.isprintable() else "?" for sign in line)  # U+2028, say, ends a line of YAML
        yield f"{indent}# {shown}".rstrip()


def _mapping(value: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, given in value.items():
        inner = given.value if isinstance(given, Noted) else given
        if isinstance(given, Noted):
            yield from _comment(given.note, indent)
        name = key if _PLAIN_KEY.fullmatch(key) and key.lower() not in _NO_KEY else text(key)
        if isinstance(inner, dict) and inner:
            yield f"{indent}{name}:"
            yield from _mapping(inner, f"{indent}  ")
        elif isinstance(inner, (list, tuple)) and inner:
            yield f"{indent}{name}:"
            yield from _sequence(inner, f"{indent}  ")
        else:
            yield f"{indent}{name}: {_scalar(inner)}"


def _sequence(values: Sequence[Any], indent: str) -> Iterator[str]:
    for given in values:
        inner = given.value if isinstance(given, Noted) else given
        if isinstance(given, Noted):
            yield from _comment(given.note, indent)
        if isinstance(inner, (dict, list, tuple)) and inner:
            below = f"{indent}  "
            first, *rest = _mapping(inner, below) if isinstance(inner, dict) else _sequence(inner, below)
            while first.lstrip().startswith("#"):  # a comment about what comes first stands above the dash
                yield indent + first.lstrip()
                first, *rest = rest
            yield f"{indent}- {first[len(indent) + 2 :]}"
            yield from rest
        else:
            yield f"{indent}- {_scalar(inner)}"


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        return text(value)
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, int):
        return str(value)
    return "{}" if isinstance(value, dict) else "[]"
