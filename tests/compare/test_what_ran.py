"""An archive whose kernels are not the locked ones is not the locked run, whatever its numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kitbuild.archive import Archive, verify
from kitbuild.compare import Verdict, compare
from kitbuild.compare.kernels import departures
from kitbuild.guest import record
from tests.archive.factory import KERNEL, Run, kernel, lock_body, sha256

if TYPE_CHECKING:
    from pathlib import Path

LOCKED = f"{KERNEL}@{'a' * 40}"
ROPE = {"recipe": lock_body()["recipe"] | {"liger": {"rope": True}}}
LAYERS = kernel(role="layers") | {
    "repo": "test-org/layers",
    "layers": {"RMSNorm": "FastNorm", "SiluAndMul": "FastGate", "Norm": "FastNorm"},
}


def archive(run: Run, path: Path) -> Archive:
    return Archive.read(run.write(path))


def judge(left: Run, right: Run, folder: Path) -> Verdict:
    return compare(archive(left, folder / "left"), archive(right, folder / "right"))


def with_use(run: Run, number: int, **changes: Any) -> Run:
    """One entry of the manifest's `kernels`, otherwise."""
    uses = run.body()["kernels"]
    uses[number] |= changes
    run.manifest = {**run.manifest, "kernels": uses}
    return run


def layered(**changes: Any) -> Run:
    return Run(lock=lock_body(kernels=[kernel(), LAYERS]), **changes)


def test_what_was_locked_and_ran_is_no_departure(tmp_path: Path) -> None:
    """Attention and layers, each layer called, a dependency called by its kernel alone."""
    dependency = kernel(role="dependency") | {"repo": "test-org/helper"}
    run = Run(lock=lock_body(kernels=[kernel(), LAYERS, dependency]))
    assert len(run.body()["kernels"]) == 5
    run.manifest = {"kernels": run.body()["kernels"][:4]}
    assert departures(archive(run, tmp_path / "run")) == ()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"commit": "b" * 40}, f"{KERNEL}: locked aaaaaaaaaaaa (torch-universal), bbbbbbbbbbbb (torch-universal) ran"),
        ({"commit": None}, f"{KERNEL}: locked aaaaaaaaaaaa (torch-universal), an unknown c (torch-universal) ran"),
        ({"variant": "torch-cuda"}, f"{KERNEL}: locked aaaaaaaaaaaa (torch-universal), aaaaaaaaaaaa (torch-cuda) ran"),
        ({"calls": {"0": 0}}, f"{KERNEL}: locked aaaaaaaaaaaa (torch-universal), not used"),
        ({"calls": {}}, f"{KERNEL}: locked aaaaaaaaaaaa (torch-universal), not used"),
        ({"calls": {"0": 3, "1": 0}}, f"{KERNEL}: locked aaaaaaaaaaaa (torch-universal), not used in rank 1"),
    ],
)
def test_another_commit_variant_or_no_call_is_named(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    """With equal numbers the verdict is DIFFERENT, and the kernel is the first cause."""
    right = with_use(Run(), 0, **changes)
    assert [str(item) for item in departures(archive(right, tmp_path / "one"))] == [text]
    verdict = judge(Run(), right, tmp_path)
    first = verdict.first_difference
    assert first is not None
    assert (verdict.verdict, first.step, first.field, first.name) == ("DIFFERENT", None, "kernels", KERNEL)
    assert (verdict.causes[0].kind, verdict.causes[0].name) == ("kernel_use", KERNEL)


def test_a_rank_that_is_not_in_the_list_did_not_call(tmp_path: Path) -> None:
    """Two processes trained, and one of them says nothing."""
    run = Run(manifest={"launch": {"world_size": 2}})
    assert [item.rank for item in departures(archive(run, tmp_path / "run"))] == [1]


@pytest.mark.parametrize(("calls", "unused"), [({"2": 4, "3": 4}, []), ({"2": 4, "3": 0}, [3]), ({"2": 4}, [0])])
def test_a_node_of_several_speaks_of_its_own_ranks(tmp_path: Path, calls: dict[str, int], unused: list[int]) -> None:
    """The second node of two lists ranks 2 and 3."""
    launch = {"nodes": 2, "processes_per_node": 2, "world_size": 4}
    run = Run(manifest={"launch": launch}, calls=calls)
    assert [item.rank for item in departures(archive(run, tmp_path / "run"))] == unused


def test_a_world_size_that_cannot_be_is_survived(tmp_path: Path) -> None:
    """A stranger's number is not counted up to."""
    run = Run(manifest={"launch": {"world_size": 10**18}, "liger": {"patched": True}})
    assert [item.rank for item in departures(archive(run, tmp_path / "run"))] == [1]


def test_one_layer_of_several_that_was_not_called_is_named(tmp_path: Path) -> None:
    """A repository is not used because another of its layers is."""
    run = with_use(layered(), 2, calls={"0": 0})
    assert [str(item) for item in departures(archive(run, tmp_path / "run"))] == [
        "test-org/layers:FastGate: locked aaaaaaaaaaaa (torch-universal), not used"
    ]


def test_a_kernel_that_nobody_locked_is_named(tmp_path: Path) -> None:
    """What ran beside the lock counts, where it was called."""
    uses = Run().body()["kernels"]
    extra = {"role": "layers", "repo": "evil/x", "commit": "c" * 40, "variant": "torch-cuda", "calls": {"0": 1}}
    run = Run(manifest={"kernels": [*uses, extra, extra | {"repo": "idle/x", "calls": {"0": 0}}]})
    assert [str(item) for item in departures(archive(run, tmp_path / "run"))] == [
        "evil/x: locked nothing, cccccccccccc (torch-cuda) ran"
    ]
    assert judge(Run(), run, tmp_path).verdict == "DIFFERENT"


@pytest.mark.parametrize(
    ("lock", "manifest", "text"),
    [
        ({}, {"attention": {"used": "sdpa"}}, f"attention: locked {KERNEL}@{'a' * 40}, sdpa"),
        ({"kernels": []}, {"attention": {"used": "eager"}}, "attention: locked sdpa, eager"),
        ({"recipe": lock_body()["recipe"] | {"liger": {"rope": True}}}, {}, "liger: locked on, nothing was patched"),
        ({"recipe": lock_body()["recipe"] | {"liger": {"rope": False}}}, {}, None),
        ({}, {"liger": {"options": None, "patched": ["RMSNorm"]}}, "liger: locked off, patched RMSNorm"),
        (
            {},
            {"attention": {"used": LOCKED, "calls": {"0": {LOCKED: 9}, "1": {LOCKED: 8, "sdpa": 1}}}},
            f"attention: locked {LOCKED}, sdpa was called in rank 1",
        ),
        ({}, {"attention": {"used": LOCKED, "calls": {"0": {LOCKED: 9, "sdpa": 0}}}}, None),
        (ROPE, {"liger": {"patched": ["rope"], "calls": {"0": {"rope": 4}}}}, None),
        (ROPE, {"liger": {"patched": ["RMSNorm"]}}, None),  # an older kitbuild did not count
        (ROPE, {"liger": {"patched": ["rope"], "calls": {"0": {}}}}, "liger rope: locked on, not used"),
        (
            ROPE,
            {"liger": {"patched": ["rope"], "calls": {"0": {"rope": 1}, "1": {"rope": 0}}}},
            "liger rope: locked on, not used in rank 1",
        ),
    ],
)
def test_the_attention_path_and_liger_count(
    tmp_path: Path, lock: dict[str, Any], manifest: dict[str, Any], text: str | None
) -> None:
    """As the lock has them, or named."""
    run = Run(lock=lock_body(**lock), manifest=manifest)
    found = [str(item) for item in departures(archive(run, tmp_path / "run"))]
    assert found == ([text] if text else [])
    left = Run(lock=lock_body(**lock))
    if lock == ROPE:
        left.manifest = {"liger": {"patched": ["rope"], "calls": {"0": {"rope": 4}}}}
    assert judge(left, run, tmp_path).verdict == ("DIFFERENT" if text else "IDENTICAL")


def test_how_often_liger_was_called_is_no_cause(tmp_path: Path) -> None:
    """Another accumulation calls more often; what was patched in is a cause."""
    sides = [
        Run(lock=lock_body(**ROPE), manifest={"liger": {"patched": ["rope"], "calls": {"0": {"rope": count}}}})
        for count in (4, 8)
    ]
    sides[1].change_step(2, loss=(9.0).hex())
    assert judge(sides[0], sides[1], tmp_path).causes == ()


def test_two_equal_runs_that_both_departed_are_not_identical(tmp_path: Path) -> None:
    """Neither is the run that was locked: exit 9."""
    runs = [with_use(Run(), 0, commit="b" * 40) for _ in range(2)]
    verdict = judge(runs[0], runs[1], tmp_path)
    assert (verdict.verdict, verdict.exit_code) == ("NOT_COMPARABLE", 9)
    assert verdict.detail.startswith(f"neither run is the locked one: {KERNEL}: ")


def test_a_departure_is_within_no_tolerance(tmp_path: Path) -> None:
    """A bound forgives numbers, not another kernel."""
    from kitbuild.compare import Tolerance  # noqa: PLC0415

    sides = [archive(Run(), tmp_path / "a"), archive(with_use(Run(), 0, commit="b" * 40), tmp_path / "b")]
    assert compare(sides[0], sides[1], Tolerance.parse("loss=1e-1")).verdict == "DIFFERENT"


def two_ranks(**changes: Any) -> Run:
    """A run of two processes, each with its part of a step."""
    run = Run(manifest={"launch": {"world_size": 2}}, calls={"0": 1, "1": 1}, **changes)
    for line in run.steps:
        half = float.fromhex(line["loss"]) / 2
        records = [sha256(f"{line['step']} {rank}").encode()[:32] + b"\0" * 8 for rank in range(2)]
        line["ranks"] = record.ranks([[half], [half]], records, 40)
    return run


def test_the_first_rank_that_differs_is_named(tmp_path: Path) -> None:
    """By its own loss, or by its own batch."""
    right = two_ranks()
    right.change_step(3, loss=(2.5).hex())
    right.steps[2]["ranks"][1] |= {"loss": (1.25).hex()}
    verdict = judge(two_ranks(), right, tmp_path)
    assert verify(Archive.read(tmp_path / "right")) == ()
    assert verdict.first_difference is not None
    assert verdict.as_json()["first_difference"]["rank"] == 1
    assert verdict.text().startswith("DIFFERENT: first at step 3, loss (rank 1) 0x1.5")
    assert "several" not in verdict.as_json()["first_difference"]


def test_a_batch_is_traced_to_its_rank(tmp_path: Path) -> None:
    """The data of rank 0 came in otherwise."""
    right = two_ranks()
    right.change_step(2, batch_sha256=sha256("other"))
    right.steps[1]["ranks"][0] |= {"batch_sha256": sha256("other")}
    first = judge(two_ranks(), right, tmp_path).first_difference
    assert first is not None
    assert (first.field, first.step, first.rank) == ("batch_sha256", 2, 0)


@pytest.mark.parametrize("field", ["grad_norm", "learning_rate"])
def test_what_is_merged_has_no_rank(tmp_path: Path, field: str) -> None:
    """A gradient norm is of all ranks; with one process it is rank 0's."""
    for runs, rank in (((two_ranks(), two_ranks()), None), ((Run(), Run()), 0)):
        runs[1].change_step(2, **{field: (9.0).hex()})
        first = judge(*runs, tmp_path / str(rank)).first_difference
        assert first is not None
        assert (first.field, first.rank) == (field, rank)


def test_other_world_sizes_have_no_common_rank(tmp_path: Path) -> None:
    """One process against two."""
    right = two_ranks()
    right.change_step(2, loss=(9.0).hex())
    first = judge(Run(), right, tmp_path).first_difference
    assert first is not None
    assert (first.step, first.rank) == (2, None)
