"""Bands from an archive's own repeats: how far equal runs stray is measured, not stated."""

from __future__ import annotations

from itertools import accumulate
from math import inf
from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitbuild.archive import Archive, check, pack, read, unpack, verify
from kitbuild.compare import Bands, compare
from kitbuild.compare.bands import _band
from kitbuild.errors import UsageError
from kitbuild.flow.archives import archive_repeats
from kitbuild.flow.archives import compare as compare_verb
from kitbuild.flow.context import Context
from kitbuild.flow.tolerances import allowance
from kitbuild.progress import Silent
from kitbuild.store.blobs import Store
from tests.archive.factory import DATA, Run, lock_body, metrics_line, sha256, wheel
from tests.base import made

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 8


def strayed(*gaps: float, exact: bool = True) -> Run:
    """A run whose loss strays from the plain one by these, step by step."""
    steps = [metrics_line(step) for step in range(1, STEPS + 1)]
    for line, gap in zip(steps, gaps, strict=False):
        line["loss"] = (float.fromhex(line["loss"]) + gap).hex()
        line["grad_norm"] = (float.fromhex(line["grad_norm"]) + (0 if exact else gap)).hex()
    return Run(steps=steps)


def spread(size: float) -> list[float]:
    """Equal at first, then growing."""
    return [0.0, *(size * step for step in range(1, STEPS))]


@pytest.fixture
def runs(tmp_path: Path) -> list[Archive]:
    """An archive and three repeats, which part at step 2 and lie between -1e-4 and 2e-4 a step."""
    return [
        Archive.read(strayed(*spread(size), exact=False).write(tmp_path / f"run-{number}", sealed=True))
        for number, size in enumerate((0.0, 1e-4, -1e-4, 2e-4))
    ]


def judged(runs: list[Archive], tmp_path: Path, *gaps: float) -> str:
    other = Archive.read(strayed(*gaps).write(tmp_path / f"other-{sha256(str(gaps))[:8]}"))
    return compare(runs[0], other, Bands.of(runs[0], runs[1:])).verdict


def test_a_run_like_the_repeats_is_within(runs: list[Archive], tmp_path: Path) -> None:
    """Between them, or no farther out than they are from one another."""
    other = Archive.read(strayed(*spread(3e-4)).write(tmp_path / "other"))
    verdict = compare(runs[0], other, Bands.of(runs[0], runs[1:]))
    assert verdict.text() == (
        "WITHIN_TOLERANCE: 8 steps, 2 weight tensors; inside the band of 4 runs: "
        "loss needs at most 33% of it (step 2), grad_norm needs at most 0% of it (step 1)"
    )
    assert verdict.exit_code == 0


@pytest.mark.parametrize(
    ("gaps", "expected"),
    [
        (spread(-3.9e-4), "WITHIN_TOLERANCE"),
        (spread(-4.1e-4), "DIFFERENT"),
        (spread(5.1e-4), "DIFFERENT"),
        ([2.9e-4, *spread(0.0)[1:]], "WITHIN_TOLERANCE"),  # before the repeats part, the first gap counts
        ([3.1e-4, *spread(0.0)[1:]], "DIFFERENT"),
        ([0, 0, 0, 0, 0, 0, 0, float("nan")], "DIFFERENT"),
        ([0, 0, 1.1e-3, 0, 0, 0, 0, 0], "DIFFERENT"),  # inside the band of the last step, far outside its own
    ],
)
def test_a_run_beyond_is_different(runs: list[Archive], tmp_path: Path, gaps: list[float], expected: str) -> None:
    """Step by step, not by the widest step of all."""
    assert judged(runs, tmp_path, *gaps) == expected


def test_what_is_beyond_is_named(runs: list[Archive], tmp_path: Path) -> None:
    """The first step outside, not the first that is unequal, and what it was held to."""
    other = Archive.read(strayed(0, 0, 1.1e-3).write(tmp_path / "other"))
    verdict = compare(runs[0], other, Bands.of(runs[0], runs[1:]))
    assert verdict.first_difference is not None
    assert (verdict.first_difference.step, verdict.first_difference.field) == (3, "loss")
    assert "beyond the tolerance (the band of 4 runs)" in verdict.notes


def test_inputs_are_never_forgiven(runs: list[Archive], tmp_path: Path) -> None:
    """Other data inside every band is another run."""
    other = strayed(*spread(1e-4))
    other.change_step(4, batch_sha256=sha256("other"))
    verdict = compare(runs[0], Archive.read(other.write(tmp_path / "other")), Bands.of(runs[0], runs[1:]))
    assert verdict.first_difference is not None
    assert (verdict.verdict, verdict.first_difference.field) == ("DIFFERENT", "batch_sha256")


def test_an_odd_repeat_widens_the_band() -> None:
    """One that lies outside the others' band shows that equal runs stray so far: the factor says by how much."""
    band = _band("loss", [(0.0, 0.0), (0.0, 1.0), (0.0, 5.0)])
    assert band.factor == 4.0
    assert band.width == (20.0, 20.0)
    assert [band.used(1, value) for value in (-20.0, 45.0, float("nan"), float("-inf"))] == [1.0, 2.0, inf, inf]
    even = _band("loss", [(0.0, 0.0), (0.0, 1.0), (0.0, 2.0)])
    assert (even.factor, even.width) == (1.0, (2.0, 2.0))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.floats(-1, 1, width=32), min_size=3, max_size=3), min_size=3, max_size=5))
def test_each_run_is_inside_the_band_of_all(curves: list[list[float]]) -> None:
    """Whatever the repeats are, none of them is outside; left out, each is inside the widened band of the others."""
    band = _band("loss", [tuple(curve) for curve in curves])
    assert all(band.used(place, value) == 0 for curve in curves for place, value in enumerate(curve))
    assert all(left <= right for left, right in zip(band.width, band.width[1:], strict=False))


def walk(random: Random, scale: float) -> tuple[float, ...]:
    """Equal at the first step, then a little further each time."""
    return (0.0, *accumulate(random.gauss(0, scale) for _ in range(100)))


@pytest.mark.parametrize(("scale", "least", "most"), [(1, 0, 10), (10, 90, 100)])
def test_how_often_a_band_errs(scale: float, least: int, most: int) -> None:
    """Of a hundred runs that stray as the three repeats do few are refused; of those that stray ten times as far, most."""
    refused = 0
    for number in range(100):
        random = Random(number)  # noqa: S311 - a simulation
        band = _band("loss", [walk(random, 1e-4) for _ in range(4)])
        judged = walk(random, scale * 1e-4)
        refused += any(band.used(place, value) > 1 for place, value in enumerate(judged))
    assert least <= refused <= most


def test_equal_repeats_make_no_band(tmp_path: Path) -> None:
    """Strict runs of one machine are equal bit for bit, and say nothing of another machine."""
    runs = [Archive.read(Run().write(tmp_path / str(number))) for number in range(3)]
    with pytest.raises(UsageError) as caught:
        Bands.of(runs[0], runs[1:])
    assert caught.value.message == "no band: the repeats are equal bit for bit, so they do not show how far runs stray"
    assert "determinism: record" in str(caught.value.hint)


def test_what_is_no_repeat_is_named(runs: list[Archive], tmp_path: Path) -> None:
    """All at once: unfinished, tampered, of other length, data or schedule, not a number."""
    bad = [strayed(1e-4) for _ in range(6)]
    bad[0].exit = {"exit_code": 6}
    bad[1].manifest = {"seed": 7}
    bad[2].steps = bad[2].steps[:-1]
    bad[3].change_step(2, batch_sha256=sha256("other"))
    bad[4].change_step(5, learning_rate=(1.0).hex())
    bad[5].change_step(3, loss="inf")
    repeats = [Archive.read(run.write(tmp_path / f"bad-{number}")) for number, run in enumerate(bad)]
    with pytest.raises(UsageError) as caught:
        Bands.of(runs[0], repeats)
    found = [problem.message.partition(":")[0] for problem in caught.value.problems]
    assert found == [
        "bad-0 is unfinished",
        "bad-1 does not verify",
        "bad-2 has 7 steps, run-0 has 8",
        "bad-3 has other data at step 2",
        "bad-4 has another learning rate at step 5",
        "bad-5 has a loss or a gradient norm that is no number",
    ]
    with pytest.raises(UsageError, match="1 repeat"):
        Bands.of(runs[0], runs[1:2])


@pytest.fixture
def context(tmp_path: Path) -> Context:
    store = Store.open({"KITBUILD_HOME": str(tmp_path / "store")})
    for data in (DATA, b"{}"):
        store.add_bytes(data)
    return Context(environ={}, store=store, progress=Silent())


def test_repeats_are_named_on_the_command_line(context: Context, runs: list[Archive], tmp_path: Path) -> None:
    """One by one or by a pattern; neither the archive nor the judged run is its own repeat."""
    strayed(*spread(3e-4)).write(tmp_path / "run-9", sealed=True)
    pattern = f"repeats:{tmp_path}/run-*"
    listed = "repeats:" + ",".join(str(run.path) for run in runs)
    for text in (pattern, listed):
        result = compare_verb(context, runs[0].path, tmp_path / "run-9", report=None, tolerance=text)
        assert result.fields["verdict"] == "WITHIN_TOLERANCE"
        assert "the band of 4 runs" in result.text()
    with pytest.raises(UsageError, match="nothing is named"):
        allowance(f"repeats:{tmp_path}/none-*", runs[0])
    with pytest.raises(UsageError, match="does not exist"):
        allowance(f"repeats:{tmp_path}/none,{tmp_path}/run-1", runs[0])


def test_a_tolerance_that_cannot_be_read_is_told_first(context: Context, tmp_path: Path) -> None:
    """Before the archives are looked at."""
    with pytest.raises(UsageError, match="--tolerance los=1: 'los' is not one of"):
        compare_verb(context, tmp_path / "none", tmp_path / "none", report=None, tolerance="los=1")


def test_a_copy_of_the_judged_run_is_no_repeat(runs: list[Archive], tmp_path: Path) -> None:
    """Under another name it is still the same archive."""
    far = strayed(*spread(1.0)).write(tmp_path / "far", sealed=True)
    copied = strayed(*spread(1.0)).write(tmp_path / "copy", sealed=True)
    other = Archive.read(far)
    assert other.sha256 == read(copied).sha256
    names = ",".join(str(path) for path in (*(run.path for run in runs), copied))
    verdict = compare(runs[0], other, allowance(f"repeats:{names}", runs[0], other=other))
    assert verdict.verdict == "DIFFERENT"


def test_older_runs_without_a_digest_are_told_apart_by_their_place(tmp_path: Path) -> None:
    """The judged run is in the pattern, and is not its own repeat."""
    runs = [Archive.read(strayed(*spread(size)).write(tmp_path / f"run-{size}")) for size in (0.0, 1e-4, -1e-4, 1.0)]
    assert runs[3].sha256 is None
    allowed = allowance(f"repeats:{tmp_path}/run-*", runs[0], other=runs[3])
    assert str(allowed) == "the band of 3 runs"
    assert compare(runs[0], runs[3], allowed).verdict == "DIFFERENT"


def test_an_archive_keeps_its_repeats(context: Context, runs: list[Archive], tmp_path: Path) -> None:
    """Kept without weights, they verify, and the archive stays what it was; a packed one carries them."""
    base = made.add(context.store).model_dump(mode="json")
    lock = lock_body(wheels=[wheel("torch", "2.13.0")], base=base)
    original = strayed(0.0)
    original.lock = lock
    place = original.write(tmp_path / "original", sealed=True)
    before = read(place).sha256
    assert allowance(None, read(place)) is None
    with pytest.raises(UsageError, match="keeps no repeats"):
        allowance("repeats", read(place))
    for _ in range(2):  # Adding them again changes nothing.
        result = archive_repeats(place, [run.path for run in runs[1:]])
    assert result.fields["repeats"] == [f"{place}/repeats/run-{number}" for number in (1, 2, 3)]
    assert not (place / "repeats" / "run-1" / "model").exists()
    assert read(place).sha256 == before
    packed = pack(place, tmp_path / "x.kit.tar", store=context.store)
    there = unpack(packed, Store.open({"KITBUILD_HOME": str(tmp_path / "other")}), tmp_path / "there")
    other = Archive.read(strayed(*spread(3e-4)).write(tmp_path / "judged"))
    for path in (place, packed, there):
        check(read(path))
        allowed = allowance("repeats", read(path))
        assert str(allowed) == "the band of 4 runs"
        assert compare(read(path), other, allowed).verdict == "WITHIN_TOLERANCE"
    log = there / "repeats" / "run-2" / "logs" / "guest.log"
    log.write_text("kit: gone\n")
    assert [problem.message.partition(" is ")[0] for problem in verify(read(there))] == ["sha256"]
    with pytest.raises(UsageError, match="does not verify"):
        allowance("repeats", read(there))


def test_another_run_of_the_same_name_is_not_written_over(runs: list[Archive], tmp_path: Path) -> None:
    """Two runs of one name: the first stays."""
    archive_repeats(runs[0].path, [run.path for run in runs[1:]])
    other = strayed(*spread(5e-5)).write(tmp_path / "elsewhere" / "run-1", sealed=True)
    with pytest.raises(UsageError, match="run-1 is another run"):
        archive_repeats(runs[0].path, [other])


def test_what_makes_no_band_is_not_kept(runs: list[Archive]) -> None:
    """Nothing is written where the repeats say nothing."""
    with pytest.raises(UsageError, match="no band"):
        archive_repeats(runs[0].path, [runs[1].path])
    assert not (runs[0].path / "repeats").exists()
