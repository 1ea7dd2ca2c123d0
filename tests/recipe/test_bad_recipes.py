"""Every file of tests/data/recipes/bad is refused with exactly the text beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kitbuild.errors import RecipeError
from kitbuild.recipe import read

BAD = Path(__file__).parents[1] / "data" / "recipes" / "bad"
FILES = sorted(BAD.glob("*.yaml"))


def problems_of(path: Path) -> str:
    with pytest.raises(RecipeError) as caught:
        read(path)
    return "".join(f"{problem}\n" for problem in caught.value.problems).replace(str(path), path.name)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_bad_recipe(path: Path) -> None:
    """A bad recipe is refused with every problem, its place and what to write instead."""
    assert path.with_suffix(".txt").read_text(encoding="utf-8") == problems_of(path)


def test_there_are_many() -> None:
    """At least forty bad recipes, each with its text, and no text without a recipe."""
    assert len(FILES) >= 40
    assert {path.stem for path in FILES} == {path.stem for path in BAD.glob("*.txt")}


def test_every_problem_has_a_place() -> None:
    """Each problem names its file, and a line and column."""
    for path in FILES:
        with pytest.raises(RecipeError) as caught:
            read(path)
        for problem in caught.value.problems:
            assert (str(path), True, True) == (problem.file, (problem.line or 0) > 0, (problem.column or 0) > 0), path


def test_the_error_counts_the_problems() -> None:
    """The error's own line counts; the exit code is 2."""
    path = BAD / "duplicate-nested.yaml"
    with pytest.raises(RecipeError) as caught:
        read(path)
    assert f"{path} cannot be used: 2 problems" == str(caught.value)
    assert (caught.value.exit_code, caught.value.code) == (2, "recipe")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("absent.yaml", "there is no such file"),
        (".", "this is a directory"),
        ("nul\0.yaml", "cannot be read: embedded null byte"),
    ],
)
def test_not_a_file(tmp_path: Path, name: str, expected: str) -> None:
    """What cannot be opened is a recipe error too."""
    with pytest.raises(RecipeError) as caught:
        read(tmp_path / name)
    assert [expected] == [problem.message for problem in caught.value.problems]


def test_huge_file(tmp_path: Path) -> None:
    """A file over 1 MiB is refused by its size, before it is parsed."""
    path = tmp_path / "huge.yaml"
    path.write_bytes(b"# " + b"x" * (1024 * 1024))
    with pytest.raises(RecipeError) as caught:
        read(path)
    assert [problem.message for problem in caught.value.problems] == ["the file is larger than 1 MiB"]
