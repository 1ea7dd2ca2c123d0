"""How two runs part: each quantity in words, and the steps around the first difference."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kitbuild.archive import Archive
from kitbuild.compare import Tolerance, Verdict, compare
from kitbuild.compare.divergence import decimal
from tests.archive.factory import Run, metrics_line, sha256

if TYPE_CHECKING:
    from pathlib import Path


def judge(left: Run, right: Run, folder: Path, tolerance: str | None = None) -> Verdict:
    sides = [Archive.read(run.write(folder / name)) for run, name in ((left, "left"), (right, "right"))]
    return compare(sides[0], sides[1], Tolerance.parse(tolerance) if tolerance else None)


def parted() -> Run:
    """One ulp at step 3, more at step 4, and other weights."""
    right = Run()
    right.change_step(3, loss=(2.625 + 2**-22).hex())
    right.change_step(4, loss=(2.5 + 2**-18).hex(), grad_norm=(2.25).hex())
    right.weights = right.weights | {"norm.weight": ("BF16", [4], b"\3" * 8)}
    return right


def test_how_runs_part_is_told_in_words_and_in_a_table(tmp_path: Path) -> None:
    """Quantity by quantity; `>` marks the step, `=` an equal value."""
    verdict = judge(Run(), parted(), tmp_path)
    assert verdict.lines()[1:] == (
        "  batches        equal in all 5 steps",
        "  loss           differs in 2 of 5 steps, from step 3 on, by at most 16 ulps (1.5e-06 relative, at step 4)",
        "  grad_norm      differs in 1 of 5 steps, step 4, by at most 1,048,576 ulps (0.11 relative, at step 4)",
        "  learning_rate  equal in all 5 steps",
        "  weights        differs in 1 of 2 tensors: norm.weight",
        "     step  batch  loss left       right  ulps  grad norm left  right       ulps",
        "        1      =      2.875           =     0            1.25      =          0",
        "        2      =       2.75           =     0             1.5      =          0",
        "  >     3      =      2.625  2.62500024     1            1.75      =          0",
        "        4      =        2.5  2.50000381    16               2   2.25  1,048,576",
        "        5      =      2.375           =     0            2.25      =          0",
    )


def test_the_same_is_there_for_programs(tmp_path: Path) -> None:
    """Floats exact, so that nothing has to be parsed out of a line."""
    body = judge(Run(), parted(), tmp_path).as_json()
    assert body["quantities"]["loss"] == {
        "differs": 2, "of": 5, "first_step": 3, "max_ulps": 16, "max_relative": 2**-18 / (2.5 + 2**-18),
        "worst_step": 4, "names": (),
    }  # fmt: skip
    assert body["quantities"]["weights"]["names"] == ("norm.weight",)
    assert [row["step"] for row in body["around"]] == [1, 2, 3, 4, 5]
    assert body["around"][2]["loss"] == ((2.625).hex(), (2.625 + 2**-22).hex())


def test_the_table_is_short(tmp_path: Path) -> None:
    """Two steps on each side, however long the run."""
    runs = [Run(steps=[metrics_line(step, loss=(1.0).hex()) for step in range(1, 101)]) for _ in range(2)]
    runs[1].change_step(50, loss=(2.0).hex())
    assert [row["step"] for row in judge(runs[0], runs[1], tmp_path).as_json()["around"]] == [48, 49, 50, 51, 52]


def test_identical_runs_do_not_part(tmp_path: Path) -> None:
    """One line is all."""
    assert judge(Run(), Run(), tmp_path).lines() == ("IDENTICAL: 5 steps, 2 weight tensors",)


def test_other_data_and_another_rate_have_columns(tmp_path: Path) -> None:
    """The learning rate is shown where it differs."""
    right = Run()
    right.change_step(1, batch_sha256=sha256("other"), learning_rate=(2e-5).hex())
    lines = judge(Run(), right, tmp_path).lines()
    assert lines[1] == "  batches        differs in 1 of 5 steps, step 1"
    row = lines[-3].split()
    assert lines[-4].endswith("learning rate left  right")
    assert row == [
        ">",
        "1",
        "other",
        "2.875",
        "=",
        "0",
        "1.25",
        "=",
        "0",
        "1e-05",
        "2e-05",
    ]


def test_weights_alone_have_no_table(tmp_path: Path) -> None:
    """No step differs, so none is shown; more than three tensors are counted."""
    names = [f"layer.{number}" for number in range(5)]
    runs = [Run(weights={name: ("F32", [1], byte * 4) for name in names}) for byte in (b"\1", b"\2")]
    verdict = judge(runs[0], runs[1], tmp_path)
    assert verdict.lines()[-1] == "  weights        differs in 5 of 5 tensors: layer.0, layer.1, layer.2 and 2 more"


def test_a_value_that_is_no_number_has_no_distance(tmp_path: Path) -> None:
    """Said in words and as a dash."""
    right = Run()
    right.change_step(5, loss="nan")
    lines = judge(Run(), right, tmp_path).lines()
    assert lines[2] == "  loss           differs in 1 of 5 steps, step 5, by a value that is no number"
    assert lines[-1].split()[3:6] == ["2.375", "nan", "-"]


def test_runs_of_other_lengths_are_followed_as_far_as_both_go(tmp_path: Path) -> None:
    """Not comparable, and still told how far they agree."""
    right = Run(steps=[metrics_line(step) for step in range(1, 5)])
    lines = judge(Run(), right, tmp_path).lines()
    assert lines[0] == "NOT_COMPARABLE: 5 steps vs 4 steps"
    assert lines[2] == "  loss           equal in all 4 steps"


def test_within_a_tolerance_is_told_too(tmp_path: Path) -> None:
    """How near it came, step by step."""
    verdict = judge(Run(), parted(), tmp_path, "loss=1e-2")
    assert verdict.verdict == "WITHIN_TOLERANCE"
    assert any(line.startswith("  >     3") for line in verdict.lines())


def test_digits_tell_neighbours_apart() -> None:
    """Nine for fp32, the shortest that comes back to the same bits for what is not."""
    assert decimal((2.625 + 2**-22).hex()) == "2.62500024"
    assert decimal((0.1).hex()) == "0.1"
    assert decimal("nan") == "nan"
