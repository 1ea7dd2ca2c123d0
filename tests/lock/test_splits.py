"""Which files of a Hub dataset make a split."""

from __future__ import annotations

from typing import Any

import pytest

from kitbuild.lock.splits import matches, split_files

CARD: dict[str, Any] = {
    "configs": [
        {"config_name": "small", "data_files": [{"split": "train", "path": "small/train-*"}]},
        {
            "config_name": "large",
            "default": True,
            "data_files": [
                {"split": "train", "path": ["large/train-*", "extra/*.jsonl"]},
                {"split": "test", "path": "t.jsonl"},
            ],
        },
    ]
}
FILES = ["README.md", "extra/a.jsonl", "large/train-1.jsonl", "large/train-0.jsonl", "small/train-0.jsonl", "t.jsonl"]


@pytest.mark.parametrize(
    ("name", "pattern", "fits"),
    [
        ("data/train-0.parquet", "data/train-*", True),
        ("data/train-0.parquet", "./data/train-*", True),
        ("data/x/train-0", "data/train-*", False),
        ("b/a.jsonl", "*.jsonl", False),
        ("a/b/train.jsonl", "**/train.jsonl", True),
        ("train.jsonl", "**/train.jsonl", True),
        ("b/c/a.jsonl", "b/**", True),
        ("b", "b/**", False),
        ("d/train-07.x", "d/train-[0-9]?.x", True),
        ("d/train/.x", "d/train?.x", False),
    ],
)
def test_patterns(name: str, pattern: str, fits: bool) -> None:  # noqa: FBT001 - a column of the table
    """A star stays inside a folder, two stars do not, as the Hub has it."""
    assert matches(name, pattern) is fits


@pytest.mark.parametrize(
    ("config", "split", "expected"),
    [
        (None, "train", ["large/train-0.jsonl", "large/train-1.jsonl", "extra/a.jsonl"]),
        (None, "test", ["t.jsonl"]),
        (None, "validation", []),
        ("small", "train", ["small/train-0.jsonl"]),
        ("small", "test", []),
        ("medium", "train", []),
    ],
)
def test_by_the_card(config: str | None, split: str, expected: list[str]) -> None:
    """The card's configuration decides, in the order of its patterns; an unknown one gives nothing, never all files."""
    assert split_files(FILES, CARD, config=config, split=split) == expected


def test_several_configurations_without_a_default() -> None:
    """Without a name and a default nothing is chosen: mixing them all would be another dataset."""
    card = {"configs": [{**entry, "default": False} for entry in CARD["configs"]]}
    assert split_files(FILES, card, config=None, split="train") == []


def test_a_configuration_by_folder() -> None:
    """A configuration with `data_dir`, or with features alone, leaves the splits to the files' names."""
    card = {"configs": [{"config_name": "a", "data_dir": "a"}, {"config_name": "b", "data_dir": "/b/"}]}
    names = ["a/train.jsonl", "a/test.jsonl", "b/train.jsonl"]
    assert split_files(names, card, config="b", split="train") == ["b/train.jsonl"]
    assert split_files(names[:2], {"configs": [{"config_name": "x"}]}, config=None, split="test") == ["a/test.jsonl"]


@pytest.mark.parametrize(
    ("names", "split", "expected"),
    [
        (["data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"], "train", [0]),
        (["training.jsonl", "dev.jsonl"], "train", [0]),
        (["training.jsonl", "dev.jsonl"], "validation", [1]),
        (["a.jsonl", "b.jsonl"], "train", [0, 1]),
        (["a.jsonl", "b.jsonl"], "test", []),
        (["test.jsonl"], "train", []),
        (["constrained.jsonl", "test.jsonl"], "train", []),
        (["train2.jsonl"], "train", [0]),
        (["my_split.jsonl"], "my_split", [0]),
        (["data/my_split-00000-of-00001.parquet"], "my_split", [0]),
        (["odd.jsonl", "even.jsonl"], "odd", [0]),
        ([".cache/train.jsonl", "dataset_infos.json", "train.md"], "train", []),
    ],
)
def test_by_name(names: list[str], split: str, expected: list[int]) -> None:
    """Without a card a split is a word in the path; where no file names any split, all are `train`."""
    assert split_files(names, {}, config=None, split=split) == [names[index] for index in expected]


@pytest.mark.parametrize(
    "card", [{"configs": "x"}, {"configs": ["x"]}, {"configs": None}, {"configs": [{"data_files": [1]}]}]
)
def test_a_card_that_is_odd(card: dict[str, Any]) -> None:
    """A card of another shape than the Hub's raises nothing."""
    assert split_files(["train.jsonl"], card, config=None, split="train") in ([], ["train.jsonl"])
