"""The rows of a local dataset, looked at before anything is built: the guest would refuse them minutes later.

Part of step 2. What a row needs is what TRL's trainer reads:
https://huggingface.co/docs/trl/dataset_formats
"""

from __future__ import annotations

import csv
import itertools
import json
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from kitbuild.errors import Problem, RecipeError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path
    from typing import BinaryIO

MOST = 10
WHOLE_BYTES, FIRST_ROWS = 64 << 20, 1000
"""A file that is larger is looked at in its first rows only."""
NEEDED = "messages, or prompt and completion, or text"
COLUMNS = (("messages",), ("prompt", "completion"), ("conversations",), ("text",))


def check_rows(files: Iterable[tuple[Path, str]], *, key: str) -> None:
    """Raise for the first rows that cannot be trained on. `files`: where each is, and what its user calls it."""
    problems = list(itertools.islice(_problems(files, key), MOST + 1))
    if not problems:
        return
    more = len(problems) > MOST
    problems = problems[:MOST]
    first = problems[0]
    text = f"{first.file}:{first.line}: {first.message}" if first.line else f"{first.file}: {first.message}"
    if len(problems) > 1:
        text = f"{'more than ' if more else ''}{len(problems)} rows cannot be trained on; the first is {text}"
    raise RecipeError(f"{key}: {text}", hint="correct or remove what is named, then lock again", problems=problems)


def _problems(files: Iterable[tuple[Path, str]], key: str) -> Iterator[Problem]:
    for place, name in files:
        try:
            for line, message in _wrong(place):
                yield Problem(file=name, line=line, key=key, message=message)
        except OSError as error:
            yield Problem(file=name, key=key, message=f"cannot be read: {error.strerror}")


def _wrong(place: Path) -> Iterator[tuple[int | None, str]]:
    match PurePosixPath(place.name).suffix:
        case ".jsonl" | ".json":
            yield from _wrong_json(place)
        case ".csv":
            yield from _wrong_csv(place)


def _wrong_csv(place: Path) -> Iterator[tuple[int | None, str]]:
    with place.open(encoding="utf-8-sig", errors="replace", newline="") as stream:
        header = next(csv.reader(stream), [])
    if not any(set(wanted) <= set(header) for wanted in (("prompt", "completion"), ("text",))):
        yield 1, f"the header has {_names(header)}; needed: prompt and completion, or text"


def _wrong_json(place: Path) -> Iterator[tuple[int | None, str]]:
    whole = place.stat().st_size <= WHOLE_BYTES
    with place.open("rb") as stream:
        if _opens(stream) == b"[":
            if whole:
                yield from _wrong_array(stream.read())
            return
        if whole and place.suffix == ".json" and _is_one_value(stream):
            return  # columns, or one row over several lines: the guest reads either
        lines = stream if whole else itertools.islice(stream, FIRST_ROWS)
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                yield number, f"is not JSON: {_reason(error)}"
                continue
            if message := _wrong_row(row):
                yield number, message


def _opens(stream: BinaryIO) -> bytes:
    """The first byte that is no space; the stream is put back to its start."""
    found = stream.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    stream.seek(0)
    return found


def _is_one_value(stream: BinaryIO) -> bool:
    """Whether the first line is only a part of what the file holds."""
    line = stream.readline()
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        stream.seek(0)
        try:
            json.load(stream)
        except (ValueError, RecursionError):
            return False
        else:
            return True
        finally:
            stream.seek(0)
    stream.seek(0)
    return False


def _wrong_array(data: bytes) -> Iterator[tuple[int | None, str]]:
    try:
        rows = json.loads(data)
    except (ValueError, RecursionError) as error:
        yield None, f"is not JSON: {_reason(error)}"
        return
    for number, row in enumerate(rows, 1):
        if message := _wrong_row(row):
            yield None, f"row {number}: {message}"


def _wrong_row(row: Any) -> str | None:
    """What a row lacks; None for one that can be trained on."""
    if not isinstance(row, dict):
        return f"a row is {_kind(row)}; needed: an object with {NEEDED}"
    given = next((wanted for wanted in COLUMNS if all(row.get(name) is not None for name in wanted)), None)
    if given is None:
        return f"a row has {_names(row)}; needed: {NEEDED}"
    return next((text for name in given if (text := _wrong_value(name, row[name]))), None)


def _wrong_value(name: str, value: Any) -> str | None:
    if name == "text" or (name in {"prompt", "completion"} and isinstance(value, str)):
        return None if isinstance(value, str) else f"{name} is {_kind(value)}; needed: a string"
    if not isinstance(value, list):
        return f"{name} is {_kind(value)}; needed: a list of messages"
    if not value:
        return f"{name} is empty"
    if name != "conversations" and not all(_is_message(item) for item in value):
        return f"{name} has a message without role and content"
    return None


def _is_message(item: Any) -> bool:
    return isinstance(item, dict) and isinstance(item.get("role"), str) and bool({"content", "tool_calls"} & set(item))


def _names(names: Iterable[str]) -> str:
    found = [str(name)[:40] for name in names]
    return ", ".join(found[:8]) + (", …" if len(found) > 8 else "") if found else "no column"  # noqa: PLR2004


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _reason(error: ValueError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "too many levels"
    return error.msg if isinstance(error, json.JSONDecodeError) else "it is not UTF-8"
