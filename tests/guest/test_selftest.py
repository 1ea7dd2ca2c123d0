"""The kernel self-test: right kernels pass in every shape, and each kind of broken one ends the run by name."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from kitbuild.errors import RecipeError
from kitbuild.guest.config import Config
from kitbuild.guest.selftest_attention import extra
from tests.guest.root import ATTENTION, LAYERS, recipe

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.guest.conftest import Guest
    from tests.guest.root import Root

pytestmark = pytest.mark.train
PLAIN: dict[str, Any] = {"kernels": {"attention": "sdpa", "layers": {}}}
TRAIN: dict[str, Any] = {"max_length": 128, "learning_rate": 1e-3, "max_steps": 1}
ADVICE = "pin another version of the kernel, or another kernel, and lock again"
HEADS = "4 heads on 2, width 16"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("broken_backward", "fails in flash_attn_func (full rows, {}): "),
        ("wrong_backward", "is wrong in flash_attn_func (full rows, {}): key gradient is off by "),
        ("nan_attention", "is wrong in flash_attn_func (full rows, {}): output is off by nan"),
        ("nan_backward", "is wrong in flash_attn_func (full rows, {}): value gradient is off by nan"),
        (
            "missing_op",
            "fails in flash_attn_func (full rows, {}): '_OpNamespace' '_flash_attn2_cpu_0123456' object has",
        ),
        ("missing_varlen", "has no flash_attn_varlen_func, which padded and packed rows need (it has flash_attn"),
        ("nondeterministic", "is not deterministic in flash_attn_func (full rows, {}): query gradient differs"),
        ("leaky_attention", "is wrong in flash_attn_varlen_func (padded rows, {}): output is off by "),
        (
            "leaky_backward",
            "is wrong in flash_attn_varlen_func (padded rows, {}): documents see each other: a gradient of document 1",
        ),
    ],
)
def test_broken_attention(guest: Guest, source: str, text: str) -> None:
    """Exit 6 before a step: repository, commit and variant, what is wrong in which shape, and what to do."""
    guest.build(attention=source)
    run = guest.run()
    assert (run.rc, run.metrics, (run.out / "model").exists()) == (6, [], False)
    started = f"kernel {ATTENTION} @ aaaaaaa, variant torch-cpu {text.format(HEADS)}"
    assert run.exit["message"][: len(started)] == started
    assert run.exit["hint"].startswith(ADVICE)
    assert f"error: kernel {ATTENTION} @ aaaaaaa" in run.terminal


@pytest.mark.parametrize("mode", ["strict", "record"])
def test_no_deterministic_backward(build: Callable[..., Root], mode: str) -> None:
    """On a GPU, strict asks for the deterministic backward, and refuses by name a kernel that cannot be asked."""
    config = Config.read(build(image={"cuda": "12.9"}, determinism=mode).environ)
    kernel = config.kernels[0]

    def able(deterministic: bool = False) -> None: ...  # noqa: FBT001, FBT002 - as kernels have it

    def unable() -> None: ...

    if mode == "record":
        assert extra(config, kernel, "flash_attn_func", unable) == {}
        return
    assert extra(config, kernel, "flash_attn_func", able) == {"deterministic": True}
    with pytest.raises(RecipeError) as caught:
        extra(config, kernel, "flash_attn_func", unable)
    assert f"{caught.value} ({caught.value.hint})" == (
        f"kernel {ATTENTION} @ aaaaaaa, variant torch-cpu: flash_attn_func offers no deterministic backward"
        " (another attention kernel, or determinism: record)"
    )


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("wrong_layer", "is wrong in LigerRMSNorm for Qwen3RMSNorm of 16: output is off by "),
        ("wrong_layer_backward", "is wrong in LigerRMSNorm for Qwen3RMSNorm of 16: gradient 1 is off by "),
        ("nondeterministic_layer", "is not deterministic in LigerRMSNorm for Qwen3RMSNorm of 16: gradient 2 differs"),
    ],
)
def test_broken_layer(guest: Guest, source: str, text: str) -> None:
    """A layer kernel that is not the layer which it replaces, or other bits each time, is named with its commit."""
    guest.build(layers=source)
    run = guest.run("selftest")
    assert run.rc == 6
    assert f"kernel {LAYERS} @ bbbbbbb, variant torch-cpu {text}" in run.terminal
    assert ADVICE in run.terminal


def test_record_takes_other_bits(guest: Guest) -> None:
    """Under record a kernel that is right within the tolerance trains, whatever its bits."""
    guest.build(attention="nondeterministic", determinism="record", train=TRAIN)
    run = guest.run()
    assert (run.rc, len(run.metrics)) == (0, 1), run.terminal
    assert {check.get("repeats") for check in run.manifest["selftest"]["checks"] if "repeats" in check} == {0}


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"path": "model", "dtype": "bfloat16"}},
        pytest.param({"model": {"path": "model", "dtype": "float16"}}, marks=pytest.mark.slow_extra),
        {"train": {**TRAIN, "packing": True}},
        {"train": {**TRAIN, "packing": True}, "attention": "one_backward"},
        {"train": {**TRAIN, "packing": True}, **PLAIN},
        pytest.param(
            {"train": {**TRAIN, "packing": True}, "kernels": {"attention": "eager", "layers": {}}},
            marks=pytest.mark.slow_extra,
        ),
    ],
    ids=["bfloat16", "float16", "packing", "packing-backward-once", "packing-sdpa", "packing-eager"],
)
def test_right_kernels(guest: Guest, changes: dict[str, Any]) -> None:
    """`kit selftest` passes in each type and on each attention path, packed or padded; it leaves /out alone."""
    guest.build(**changes)
    run = guest.run("selftest")
    assert run.rc == 0, run.terminal
    assert not run.out.exists()
    found = json.loads(next(line for line in run.terminal.splitlines() if line.startswith("{")))
    rows = "packed" if "train" in changes else "padded"
    assert f"in a layer of the model ({rows} rows)" in found["checks"][-1]["check"]
    assert all(max(check["error"].values()) <= check["allowed"] / 4 for check in found["checks"] if "error" in check)


def test_every_check_is_recorded(guest: Guest) -> None:
    """The archive says what was tested, how far off it was and how often it was repeated; a kept cache saves it."""
    guest.build(train=TRAIN)
    first, second = guest.run(), guest.run()
    assert (first.rc, second.rc) == (0, 0), first.terminal
    found = first.manifest["selftest"]
    names = [check["check"].partition(" (")[0] for check in found["checks"]]
    assert names == [
        "flash_attn_func",
        "flash_attn_varlen_func",
        "flash_attn_varlen_func",
        "flash_attn_varlen_func",
        "flash_attn_varlen_func",
        "LigerRMSNorm for Qwen3RMSNorm of 16",
        "LigerRMSNorm for Qwen3RMSNorm of 64",
        f"attention {ATTENTION}@{'a' * 40} in a layer of the model",
    ]
    assert [check["repeats"] for check in found["checks"] if "repeats" in check] == [3] * 5
    assert (found["recalled"], second.manifest["selftest"]["recalled"]) == (False, True)
    assert found["key"] == second.manifest["selftest"]["key"]
    assert first.values == second.values


@pytest.mark.parametrize("change", [{"attention": "wrong_backward"}, {"launch": {"threads_per_process": 2}}])
def test_another_kernel_is_tested_again(guest: Guest, change: dict[str, Any]) -> None:
    """What was kept of one kernel, or of other settings, says nothing of another."""
    guest.build()
    assert guest.run("selftest").rc == 0
    kept = {path.name: path.read_bytes() for path in (guest.root.cache / "selftest").iterdir()}
    assert len(kept) == 1
    guest.build(**change)
    (guest.root.cache / "selftest").mkdir()
    for name, data in kept.items():
        (guest.root.cache / "selftest" / name).write_bytes(data)
    run = guest.run("selftest")
    assert run.rc == (6 if "attention" in change else 0)
    assert '"recalled": true' not in run.terminal


def test_a_resumed_run_knows(guest: Guest) -> None:
    """A resumed run takes over what it found before it was stopped, with an empty cache too."""
    guest.build(train={**TRAIN, "max_steps": 3}, model=recipe()["model"])
    stopped = guest.run(terminate_after=1)
    assert stopped.rc == 10, stopped.terminal
    for path in (guest.root.cache / "selftest").iterdir():
        path.unlink()
    resumed = guest.run(out=stopped.out, environ={"KIT_RESUME": "1"})
    assert resumed.rc == 0, resumed.terminal
    assert resumed.manifest["selftest"]["recalled"] is True
    assert len(resumed.manifest["selftest"]["checks"]) == 8
