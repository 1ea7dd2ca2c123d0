"""What decides bits is decided by the lock: hand-set variables, user files, caches and cores change none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.guest.conftest import Run
from tests.guest.root import recipe

if TYPE_CHECKING:
    from tests.guest.conftest import Guest

pytestmark = pytest.mark.train
REPOSITORY = Path(__file__).parents[2]
PLAIN: dict[str, Any] = {"kernels": {"attention": "sdpa", "layers": {}}}
TRAIN: dict[str, Any] = {"max_length": 128, "learning_rate": 1e-3, "max_steps": 4}
HAND_SET = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "DNNL_DEFAULT_FPMATH_MODE": "BF16",
    "OMP_NUM_THREADS": "2",
    "OPENBLAS_CORETYPE": "Prescott",
    "NPY_DISABLE_CPU_FEATURES": "AVX2",
    "ACCELERATE_MIXED_PRECISION": "fp16",
    "TORCHDYNAMO_DISABLE": "1",
}
ACCELERATE = "compute_environment: LOCAL_MACHINE\nmixed_precision: fp16\nnum_processes: 3\ndynamo_config: {dynamo_backend: INDUCTOR}\n"


def process(guest: Guest, train_python: str, **variables: str) -> Run:
    """A whole `kit train`, in a Python of its own that imports the libraries after the guest's first line."""
    guest.count += 1
    out, log = guest.folder / f"out-{guest.count}", guest.folder / f"terminal-{guest.count}"
    environ = {
        **guest.root.environ,
        "KIT_OUT": str(out),
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONDONTWRITEBYTECODE": "1",
        **variables,
    }
    with log.open("w") as stream:
        command = [train_python, "-m", "kitbuild.guest", "train"]
        done = subprocess.Popen(command, env=environ, stdout=stream, stderr=stream, text=True)
        return Run(out=out, process=done, rc=done.wait(timeout=300), terminal=log.read_text())


@pytest.fixture(scope="module")
def facts(train_python: str, zygote: Guest) -> dict[str, Run]:
    """The same lock trained plainly, with everything set by hand, and portable."""
    zygote.build(**PLAIN)
    plain = zygote.run()
    shutil.rmtree(zygote.root.cache)
    home = zygote.folder / "home"
    (home / "accelerate").mkdir(parents=True, exist_ok=True)
    (home / "accelerate/default_config.yaml").write_text(ACCELERATE)
    hand_set = process(zygote, train_python, **HAND_SET, HF_HOME=str(home), ACCELERATE_CONFIG_FILE=str(home))
    zygote.build(**PLAIN, determinism={"mode": "strict", "cpu_portable": True})
    portable = process(zygote, train_python)
    again = zygote.run()
    return {"plain": plain, "hand-set": hand_set, "portable": portable, "portable again": again}


def test_variables_set_by_hand_change_nothing(facts: dict[str, Run]) -> None:
    """Instruction sets, precision, threads and a launcher's choices, set by hand: the same bits, told and recorded."""
    run = facts["hand-set"]
    assert run.rc == 0, run.terminal
    assert (facts["plain"].values, facts["plain"].weights) == (run.values, run.weights)
    told = run.manifest["determinism"]["overridden"]
    assert HAND_SET.items() <= told.items()
    assert told.keys() - HAND_SET.keys() == {"HF_HOME", "ACCELERATE_CONFIG_FILE"}
    assert "kit: MKL_CBWR=COMPATIBLE is set here and has no effect" in run.terminal
    assert facts["plain"].manifest["determinism"]["overridden"] == {}


def test_a_users_accelerate_file_is_not_read(facts: dict[str, Run]) -> None:
    """accelerate's default file in the user's HF_HOME asks for fp16 and three processes: none of it happens."""
    run = facts["hand-set"]
    assert run.manifest["launch"]["proven"][0]["distributed_type"] == "NO"
    assert run.manifest["launch"]["world_size"] == 1
    assert run.manifest["environment"]["variables"]["HF_HOME"] != str(run.out.parent / "home")


def test_portable_bits_are_asserted(facts: dict[str, Run]) -> None:
    """cpu_portable: what ATen, oneMKL, oneDNN and NNPACK say of themselves is what is promised, in the archive too."""
    run = facts["portable"]
    assert run.rc == 0, run.terminal
    settings = run.manifest["determinism"]["settings"]
    promised = {"torch.cpu_capability": "AVX2", "mkl.cbwr": "compatible", "torch.mkldnn": False, "torch.nnpack": False}
    assert promised.items() <= settings.items()
    assert facts["plain"].manifest["determinism"]["settings"]["mkl.cbwr"] != "compatible"
    again = facts["portable again"]
    assert (run.values, run.weights) == (again.values, again.weights)


def test_portable_bits_are_other_bits(facts: dict[str, Run]) -> None:
    """cpu_portable really computes otherwise: the losses agree but for rounding, and the bits do not."""
    plain, portable = facts["plain"], facts["portable"]
    assert plain.values != portable.values
    for left, right in zip(plain.metrics, portable.metrics, strict=True):
        assert float.fromhex(left["loss"]) == pytest.approx(float.fromhex(right["loss"]), rel=1e-4)


def test_portable_is_refused_where_it_cannot_be(guest: Guest) -> None:
    """Where ATen does not take AVX2 the run ends with exit 6 before a step, naming the setting and the reason."""
    guest.build(**PLAIN, determinism={"mode": "strict", "cpu_portable": True})
    run = guest.run(cpu_capability="DEFAULT")
    assert (run.rc, run.metrics) == (6, [])
    assert "torch.cpu_capability is 'DEFAULT', not 'AVX2'" in run.exit["message"]
    assert run.exit["hint"] == "cpu_portable needs an x86-64 processor with AVX2"


@pytest.mark.parametrize("packing", [pytest.param(False, marks=pytest.mark.slow_extra), True], ids=["rows", "packed"])
def test_fingerprint_is_of_the_lock_alone(guest: Guest, packing: bool) -> None:  # noqa: FBT001 - a case
    """The digest of each batch is the same with an empty cache, a kept one, one core, data workers, and a resume."""
    train = {**TRAIN, "packing": packing, "max_length": 256}
    guest.build(**PLAIN, train=train)
    first, kept = guest.run(), guest.run()
    shutil.rmtree(guest.root.cache)
    empty, one_core = guest.run(), guest.run(cores=1)
    stopped = guest.run(terminate_after=2)
    resumed = guest.run(out=stopped.out, environ={"KIT_RESUME": "1"})
    guest.build(**PLAIN, train={**train, "dataloader_num_workers": 2})
    workers = guest.run()
    digests = [line["batch_sha256"] for line in first.metrics]
    assert len(set(digests)) == 4
    for run in (kept, empty, one_core, resumed, workers):
        assert run.rc == 0, run.terminal
        assert digests == [line["batch_sha256"] for line in run.metrics]
        assert first.manifest["data"] == run.manifest["data"]


def test_fingerprint_is_by_global_micro_batch(guest: Guest) -> None:
    """Two processes with half the accumulation have the digests of one."""
    guest.build(**PLAIN, train=TRAIN)
    one = guest.run()
    guest.build(**PLAIN, train=TRAIN, launch={"processes_per_node": 2})
    assert one.manifest["data"] == guest.run().manifest["data"]


@pytest.mark.parametrize("change", [pytest.param("row", marks=pytest.mark.slow_extra), "label", "seed"])
def test_fingerprint_sees_each_change(guest: Guest, change: str) -> None:
    """Another seed, masked labels, or a shorter row is another fingerprint."""
    guest.build(**PLAIN, train=TRAIN)
    first = guest.run().manifest["data"]["fingerprint"]
    changes: dict[str, Any] = {"row": {"train": {**TRAIN, "max_length": 16}}, "seed": {"seed": 8}}
    changes["label"] = {
        "train": {**TRAIN, "assistant_only_loss": True},
        "model": {**recipe()["model"], "chat_template": "generation.jinja"},
    }
    guest.build(**{**PLAIN, "train": TRAIN, **changes[change]})
    run = guest.run()
    assert run.rc == 0, run.terminal
    assert first != run.manifest["data"]["fingerprint"]


def test_record_says_what_it_does_not_promise(guest: Guest) -> None:
    """`determinism: record` is in the archive with what is not guaranteed, each with its reason; strict has none."""
    guest.build(**PLAIN, train=TRAIN, determinism="record")
    run = guest.run(environ={"MKL_CBWR": "AVX2"})
    assert run.rc == 0, run.terminal
    found = run.manifest["determinism"]
    assert (found["mode"], found["overridden"]) == ("record", {})
    assert found["not_guaranteed"][0] == {
        "what": "losses, gradient norms, weights",
        "why": "determinism: record asks for no deterministic algorithms",
    }
    assert {"what": "MKL_*", "why": "passed on: the instructions, branches and stripes of oneMKL"} in found[
        "not_guaranteed"
    ]
    assert run.manifest["environment"]["variables"]["MKL_CBWR"] == "AVX2"
    guest.build(**PLAIN, train=TRAIN)
    strict = guest.run().manifest["determinism"]
    assert (strict["mode"], strict["not_guaranteed"]) == ("strict", [])
    assert json.dumps(strict["settings"]["torch.deterministic_algorithms"]) == "true"
