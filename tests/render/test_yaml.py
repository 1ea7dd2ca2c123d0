"""Our YAML: whatever a string holds, two readers of YAML give it back, and a comment stays a comment."""

from __future__ import annotations

from typing import Any

import pytest
import yaml as yaml_1_1
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from kitbuild.render.yaml import Noted, documents

TRAPS = ("no", "on", "~", "null", "12.10", "0o17", "1e3", "2026-11-30", "=", "<<", "!x", "&a", "*a", "- a", "a: b")
SHORT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)  # a key of over 1,024 signs is none in YAML
STRINGS = st.one_of(st.text(st.characters(exclude_categories=["Cs"])), st.sampled_from(TRAPS))
VALUES = st.recursive(
    st.one_of(STRINGS, st.booleans(), st.none(), st.integers(-(2**40), 2**40)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(SHORT, inner, max_size=4)),
    max_leaves=12,
)


def read_1_2(text: str) -> list[Any]:
    return list(YAML(typ="safe", pure=True).load_all(text))


@settings(max_examples=50)
@given(st.dictionaries(SHORT, VALUES, min_size=1, max_size=4))
def test_any_value_is_read_back(value: dict[str, Any]) -> None:
    """YAML 1.1, which Kubernetes and Compose read, and 1.2 both give the value that was written."""
    text = documents(value, head="a head")
    assert [value] == list(yaml_1_1.safe_load_all(text))
    assert [value] == read_1_2(text)


@given(st.text())
def test_a_comment_stays_one(note: str) -> None:
    """No text in a comment becomes a key, whatever ends a line in YAML."""
    text = documents({"a": Noted({"b": Noted([1, Noted({"c": Noted(2, note)}, note)], note)}, note)}, head=note)
    assert list(yaml_1_1.safe_load_all(text)) == [{"a": {"b": [1, {"c": 2}]}}]


def test_layout() -> None:
    """Comments stand above what they are about, a list is below its key, documents are parted."""
    first = {"a": Noted("x", "one\ntwo"), "b": [{"c": Noted(True, "why"), "d": {}}, "e"], "no": []}  # noqa: FBT003
    assert documents(first, {"f": None}, head="head\n\nmore") == (
        "# head\n#\n# more\n---\n"
        '# one\n# two\na: "x"\nb:\n  # why\n  - c: true\n    d: {}\n  - "e"\n"no": []\n'
        "---\nf: null\n"
    )


@pytest.mark.parametrize("sign", ["\n", "\r", "\x85", "\u2028", "\ufeff", "\x00", "\x7f", "😀"])
def test_nothing_unusual_is_written_as_it_is(sign: str) -> None:
    """Line ends of every kind, control signs and what lies beyond 16 bits are escaped."""
    text = documents({"a": f"x{sign}y"}, head="")
    assert sign not in text.removeprefix("#\n").removesuffix("\n")
    assert yaml_1_1.safe_load(text) == {"a": f"x{sign}y"}
