"""The error family: one exit code a class, one rendering a problem, one table in the README."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kitbuild import errors
from kitbuild.errors import KitbuildError, LockError, Problem, RecipeError

REPOSITORY = Path(__file__).resolve().parents[1]
OUTSIDE_THE_FAMILY = {0, 130}
EXPECTED = {
    "KitbuildError": (1, "unexpected"),
    "UsageError": (2, "usage"),
    "RecipeError": (2, "recipe"),
    "LockError": (3, "lock"),
    "ResolveError": (4, "resolve"),
    "ImageError": (5, "image"),
    "RunError": (6, "run"),
    "VerificationError": (7, "verification"),
    "DifferentError": (8, "different"),
    "NotComparableError": (9, "not_comparable"),
    "StoppedError": (10, "stopped"),
    "InterruptedRunError": (130, "interrupted"),
}


def family() -> list[type[KitbuildError]]:
    return [item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, KitbuildError)]


def codes_in(document: Path) -> set[int]:
    """The numbers in the first column of the table of exit codes."""
    rows = re.findall(r"^\| ([0-9 /]+) \|", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {int(number) for row in rows for number in row.split("/")}


def test_exit_codes_are_the_contract() -> None:
    """Each class has its code; only wrong usage and a bad recipe share one."""
    assert {item.__name__: (item.exit_code, item.code) for item in family()} == EXPECTED
    assert len({item.code for item in family()}) == len(family())


@pytest.mark.parametrize("document", ["README.md", "docs/exit-codes.md"])
def test_documents_list_every_exit_code(document: str) -> None:
    """The table has the family's codes, 0 and 130, and no other."""
    assert codes_in(REPOSITORY / document) == {item.exit_code for item in family()} | OUTSIDE_THE_FAMILY


def test_json_of_an_error() -> None:
    """The object of `kitbuild.error/1`, problems and further details included."""
    error = LockError(
        "x.lock.json is stale", hint="kitbuild lock x.yaml", problems=[Problem(message="moved", file="x")]
    )
    error.details["run_dir"] = "runs/x"
    assert error.as_json() == {
        "schema": "kitbuild.error/1",
        "code": "lock",
        "exit_code": 3,
        "message": "x.lock.json is stale",
        "hint": "kitbuild lock x.yaml",
        "problems": [{"file": "x", "line": None, "column": None, "key": None, "message": "moved", "hint": None}],
        "run_dir": "runs/x",
    }


def test_details_belong_to_one_error() -> None:
    """Two errors share nothing that can be changed."""
    first, second = RecipeError("a"), RecipeError("b")
    first.details["run_dir"] = "x"
    assert second.details == {}


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (Problem(message="is wrong"), "is wrong"),
        (Problem(message="is wrong", file="r.yaml"), "r.yaml: is wrong"),
        (
            Problem(message="is wrong", file="r.yaml", line=3, column=7, key="train.lr"),
            "r.yaml:3:7: train.lr: is wrong",
        ),
        (Problem(message="is wrong", file="r.yaml", line=3), "r.yaml:3: is wrong"),
        (Problem(message="is wrong", key="seed", hint="use 42"), "seed: is wrong\n  hint: use 42"),
    ],
)
def test_problem_is_located_as_well_as_is_known(problem: Problem, expected: str) -> None:
    """`file:line:column: key: message`, whatever of it is known, then the hint."""
    assert expected == str(problem)


def test_error_is_its_message() -> None:
    """What Python shows of an error is the fact alone."""
    assert str(RecipeError("no such file", hint="look elsewhere")) == "no such file"
