"""Two runs that differ by one cause get that cause first, with all that follows from it behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kitbuild.archive import Archive
from kitbuild.compare import Verdict, compare
from tests.archive.factory import KERNEL, Run, file, kernel, lock_body, sha256, wheel

if TYPE_CHECKING:
    from pathlib import Path


def other(run: Run, step: int = 1, **changes: Any) -> Run:
    """The run parts at a step."""
    run.change_step(step, **({"loss": (2.6).hex()} | changes))
    return run


def judge(left: Run, right: Run, folder: Path) -> Verdict:
    return compare(Archive.read(left.write(folder / "left")), Archive.read(right.write(folder / "right")))


def arguments(**values: tuple[Any, str]) -> dict[str, Any]:
    """A lock's defaults with arguments and where each comes from."""
    given = {name: {"value": value, "origin": origin} for name, (value, origin) in values.items()}
    defaults = lock_body()["defaults"]
    return {**defaults, "arguments": defaults["arguments"] | given}


def lock_with(**changes: Any) -> dict[str, Any]:
    """A lock whose `recipe` and `launch` are merged, the rest replaced."""
    body = lock_body()
    for name in ("recipe", "launch"):
        changes[name] = body[name] | changes.pop(name, {})
    return body | changes


def package() -> tuple[Run, Run]:
    """A newer trainer brings a new default with it."""
    newer = lock_with(
        wheels=[wheel("torch", "2.13.0"), wheel("trl", "1.15.0")],
        defaults=arguments(packing_strategy=("bfd", "library")) | {"declared": {"trl.SFTConfig": {"max_grad_norm": 2.0}}},
    )  # fmt: skip
    return Run(), other(Run(lock=newer))


def kernel_commit() -> tuple[Run, Run]:
    """Another commit on the same branch."""
    return Run(), other(Run(lock=lock_with(kernels=[kernel("b" * 40)])))


def kernel_variant() -> tuple[Run, Run]:
    """The same commit, built for another torch."""
    return Run(), other(Run(lock=lock_with(kernels=[kernel() | {"variant": "torch-stable-abi"}])))


def device() -> tuple[Run, Run]:
    """Another GPU, in another host with another processor and more memory."""
    gpu = {"kind": "cuda", "name": "NVIDIA H200", "compute_capability": "9.0", "sm_count": 132, "memory_bytes": 1}
    smaller = gpu | {"name": "NVIDIA A100", "compute_capability": "8.0", "sm_count": 108, "memory_bytes": 2}
    smaller["cpu"] = Run().body()["device"]["cpu"] | {"family": 6, "vendor": "GenuineIntel", "cores": 64}
    return Run(device=gpu), other(Run(device=smaller))


def driver() -> tuple[Run, Run]:
    """The same GPU under another driver."""
    return Run(manifest={"driver": "570.86.10"}), other(Run(manifest={"driver": "580.95.05"}), 2)


def isa() -> tuple[Run, Run]:
    """A processor without AVX-512; the library's own text says so too."""
    cpu = Run().body()["device"]["cpu"] | {"isa": "AVX2", "model_name": "EPYC 7", "cores": 64}
    build = Run().body()["build"] | {"config": "PyTorch built with: GCC, CPU capability usage: AVX2"}
    return Run(), other(Run(device={"cpu": cpu}, manifest={"build": build}))


def isa_by_variable() -> tuple[Run, Run]:
    """The same processor, held to fewer instructions by a variable."""
    cpu = Run().body()["device"]["cpu"] | {"isa": "AVX2"}
    variables = {"OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "avx2"}
    return Run(), other(Run(device={"cpu": cpu}, environment={"variables": variables}))


def threads() -> tuple[Run, Run]:
    """More threads in the recipe: the variables and what the library took follow."""
    lock = lock_with(launch={"threads_per_process": 4}, recipe={"launch": {"threads_per_process": 4}})
    return Run(), other(Run(lock=lock, device={"threads": 4}, environment={"variables": {"OMP_NUM_THREADS": "4"}}))


def threads_found() -> tuple[Run, Run]:
    """The same lock, and fewer threads than it says: the machine had no more."""
    return Run(device={"threads": 4}), other(Run(device={"threads": 2}))


def data_order() -> tuple[Run, Run]:
    """The same files in another order: nothing in the manifests tells."""
    return Run(), other(Run(), 2, batch_sha256=sha256("other"))


def dataset_commit() -> tuple[Run, Run]:
    """The dataset's branch moved."""
    sets = []
    for commit, data in (("a" * 40, b"1"), ("b" * 40, b"2")):
        tree = {"repo": "org/data", "revision": "main", "commit": commit, "files": [file("train.jsonl", data)]}
        sets.append(lock_with(datasets=[lock_body()["datasets"][0] | {"tree": tree}]))
    return Run(lock=sets[0]), other(Run(lock=sets[1]), 3, batch_sha256=sha256("other"))


def variable() -> tuple[Run, Run]:
    """A preloaded library."""
    return Run(), other(Run(environment={"variables": {"OMP_NUM_THREADS": "1", "LD_PRELOAD": "/x.so"}}))


def seed() -> tuple[Run, Run]:
    """Another seed: other first weights, another order, other derived seeds."""
    lock = lock_with(recipe={"seed": 43}, defaults=arguments(data_seed=(43, "kitbuild"), seed=(43, "kitbuild")))
    right = Run(lock=lock, manifest={"arguments": {"learning_rate": 1e-5, "data_seed": 43, "seed": 43}})
    left = Run(lock=lock_with(defaults=arguments(data_seed=(42, "kitbuild"), seed=(42, "kitbuild"))))
    return left, other(right, 1, batch_sha256=sha256("other"))


def base_image() -> tuple[Run, Run]:
    """A newer base with another C library and Python."""
    base = lock_body()["base"] | {
        "manifest_digest": "sha256:" + sha256("newer"), "python": "3.11.9", "glibc": "2.41",
        "packages": [{"name": "libc6", "version": "2.41", "architecture": "amd64", "sha256": None}],
    }  # fmt: skip
    return Run(), other(Run(lock=lock_with(base=base), environment={"python": "3.11.9"}))


def library_default() -> tuple[Run, Run]:
    """A default that is declared otherwise, and so in force."""
    declared = {"trl.SFTConfig": {"max_grad_norm": 1.0, "loss_type": "nll"}}
    sides = (arguments(loss_type=("nll", "library")) | {"declared": declared},
             arguments(loss_type=("chunked_nll", "library")) | {"declared": {"trl.SFTConfig": {**declared["trl.SFTConfig"], "loss_type": "chunked_nll"}}})  # fmt: skip
    left, right = (Run(lock=lock_with(defaults=defaults)) for defaults in sides)
    return left, other(right)


def determinism_mode() -> tuple[Run, Run]:
    """Recorded, not strict: the variables of strict mode are absent."""
    lock = lock_with(recipe={"determinism": {"mode": "record"}})
    strict = {"OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
    return Run(environment={"variables": strict}), other(Run(lock=lock), 2)


def resume() -> tuple[Run, Run]:
    """Stopped and taken up again, on a host with another engine."""
    return Run(), other(Run(manifest={"resumed": [3], "engine": "local"}, device={"cpu": {"model_name": "other"}}), 4)


def world_size() -> tuple[Run, Run]:
    """Two processes instead of one: half the accumulation each, another back end."""
    lock = lock_with(
        recipe={"launch": {"processes_per_node": 2}},
        launch={"processes_per_node": 2, "accumulation": 1, "backend": "gloo", "world_size": 2},
        defaults=arguments(gradient_accumulation_steps=(1, "kitbuild"), ddp_backend=("gloo", "kitbuild")),
    )
    alone = lock_with(
        launch={"accumulation": 2, "world_size": 1}, defaults=arguments(gradient_accumulation_steps=(2, "kitbuild"))
    )
    two = Run(
        lock=lock,
        calls={"0": 1, "1": 1},
        device={"count": 2},
        manifest={"launch": {"world_size": 2, "processes_per_node": 2}},
    )
    return Run(lock=alone), other(two)  # fmt: skip


def setting() -> tuple[Run, Run]:
    """A setting of the recipe."""
    sides = []
    for value in (0.0, 0.1):
        recipe = {"train": {"learning_rate": 1e-5, "attention_dropout": value}}
        sides.append(lock_with(recipe=recipe, defaults=arguments(attention_dropout=(value, "recipe"))))
    return Run(lock=sides[0]), other(Run(lock=sides[1]))


def base_model() -> tuple[Run, Run]:
    """The model's branch moved."""
    sides = []
    for commit, data in (("a" * 40, b"1"), ("b" * 40, b"2")):
        tree = {"repo": "org/model", "revision": "main", "commit": commit, "files": [file("model.safetensors", data)]}
        sides.append(lock_with(model=lock_body()["model"] | {"weights": tree, "config": None}))
    return Run(lock=sides[0]), other(Run(lock=sides[1]))


def library_flag() -> tuple[Run, Run]:
    """A flag that somebody's code left otherwise; threads and instructions are told by themselves."""
    flags = {"cudnn.benchmark": False, "torch.num_threads": 1}
    left = Run(manifest={"determinism": {"mode": "strict", "settings": flags}})
    return left, other(Run(manifest={"determinism": {"mode": "strict", "settings": flags | {"cudnn.benchmark": True}}}))


def compiled_before() -> tuple[Run, Run]:
    """Compiled kernels that were there before the run."""
    return Run(), other(Run(manifest={"determinism": {"compiled_before": ["triton"], "settings": None}}))


def another_kitbuild() -> tuple[Run, Run]:
    """Another guest, and so another image."""
    lock = lock_with(kitbuild={"version": "0.2.0", "guest_sha256": sha256("g"), "layout": 1})
    return Run(), other(Run(lock=lock))


ALONE: dict[str, tuple[Any, str, str, str]] = {
    "package version": (package, "package", "trl", "trl 1.14.2 vs 1.15.0"),
    "kernel commit": (kernel_commit, "kernel", KERNEL, f"attention kernel {KERNEL} aaaaaaaaaaaa (torch-universal) vs bbbbbbbbbbbb (torch-universal)"),
    "kernel variant": (kernel_variant, "kernel", KERNEL, f"attention kernel {KERNEL} aaaaaaaaaaaa (torch-universal) vs aaaaaaaaaaaa (torch-stable-abi)"),
    "device": (device, "device", "name", "device name NVIDIA H200 vs NVIDIA A100"),
    "driver": (driver, "driver", "driver", "driver 570.86.10 vs 580.95.05"),
    "instructions": (isa, "device", "cpu.isa", "device cpu.isa AVX512 vs AVX2"),
    "instructions by variable": (isa_by_variable, "variable", "ATEN_CPU_CAPABILITY", "ATEN_CPU_CAPABILITY absent vs avx2"),
    "threads": (threads, "launch", "threads_per_process", "launch threads_per_process 1 vs 4"),
    "threads found": (threads_found, "threads", "threads", "threads 4 vs 2"),
    "data order": (data_order, "data_order", "batch_sha256", "other data from step 2 on"),
    "dataset commit": (dataset_commit, "dataset", "dataset 0", "dataset 0 org/data@aaaaaaaaaaaa vs org/data@bbbbbbbbbbbb"),
    "variable": (variable, "variable", "LD_PRELOAD", "LD_PRELOAD absent vs /x.so"),
    "library flag": (library_flag, "setting", "cudnn.benchmark", "setting cudnn.benchmark false vs true"),
    "compiled before": (compiled_before, "setting", "compiled_before", "setting compiled_before absent vs ['triton']"),
    "seed": (seed, "seed", "seed", "seed 42 vs 43"),
    "base image": (base_image, "base", "base", f"base kitbuild-base-cpu@{sha256('manifest')[:12]}… vs kitbuild-base-cpu@{sha256('newer')[:12]}…"),
    "library default": (library_default, "default", "loss_type", "loss_type nll vs chunked_nll"),
    "determinism": (determinism_mode, "determinism", "mode", "determinism mode strict vs record"),
    "resume": (resume, "resume", "resumed", "resumed never vs after step 3"),
    "world size": (world_size, "launch", "processes_per_node", "launch processes_per_node 1 vs 2"),
    "setting": (setting, "argument", "attention_dropout", "attention_dropout 0.0 vs 0.1"),
    "model commit": (base_model, "model", "model", "model org/model@aaaaaaaaaaaa vs org/model@bbbbbbbbbbbb"),
    "kitbuild": (another_kitbuild, "kitbuild", "guest_sha256", f"kitbuild guest_sha256 {sha256(b'')} vs {sha256('g')}"),
}  # fmt: skip


@pytest.mark.parametrize("name", ALONE)
def test_one_cause_comes_first(tmp_path: Path, name: str) -> None:
    """Named by kind, name and both values, whatever else follows from it."""
    pair, *expected = ALONE[name]
    left, right = pair()
    verdict = judge(left, right, tmp_path)
    assert verdict.verdict == "DIFFERENT"
    first = verdict.causes[0]
    assert [first.kind, first.name, first.text] == expected
    assert f"likely cause: {expected[2]}" in verdict.text()


@pytest.mark.parametrize(
    "name", ["threads", "seed", "kernel commit", "kernel variant", "setting", "variable", "driver"]
)
def test_nothing_else_is_blamed(tmp_path: Path, name: str) -> None:
    """Where one thing was changed, what follows from it is not told as a second one."""
    left, right = ALONE[name][0]()
    kinds = [cause.kind for cause in judge(left, right, tmp_path).causes]
    assert kinds in (kinds[:1], [kinds[0], "threads"], [kinds[0], "data_order"])


def test_threads_and_instructions_are_told_once(tmp_path: Path) -> None:
    """They are facts of the device; the flag that repeats them is not told."""
    flags = {"torch.num_threads": 1, "torch.cpu_capability": "AVX512", "cudnn.benchmark": False}
    left = Run(manifest={"determinism": {"settings": flags}})
    more = flags | {"torch.num_threads": 2, "torch.cpu_capability": "AVX2"}
    right = Run(manifest={"determinism": {"settings": more}}, device={"threads": 2})
    assert [cause.text for cause in judge(left, other(right), tmp_path).causes] == ["threads 1 vs 2"]


def two_causes(first: dict[str, Any], second: dict[str, Any]) -> tuple[Run, Run]:
    """A schedule's setting and a package, both otherwise."""
    rate = {"recipe": {"train": {"learning_rate": 1e-3}}, "defaults": arguments(learning_rate=(1e-3, "recipe"))}
    right = Run(lock=lock_with(wheels=[wheel("torch", "2.12.0"), wheel("trl", "1.14.2")], **rate),
                manifest={"arguments": {"learning_rate": 1e-3}})  # fmt: skip
    right.change_step(1, **first)
    right.change_step(2, **second)
    return Run(), right


@pytest.mark.parametrize(
    ("first", "second", "name"),
    [
        ({"loss": (9.0).hex()}, {}, "torch"),
        ({"grad_norm": (9.0).hex()}, {}, "torch"),
        ({}, {"loss": (9.0).hex()}, "learning_rate"),
        ({"learning_rate": (1e-3).hex()}, {}, "learning_rate"),
    ],
    ids=["loss of step 1", "gradients of step 1", "loss of step 2", "learning rate"],
)
def test_what_comes_before_the_first_update_is_no_update_s_fault(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], name: str
) -> None:
    """Of two causes, the one that can have had this effect comes first."""
    left, right = two_causes(first, second)
    assert judge(left, right, tmp_path).causes[0].name == name


@pytest.mark.parametrize(
    ("changes", "name"), [({"learning_rate": (1e-3).hex()}, "learning_rate"), ({"loss": (9.0).hex()}, KERNEL)]
)
def test_a_learning_rate_is_the_schedule_s(tmp_path: Path, changes: dict[str, Any], name: str) -> None:
    """No kernel makes another learning rate, and no schedule another loss of step 1."""
    lock = lock_with(kernels=[kernel("b" * 40)], defaults=arguments(learning_rate=(1e-3, "recipe")))
    right = Run(lock=lock, manifest={"arguments": {"learning_rate": 1e-3}})
    right.change_step(1, **changes)
    assert judge(Run(), right, tmp_path).causes[0].name == name


@pytest.mark.parametrize(("step", "kind"), [(4, "resume"), (2, "device")])
def test_a_resume_is_blamed_for_what_parts_after_it(tmp_path: Path, step: int, kind: str) -> None:
    """Stopped after step 3: a difference at step 2 was there before."""
    right = Run(manifest={"resumed": [3]}, device={"name": "other"})
    assert judge(Run(), other(right, step), tmp_path).causes[0].kind == kind


def test_what_decides_no_number_is_last(tmp_path: Path) -> None:
    """Policy, trackers, hardening, memory."""
    lock = lock_with(recipe={"policy": {"hardening": "require"}, "track": ["wandb"]})
    right = Run(lock=lock, device={"memory_bytes": 1}, environment={"hardening": {"user": 0}}, manifest={"driver": "1"})
    assert [cause.kind for cause in judge(Run(), other(right), tmp_path).causes] == [
        "driver", "beside", "beside", "hardening", "capacity",
    ]  # fmt: skip
