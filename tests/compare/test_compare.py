"""Verdicts: each kind of difference gives its verdict, its first difference and its cause, in these words."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from kitbuild.archive import Archive
from kitbuild.compare import Tolerance, Verdict, compare
from tests.archive.factory import DATA, KERNEL, Run, file, kernel, lock_body, metrics_line, sha256, wheel

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    return Judge(tmp_path)


class Judge:
    """Writes two runs and compares them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, left: Run, right: Run, tolerance: str | None = None, *, weights: bool = False) -> Verdict:
        one = Archive.read(left.write(self.folder / "left"), weights=weights)
        two = Archive.read(right.write(self.folder / "right"), weights=weights)
        return compare(one, two, Tolerance.parse(tolerance) if tolerance else None)


def other_loss(run: Run, step: int, loss: float = 2.5, **changes: Any) -> Run:
    run.change_step(step, loss=loss.hex(), **changes)
    return run


def test_two_equal_runs_are_identical(judge: Judge) -> None:
    """All values equal: exit 0, one line, no difference and no cause."""
    verdict = judge(Run(), Run(), weights=True)
    assert verdict.text() == "IDENTICAL: 5 steps, 2 weight tensors"
    assert verdict.exit_code == 0
    assert verdict.as_json() == {
        "verdict": "IDENTICAL",
        "detail": "5 steps, 2 weight tensors",
        "first_difference": None,
        "causes": [],
        "reasons": [],
        "notes": [],
        "quantities": {},
        "around": [],
    }


def test_time_memory_and_places_are_no_values(judge: Judge) -> None:
    """Step time, memory and where the output went change no verdict and are not listed."""
    right = Run(
        manifest={"arguments": {"learning_rate": 1e-5, "output_dir": "/elsewhere"}, "started": "2030-01-01T00:00:00Z"}
    )
    for step in range(1, 6):
        right.change_step(step, seconds=(9.0).hex(), peak_memory_bytes=None)
    assert judge(Run(), right).text() == "IDENTICAL: 5 steps, 2 weight tensors"


def test_a_place_is_no_difference(judge: Judge) -> None:
    """Where caches and outputs were is not listed; what is preloaded is."""
    variables = {
        "OMP_NUM_THREADS": "1",
        "HF_HOME": "/x",
        "TRITON_CACHE_DIR": "/x",
        "KERNELS_CACHE": "/x",
        "LD_PRELOAD": "/x.so",
    }
    assert judge(Run(), Run(environment={"variables": variables})).notes == ("differs: LD_PRELOAD absent vs /x.so",)


def test_memory_and_cores_are_the_last_causes(judge: Judge) -> None:
    """How much of a machine there is comes after what it is."""
    right = Run(device={"memory_bytes": 1, "name": "other"}, environment={"hardening": {"user": "root"}})
    texts = [cause.text for cause in judge(Run(), other_loss(right, 1)).causes]
    assert texts == ["device name cpu vs other", "hardening user absent vs root", "device memory_bytes absent vs 1"]


@pytest.mark.parametrize(("seeds", "told"), [((42, 43), []), ((42, 42), ["data_seed 42 vs 7"])])
def test_the_data_seed_is_told_where_it_is_not_the_seed(judge: Judge, seeds: tuple[int, int], told: list[str]) -> None:
    """The trainer's data seed follows the seed; named twice it would look like two causes."""
    runs = []
    for seed, data_seed in zip(seeds, (42, 43 if seeds[1] == 43 else 7), strict=True):
        lock = lock_body(recipe=lock_body()["recipe"] | {"seed": seed})
        runs.append(Run(lock=lock, manifest={"arguments": {"seed": seed, "data_seed": data_seed}}))
    texts = [cause.text for cause in judge(runs[0], other_loss(runs[1], 1)).causes]
    assert [text for text in texts if text.startswith("data_seed")] == told
    assert (texts[0] == "seed 42 vs 43") == (seeds == (42, 43))


def test_equal_values_are_identical_whatever_differs_beside_them(judge: Judge) -> None:
    """The verdict is about values; other locks, devices and versions are listed beside it."""
    right = Run(
        lock=lock_body(wheels=[wheel("torch", "2.12.0"), wheel("trl", "1.14.2")]),
        device={"threads": 2, "cpu": {"vendor": "AuthenticAMD", "family": 25, "model_name": "Ryzen", "isa": "AVX512", "cores": 2}},
    )  # fmt: skip
    verdict = judge(Run(), right)
    assert verdict.text().splitlines() == [
        "IDENTICAL: 5 steps, 2 weight tensors",
        "  note: differs: torch 2.13.0 vs 2.12.0",
        "  note: differs: threads 1 vs 2",
        "  note: differs: device cpu.model_name EPYC vs Ryzen",
    ]
    assert verdict.causes == ()


def test_another_seed_is_the_first_cause(judge: Judge) -> None:
    """The first step and quantity are named with both values, their distance and the seeds."""
    lock = lock_body()
    lock["recipe"] = lock["recipe"] | {"seed": 43}
    verdict = judge(Run(), other_loss(Run(lock=lock), 3, 2.625000238418579))
    assert verdict.text() == (
        "DIFFERENT: first at step 3, loss 0x1.5000000000000p+1 (2.625) vs 0x1.5000020000000p+1 (2.625), 1 ulp;"
        " likely cause: seed 42 vs 43"
    )
    assert verdict.exit_code == 8
    assert verdict.as_json()["first_difference"] == {
        "step": 3,
        "field": "loss",
        "left": "0x1.5000000000000p+1",
        "right": "0x1.5000020000000p+1",
        "ulps": 1,
        "rank": 0,
        "name": None,
    }
    assert verdict.as_json()["causes"] == [
        {"kind": "seed", "name": "seed", "left": "42", "right": "43", "text": "seed 42 vs 43"}
    ]


def test_another_data_row_is_found_at_the_step_that_saw_it(judge: Judge) -> None:
    """The batch is named before the loss that it changed; the data file is the cause, then the order."""
    other = b'{"messages": [1]}\n'
    dataset = lock_body()["datasets"][0] | {"tree": {"path": "data", "files": [file("chats.jsonl", other)]}}
    right = other_loss(Run(lock=lock_body(datasets=[dataset])), 2, batch_sha256=sha256("other"))
    verdict = judge(Run(), right)
    assert verdict.text().splitlines() == [
        (
            f"DIFFERENT: first at step 2, batch_sha256 {sha256('batch 2')[:12]}… vs {sha256('other')[:12]}…;"
            f" likely cause: dataset 0 chats.jsonl sha256 {sha256(DATA)[:12]}… vs sha256 {sha256(other)[:12]}…"
        ),
        "  also differs: other data from step 2 on",
    ]
    assert [cause.kind for cause in verdict.causes] == ["dataset", "data_order"]


def test_data_that_comes_later_is_no_cause_of_an_earlier_loss(judge: Judge) -> None:
    """Where the loss differs before any batch does, what computes is asked first."""
    dataset = lock_body()["datasets"][0] | {"tree": {"path": "data", "files": [file("chats.jsonl", b"x")]}}
    lock = lock_body(datasets=[dataset], kernels=[kernel("b" * 40)])
    right = other_loss(Run(lock=lock), 1)
    right.change_step(4, batch_sha256=sha256("other"))
    assert [cause.kind for cause in judge(Run(), right).causes] == ["kernel", "data_order", "dataset"]


def test_another_kernel_is_named_by_commit(judge: Judge) -> None:
    """Repository, both commits and the variant."""
    verdict = judge(Run(), other_loss(Run(lock=lock_body(kernels=[kernel("b" * 40)])), 1))
    assert verdict.causes[0].text == (
        f"attention kernel {KERNEL} aaaaaaaaaaaa (torch-universal) vs bbbbbbbbbbbb (torch-universal)"
    )


def test_no_kernel_against_one_is_named(judge: Judge) -> None:
    """A kernel on one side only is absent on the other."""
    verdict = judge(Run(), other_loss(Run(lock=lock_body(kernels=[])), 1))
    assert verdict.causes[0].text == f"attention kernel {KERNEL} aaaaaaaaaaaa (torch-universal) vs absent"


def test_another_package_is_named_by_version(judge: Judge) -> None:
    """Package by package; one that is the same is not named."""
    right = Run(lock=lock_body(wheels=[wheel("torch", "2.12.0"), wheel("trl", "1.14.2"), wheel("peft", "0.21.2")]))
    texts = [cause.text for cause in judge(Run(), other_loss(right, 1)).causes]
    assert texts == ["peft absent vs 0.21.2", "torch 2.13.0 vs 2.12.0"]


def test_one_version_with_other_bytes_is_named_by_digest(judge: Judge) -> None:
    """A rebuilt wheel of the same version is another wheel."""
    right = Run(lock=lock_body(wheels=[wheel("torch", "2.13.0", b"other"), wheel("trl", "1.14.2")]))
    (cause,) = judge(Run(), other_loss(right, 1)).causes
    assert cause.text == (
        f"torch 2.13.0 (locked wheel {sha256('torch 2.13.0')[:12]}…) vs 2.13.0 (locked wheel {sha256('other')[:12]}…)"
    )


@pytest.mark.parametrize(
    ("right", "text"),
    [
        (Run(device={"threads": 4}), "threads 1 vs 4"),
        (Run(device={"name": "NVIDIA H200"}), "device name cpu vs NVIDIA H200"),
        (Run(manifest={"driver": "570.1"}), "driver absent vs 570.1"),
        (Run(environment={"variables": {"OMP_NUM_THREADS": "2"}}), "OMP_NUM_THREADS 1 vs 2"),
        (Run(manifest={"arguments": {"learning_rate": 2e-5}}), "learning_rate 1e-05 vs 2e-05"),
        (Run(manifest={"build": {"torch": "2.13.0", "config": "PyTorch built with: GCC"}}), "build torch 2.13.0+cpu vs 2.13.0"),
        (Run(manifest={"launch": {"world_size": 2}}, calls={"0": 20, "1": 20}), "launch world_size 1 vs 2"),
        (Run(manifest={"engine": "local"}), "engine docker vs local"),
        (Run(manifest={"image": {"config_digest": "sha256:" + "0" * 64}}), "image config_digest"),
        (Run(lock=lock_body(model=lock_body()["model"] | {"config": {"model_type": "qwen3", "hidden_size": 32}})), "model config hidden_size 64 vs 32"),
        (Run(lock=lock_body(kitbuild={"version": "0.2.0", "guest_sha256": sha256(b""), "layout": 1})), "kitbuild version 0.1.0 vs 0.2.0"),
        (Run(lock=lock_body(recipe={**lock_body()["recipe"], "batch": {"global": 8}})), "batch absent vs {'global': 8}"),
    ],
)  # fmt: skip
def test_each_kind_of_cause_is_named(judge: Judge, right: Run, text: str) -> None:
    """Threads, device, driver, variables, arguments, build, launch, engine, image, model, kitbuild, recipe."""
    assert judge(Run(), other_loss(right, 1)).causes[0].text.startswith(text)


def test_a_difference_without_a_cause_says_so(judge: Judge) -> None:
    """Where the manifests agree, no cause is made up."""
    verdict = judge(Run(), other_loss(Run(), 5, 1.0))
    assert verdict.text().splitlines()[0].endswith("; the manifests name no cause")
    assert verdict.causes == ()


PROMISED = "equal bits were promised here: test the memory of both machines, then report it"
ELSEWHERE = (
    "equal bits are not promised on another device model or with other threads; --tolerance holds a run to a band"
)


@pytest.mark.parametrize(
    ("right", "notes"),
    [
        (Run(), (PROMISED,)),
        (Run(device={"name": "NVIDIA H200"}), (ELSEWHERE,)),
        (Run(device={"threads": 2}), (ELSEWHERE,)),
        (Run(manifest={"driver": "570.1"}), ()),
        (Run(environment={"locked": False}), ("right: the environment was recorded, not locked",)),
    ],
    ids=["nothing", "device", "threads", "driver", "not locked"],
)
def test_a_difference_says_whether_equal_bits_were_promised(judge: Judge, right: Run, notes: tuple[str, ...]) -> None:
    """Where nothing differs that could decide a value, a machine is to blame, or we are."""
    assert judge(Run(), other_loss(right, 5, 1.0)).notes == notes


@pytest.mark.parametrize(("field", "value"), [("grad_norm", "nan"), ("learning_rate", (2e-5).hex())])
def test_every_value_of_a_step_counts(judge: Judge, field: str, value: str) -> None:
    """Gradient norm and learning rate alone make runs different."""
    right = Run()
    right.change_step(4, **{field: value})
    first = judge(Run(), right).first_difference
    assert first is not None
    assert (first.step, first.field, first.right) == (4, field, value)


def test_equal_nan_is_equal(judge: Judge) -> None:
    """Equality is equality of what was written, so NaN equals NaN."""
    runs = [other_loss(Run(), 5, float("nan")) for _ in range(2)]
    assert judge(runs[0], runs[1]).verdict == "IDENTICAL"


def test_the_sign_of_zero_is_a_difference(judge: Judge) -> None:
    """Bits differ although the numbers are equal."""
    verdict = judge(other_loss(Run(), 5, 0.0), other_loss(Run(), 5, -0.0))
    assert verdict.first_difference is not None
    assert (verdict.verdict, verdict.first_difference.ulps) == ("DIFFERENT", 0)


def test_another_weight_is_named_by_its_tensor(judge: Judge) -> None:
    """Equal steps and another tensor: the tensor's name and both digests."""
    weights = Run().weights | {"norm.weight": ("BF16", [4], b"\3" * 8)}
    verdict = judge(Run(), Run(weights=weights), weights=True)
    first = verdict.first_difference
    assert first is not None
    assert (first.step, first.field, first.name) == (None, "weights", "norm.weight")
    assert verdict.text().startswith("DIFFERENT: first after training, weights norm.weight ")


def test_a_locked_kernel_that_one_side_did_not_use_is_a_difference(judge: Judge) -> None:
    """With all numbers equal, a kernel that was not called is what differs."""
    verdict = judge(Run(), Run(calls={"0": 0}))
    assert verdict.text() == (
        f"DIFFERENT: first after training, kernels {KERNEL} as locked vs not used;"
        f" likely cause: use of {KERNEL} as locked vs not used"
    )


def test_a_kernel_that_neither_side_used_leaves_nothing_to_compare(judge: Judge) -> None:
    """Neither run is the locked one."""
    verdict = judge(Run(calls={}), Run(calls={"0": 0}))
    assert verdict.text() == (
        f"NOT_COMPARABLE: neither run is the locked one: {KERNEL}: locked aaaaaaaaaaaa (torch-universal), not used"
    )
    assert verdict.exit_code == 9


def test_a_rank_that_did_not_call_the_kernel_did_not_use_it(judge: Judge) -> None:
    """Used means used on every rank."""
    assert judge(Run(), Run(calls={"0": 5, "1": 0})).verdict == "DIFFERENT"


def test_another_number_of_steps_is_not_comparable(judge: Judge) -> None:
    """Both counts are given, and what differs in the settings beside them."""
    right = Run(steps=[metrics_line(step) for step in range(1, 5)], manifest={"arguments": {"max_steps": 4}})
    verdict = judge(Run(), right)
    assert verdict.text() == "NOT_COMPARABLE: 5 steps vs 4 steps"
    assert verdict.exit_code == 9
    assert verdict.causes[0].name == "learning_rate" or verdict.causes[0].name == "max_steps"


def test_a_missing_step_is_not_comparable(judge: Judge) -> None:
    """A gap means that the archive does not verify."""
    right = Run(steps=[metrics_line(step) for step in (1, 2, 4, 5, 6)])
    text = judge(Run(), right).text()
    assert text.startswith("NOT_COMPARABLE: right does not verify: ")
    assert text.endswith("metrics.jsonl:3: step 4 where step 3 was due")


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (Run(exit={"exit_code": 6, "message": "out of memory"}, manifest={"complete": False}), "right is unfinished: exit code 6 (out of memory), 5 steps are recorded"),
        (Run(exit={"exit_code": 10}, manifest={"complete": False}), "right is unfinished: exit code 10, 5 steps are recorded"),
        (Run(exit=None), "right is unfinished: it has no exit.json, 5 steps are recorded"),
        (Run(manifest={"complete": False}), "right is unfinished: its manifest is not complete, 5 steps are recorded"),
    ],
)  # fmt: skip
def test_an_unfinished_run_is_not_comparable(judge: Judge, run: Run, text: str) -> None:
    """How it ended and how far it came."""
    verdict = judge(Run(), run)
    assert verdict.text() == f"NOT_COMPARABLE: {text}"
    assert verdict.exit_code == 9


def test_a_killed_run_is_not_comparable(tmp_path: Path) -> None:
    """Without manifest, with a line cut off: unfinished on that side, and the cut is noted."""
    left = Run().write(tmp_path / "left")
    right = Run(exit=None).write(tmp_path / "right")
    (right / "manifest.json").unlink()
    with (right / "metrics.jsonl").open("a") as stream:
        stream.write('{"st')
    assert compare(Archive.read(left), Archive.read(right)).text().splitlines() == [
        "NOT_COMPARABLE: right is unfinished: it has no exit.json, 5 steps are recorded",
        "  note: right: the last line of metrics is cut off",
    ]


def test_a_tampered_run_is_not_comparable(tmp_path: Path) -> None:
    """A loss that was edited afterwards is caught by what the manifest says of it, and weights by their digests."""
    left = Run().write(tmp_path / "left")
    right = Run().write(tmp_path / "right")
    lines = (right / "metrics.jsonl").read_text().splitlines()
    lines[0] = json.dumps(metrics_line(1, loss=(1.0).hex()))
    (right / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (left / "model" / "model.safetensors").write_bytes(b"")
    verdict = compare(Archive.read(left, weights=True), Archive.read(right))
    assert verdict.verdict == "NOT_COMPARABLE"
    assert [reason.partition(":")[0] for reason in verdict.reasons] == ["left does not verify", "right does not verify"]
    assert "results.loss_first" in verdict.reasons[1]
    assert verdict.text().count("reason: ") == 1


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ({"embed.weight": ("F32", [2, 2], b"\1" * 16)}, "2 vs 1 weight tensors, 1 without a counterpart: norm.weight"),
        ({"embed.weight": ("F32", [4], b"\1" * 16), "norm.weight": ("BF16", [4], b"\2" * 8)}, "weight embed.weight is F32 [2, 2] vs F32 [4]"),
        ({"embed.weight": ("F32", [2, 2], b"\1" * 16), "norm.weight": ("F16", [4], b"\2" * 8)}, "weight norm.weight is BF16 [4] vs F16 [4]"),
    ],
)  # fmt: skip
def test_other_tensors_are_not_comparable(
    judge: Judge, weights: dict[str, tuple[str, list[int], bytes]], text: str
) -> None:
    """Another name, shape or type of a tensor is another model."""
    assert judge(Run(), Run(weights=weights)).text() == f"NOT_COMPARABLE: {text}"


def test_an_environment_that_was_not_locked_is_said(judge: Judge) -> None:
    """Every verdict says it, IDENTICAL too, and names the side."""
    verdict = judge(Run(), Run(environment={"locked": False}))
    assert verdict.notes == (
        "right: the environment was recorded, not locked",
        "differs: environment locked true vs false",
    )


def test_record_mode_promises_no_bits(judge: Judge) -> None:
    """The note says why a difference is no broken promise."""
    lock = lock_body(recipe=lock_body()["recipe"] | {"determinism": {"mode": "record"}})
    verdict = judge(Run(lock=lock), other_loss(Run(lock=lock), 1))
    assert verdict.notes == (
        "left: determinism is `record`, equal bits are not promised",
        "right: determinism is `record`, equal bits are not promised",
    )


def test_an_archive_against_itself_is_said(tmp_path: Path) -> None:
    """IDENTICAL to itself proves nothing."""
    archive = Archive.read(Run().write(tmp_path / "run"))
    assert compare(archive, archive).text().splitlines()[1] == "  note: both sides are the same archive"


def test_many_causes_are_cut_on_the_screen(judge: Judge) -> None:
    """The likeliest three are shown and the rest counted; the JSON has all."""
    variables = {"PYTHONHASHSEED": "1"}
    right = Run(
        device={"threads": 2, "name": "other"}, environment={"variables": variables}, manifest={"engine": "local"}
    )
    verdict = judge(Run(), other_loss(right, 1))
    assert len(verdict.as_json()["causes"]) == 4
    assert verdict.text().splitlines()[1:] == [
        "  also differs: PYTHONHASHSEED absent vs 1",
        "  also differs: device name cpu vs other",
        "  and 1 more (--json lists them)",
        f"  note: {ELSEWHERE}",
    ]


def near(run: Run) -> Run:
    """Each loss and gradient norm a little off, and other weights."""
    for line in run.steps:
        line["loss"] = (float.fromhex(line["loss"]) * 1.0001).hex()
        line["grad_norm"] = (float.fromhex(line["grad_norm"]) * 1.01).hex()
    run.weights = run.weights | {"norm.weight": ("BF16", [4], b"\3" * 8)}
    return run


def test_within_a_tolerance_says_how_near_and_what_was_not_held(judge: Judge) -> None:
    """Exit 0; the bound, the largest difference, and what the bound does not speak of."""
    verdict = judge(Run(), near(Run(device={"name": "other"})), "loss=1e-3")
    assert verdict.text() == (
        "WITHIN_TOLERANCE: 5 steps, 2 weight tensors; loss within 0.001 (at most 0.0001); not held: grad_norm, weights"
    )
    assert verdict.exit_code == 0
    assert verdict.first_difference is not None
    assert verdict.causes[0].text == "device name cpu vs other"


def test_without_a_tolerance_near_is_different(judge: Judge) -> None:
    """WITHIN_TOLERANCE is only for who asked."""
    assert judge(Run(), near(Run())).verdict == "DIFFERENT"


@pytest.mark.parametrize(("tolerance", "field"), [("loss=1e-6", "loss"), ("loss=1e-3,grad_norm=1e-3", "grad_norm")])
def test_beyond_a_tolerance_is_different(judge: Judge, tolerance: str, field: str) -> None:
    """The first value beyond is named, not the first that is unequal."""
    verdict = judge(Run(), near(Run()), tolerance)
    assert verdict.first_difference is not None
    assert (verdict.verdict, verdict.first_difference.field) == ("DIFFERENT", field)
    assert verdict.notes[-1] == f"beyond the tolerance ({Tolerance.parse(tolerance)})"


@pytest.mark.parametrize("change", [{"batch_sha256": sha256("other")}, {"learning_rate": (1.1e-5).hex()}])
def test_a_tolerance_forgives_no_other_input(judge: Judge, change: dict[str, str]) -> None:
    """Near losses of other data or another schedule are not the same run."""
    right = near(Run())
    right.change_step(2, **change)
    verdict = judge(Run(), right, "loss=1e-2")
    assert verdict.first_difference is not None
    assert (verdict.verdict, verdict.first_difference.field) == ("DIFFERENT", next(iter(change)))


def test_a_tolerance_never_covers_a_number_that_is_none(judge: Judge) -> None:
    """A run that went to NaN is not near."""
    assert judge(Run(), other_loss(Run(), 5, float("nan")), "1e-1").verdict == "DIFFERENT"


def test_identical_stays_identical_under_a_tolerance(judge: Judge) -> None:
    """A tolerance weakens no verdict."""
    assert judge(Run(), Run(), "loss=1e-3").verdict == "IDENTICAL"
