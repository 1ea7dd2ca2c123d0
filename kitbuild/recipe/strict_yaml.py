"""Step 1: YAML read so that nothing changes silently, and everything keeps its line and column.

Works on the parser's events: no tag, alias, merge key or constructor is ever followed. Problems are collected,
not raised; a value that has one is in `Document.bad` so that nobody complains of it twice.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from kitbuild.errors import Problem
from kitbuild.recipe.scalars import BadScalarError, resolve, shorten

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_BYTES = 1024 * 1024
MOST_DEPTH = 32
Path = tuple[str | int, ...]
_TAB_INDENT = re.compile(r"^ *\t", re.MULTILINE)
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a key or value stands (from 1), and its text as written if it is a plain scalar."""

    line: int
    column: int
    plain: str | None = None


@dataclass(kw_only=True)
class Document:
    """A YAML document as plain data (mappings, tuples, scalars) with the place of each part."""

    file: str
    data: Any = None
    keys: dict[Path, Place] = field(default_factory=dict)
    values: dict[Path, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    bad: set[Path] = field(default_factory=set)

    def problem(self, path: Path, message: str, hint: str | None = None, *, at_key: bool = False) -> Problem:
        """A problem at the place of a path, or of its nearest parent that stands in the file."""
        place = self.place(path, at_key=at_key)
        return Problem(
            message=message, hint=hint, file=self.file, line=place.line, column=place.column, key=dotted(path) or None
        )

    def place(self, path: Path, *, at_key: bool = False) -> Place:
        """The place of a path's key or value, or of its nearest parent."""
        first, second = (self.keys, self.values) if at_key else (self.values, self.keys)
        for length in range(len(path), -1, -1):
            found = first.get(path[:length]) or second.get(path[:length])
            if found:
                return found
        return Place(line=1, column=1)


def dotted(path: Path) -> str:
    """`dataset.0.path`."""
    return ".".join(str(part) for part in path)


def parse(content: bytes, file: str) -> Document:
    """Read one document; problems are in the result."""
    document = Document(file=file)
    text = _decode(content, document)
    if text is None:
        return document
    for match in _TAB_INDENT.finditer(text):
        line, column = _line_column(text, match.end() - 1)
        document.problems.append(
            Problem(message="a tab indents this line", hint="indent with spaces", file=file, line=line, column=column)
        )
    if not document.problems:
        _compose(text, document)
    return document


def _decode(content: bytes, document: Document) -> str | None:
    def refuse(message: str, hint: str, line: int | None = None, column: int | None = None) -> None:
        document.problems.append(Problem(message=message, hint=hint, file=document.file, line=line, column=column))

    if len(content) > MOST_BYTES:
        refuse("the file is larger than 1 MiB", "a recipe names data, it does not hold it")
        return None
    if content.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        refuse("the file starts with a byte order mark", "save it as UTF-8 without one", 1, 1)
        return None
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line, column = _line_column(content[: error.start].decode(), error.start)
        refuse(f"byte 0x{content[error.start]:02x} is not UTF-8", "save the file as UTF-8", line, column)
        return None


def _line_column(text: str, offset: int) -> tuple[int, int]:
    before = text[:offset]
    return before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1


def _compose(text: str, document: Document) -> None:
    from ruamel.yaml import YAML  # noqa: PLC0415 - 0.1 s that only reading a recipe needs
    from ruamel.yaml.error import MarkedYAMLError, YAMLError  # noqa: PLC0415

    builder = _Builder(YAML(typ="safe", pure=True).parse(text), document)
    try:
        builder.build()
    except _StopError:
        return
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = " ".join(part for part in (error.context, error.problem) if part) or "cannot be read"
        _not_yaml(document, message, mark.line + 1 if mark else None, mark.column + 1 if mark else None)
    except YAMLError as error:
        position = getattr(error, "position", None)
        line, column = _line_column(text, position) if isinstance(position, int) else (None, None)
        _not_yaml(document, getattr(error, "reason", None) or str(error).partition("\n")[0], line, column)
    except (ValueError, OverflowError, IndexError, AssertionError):
        # ruamel.yaml lets plain Python errors through, such as that of chr() for an escape out of range.
        _not_yaml(document, "what follows cannot be read", builder.line + 1, builder.column + 1)


def _not_yaml(document: Document, reason: str, line: int | None, column: int | None) -> None:
    problem = Problem(message=f"not YAML: {reason}", file=document.file, line=line, column=column)
    document.problems.append(problem)


class _StopError(Exception):
    """What follows cannot be read; the problem is already noted."""


class _Builder:
    """Turns events into plain data."""

    def __init__(self, events: Iterator[Any], document: Document) -> None:
        self._events = events
        self._document = document
        self.line = 0
        self.column = 0

    def build(self) -> None:
        self._next()  # the stream's start
        start = self._next()
        if self._kind(start) == "StreamEnd":
            self._stop(start, "the file is empty", "`kitbuild init` writes a starter recipe")
        if start.version or start.tags:
            self._stop(start, "a recipe has no % directive", "remove the line that starts with %")
        self._document.data = self._value(self._next(), ())
        self._next()  # the document's end
        after = self._next()
        if self._kind(after) != "StreamEnd":
            self._stop(after, "a second document starts here", "a recipe is one document: remove `---`")

    def _next(self) -> Any:
        event = next(self._events)
        self.line, self.column = event.end_mark.line, event.end_mark.column
        return event

    @staticmethod
    def _kind(event: Any) -> str:
        return type(event).__name__.removesuffix("Event")

    def _note(self, event: Any, message: str, hint: str, path: Path = ()) -> None:
        self._document.bad.add(path)
        mark = event.start_mark
        self._document.problems.append(
            Problem(
                message=message,
                hint=hint or None,
                file=self._document.file,
                line=mark.line + 1,
                column=mark.column + 1,
                key=dotted(path) or None,
            )
        )

    def _stop(self, event: Any, message: str, hint: str, path: Path = ()) -> NoReturn:
        self._note(event, message, hint, path)
        raise _StopError

    def _value(self, event: Any, path: Path) -> Any:
        kind = self._kind(event)
        plain = event.value if kind == "Scalar" and event.implicit[0] else None
        mark = event.start_mark
        self._document.values[path] = Place(line=mark.line + 1, column=mark.column + 1, plain=plain)
        if len(path) > MOST_DEPTH:
            self._stop(event, f"more than {MOST_DEPTH} levels deep", "a recipe is a few levels deep", path[:1])
        if kind == "Alias":
            self._note(event, f"`*{event.anchor}` is an alias", "write the value out; anchors are not read", path)
            return None
        if event.anchor:
            self._note(event, f"`&{event.anchor}` is an anchor", "remove it; aliases are not read", path)
        if event.tag is not None:
            self._note(event, f"`{event.tag}` is a tag", "remove it; quote what is a string", path)
        if kind == "Scalar":
            return self._scalar(event, plain, path)
        return self._mapping(path) if kind == "MappingStart" else self._sequence(path)

    def _scalar(self, event: Any, plain: str | None, path: Path) -> Any:
        if _CONTROL.search(event.value):
            self._note(event, "a control character stands in this string", "remove it", path)
        if plain is None:
            return event.value
        try:
            return resolve(plain)
        except BadScalarError as error:
            self._note(event, str(error), error.hint, path)
            return plain

    def _sequence(self, path: Path) -> tuple[Any, ...]:
        items: list[Any] = []
        while self._kind(event := self._next()) != "SequenceEnd":
            items.append(self._value(event, (*path, len(items))))
        return tuple(items)

    def _mapping(self, path: Path) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while self._kind(event := self._next()) != "MappingEnd":
            key = self._key(event, path)
            here = (*path, key)
            if key in found:
                first = self._document.keys[here].line
                self._note(event, f"given twice, first on line {first}", "keep one", here)
                hidden = (*path, f"{key} (again)")
                self._value(self._next(), hidden)
                continue
            mark = event.start_mark
            self._document.keys[here] = Place(line=mark.line + 1, column=mark.column + 1)
            found[key] = self._value(self._next(), here)
        return found

    def _key(self, event: Any, path: Path) -> str:
        if self._kind(event) != "Scalar":
            self._stop(event, "a key must be a string", "write `key: value`", path)
        text: str = event.value
        here = (*path, text)
        if event.anchor or event.tag is not None:
            self._note(event, "a key has no anchor and no tag", "write the bare key", here)
        if _CONTROL.search(text):
            self._note(event, "a control character stands in this key", "remove it", path)
        if not event.implicit[0]:
            return text
        if text == "<<":
            self._note(event, "a merge key", "write the keys out; merge keys are not read", here)
            return text
        try:
            value = resolve(text)
        except BadScalarError:
            value = 0
        if not isinstance(value, str):
            word = "an empty key" if text == "" else f"`{shorten(text)}` as a key"
            self._note(event, f"{word} is not a string", f'write "{shorten(text)}" in quotes', here)
        return text
