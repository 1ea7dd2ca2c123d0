"""Rows that the trainer could not use are found while locking."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kitbuild.errors import RecipeError
from kitbuild.lock import rows
from kitbuild.lock.rows import check_rows

if TYPE_CHECKING:
    from pathlib import Path

CHAT = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'


def refused(place: Path) -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        check_rows([(place, place.name)], key="dataset.0")
    return caught.value


def written(folder: Path, text: str | bytes, name: str = "rows.jsonl") -> Path:
    place = folder / name
    place.write_bytes(text if isinstance(text, bytes) else text.encode())
    return place


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rows.jsonl", CHAT),
        ("rows.jsonl", f"{CHAT}\n\n{CHAT}\r\n"),
        ("rows.jsonl", b"\xef\xbb\xbf" + CHAT.encode()),
        ("rows.jsonl", '{"prompt": "a", "completion": "b", "id": 1}'),
        ("rows.jsonl", '{"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "a", "content": ""}]}'),
        ("rows.jsonl", '{"messages": [{"role": "assistant", "tool_calls": []}]}'),
        ("rows.jsonl", '{"messages": null, "text": "a"}'),
        ("rows.jsonl", '{"conversations": [{"from": "human", "value": "a"}]}'),
        ("rows.jsonl", ""),
        ("rows.json", f"[{CHAT}, {CHAT}]"),
        ("rows.json", f"\n [{CHAT}]"),
        ("rows.json", f"{CHAT}\n{CHAT}\n"),
        ("rows.json", json.dumps(json.loads(CHAT), indent=1)),
        ("rows.csv", "id,prompt,completion\n1,a,b\n"),
        ("rows.csv", "\ufefftext\na\n"),
        ("rows.parquet", "not looked at"),
    ],
)
def test_rows_that_are_fine(name: str, text: str | bytes, tmp_path: Path) -> None:
    """Every form that the guest reads, also with further columns, blank lines or a byte order mark."""
    check_rows([(written(tmp_path, text, name), name)], key="dataset.0")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"foo": 1}', "a row has foo; needed: messages, or prompt and completion, or text"),
        ("{}", "a row has no column; needed: messages, or prompt and completion, or text"),
        ('{"prompt": "a"}', "a row has prompt; needed: messages, or prompt and completion, or text"),
        ('{"messages": null}', "a row has messages; needed: messages, or prompt and completion, or text"),
        ('{"messages": "a"}', "messages is a string; needed: a list of messages"),
        ('{"messages": []}', "messages is empty"),
        ('{"messages": ["a"]}', "messages has a message without role and content"),
        ('{"messages": [{"role": "user"}]}', "messages has a message without role and content"),
        ('{"prompt": 1, "completion": "b"}', "prompt is a number; needed: a list of messages"),
        ('{"text": ["a"]}', "text is a list; needed: a string"),
        ("3", "a row is a number; needed: an object with messages, or prompt and completion, or text"),
        ('{"text": "a"', "is not JSON: Expecting ',' delimiter"),
        (b'{"text": "\xff"}', "is not JSON: it is not UTF-8"),
    ],
)
def test_a_row_that_is_not(row: str | bytes, message: str, tmp_path: Path) -> None:
    """Exit 2 with the file, the line, and what is needed."""
    data = row if isinstance(row, bytes) else row.encode()
    error = refused(written(tmp_path, CHAT.encode() + b"\n" + data + b"\n"))
    assert error.exit_code == 2
    assert error.message == f"dataset.0: rows.jsonl:2: {message}"
    assert [(item.file, item.line, item.message) for item in error.problems] == [("rows.jsonl", 2, message)]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("rows.json", '[{"text": "a"}, {"foo": 1}]', "rows.json: row 2: a row has foo; needed: "),
        ("rows.json", "[1", "rows.json: is not JSON: "),
        ("rows.json", "[" * 100_000, "rows.json: is not JSON: too many levels"),
        ("rows.jsonl", "{}" + "[" * 100_000, "rows.jsonl:1: is not JSON: "),
        ("rows.csv", "id,messages\n1,a\n", "rows.csv:1: the header has id, messages; needed: prompt and completion"),
        ("rows.csv", "", "rows.csv:1: the header has no column; needed: "),
    ],
)
def test_an_array_and_a_header(name: str, text: str, message: str, tmp_path: Path) -> None:
    """An array has rows and no lines; of CSV the header is looked at."""
    assert refused(written(tmp_path, text, name)).message.startswith(f"dataset.0: {message}")


def test_ten_problems_are_told(tmp_path: Path) -> None:
    """Of a file that is wrong throughout, ten rows."""
    error = refused(written(tmp_path, "no\n" * 500))
    assert len(error.problems) == 10
    assert error.message.startswith("dataset.0: more than 10 rows cannot be trained on; the first is rows.jsonl:1: ")
    assert refused(written(tmp_path, "no\n" * 3)).message.startswith("dataset.0: 3 rows cannot be trained on; ")


def test_a_large_file_is_looked_at_in_its_first_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locking stays fast; the rest is the guest's to refuse. A large array is left to it altogether."""
    monkeypatch.setattr(rows, "WHOLE_BYTES", 100)
    good = f"{CHAT}\n" * rows.FIRST_ROWS
    check_rows([(written(tmp_path, good + "no\n"), "rows.jsonl")], key="dataset.0")
    assert refused(written(tmp_path, "no\n" + good)).problems[0].line == 1
    check_rows([(written(tmp_path, f"[{CHAT}, {CHAT}, 3]", "rows.json"), "rows.json")], key="dataset.0")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """Said of the file."""
    assert (
        refused(tmp_path / "none.jsonl").message == "dataset.0: none.jsonl: cannot be read: No such file or directory"
    )
