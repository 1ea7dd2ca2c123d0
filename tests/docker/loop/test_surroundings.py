"""A bare `docker run` of a real image with what a user or an attacker would add to it."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kitbuild.run.docker_engine import container_spec

if TYPE_CHECKING:
    from pathlib import Path

    from kitbuild.store import Store
    from tests.docker.loop.command import Kitbuild
    from tests.docker.loop.conftest import Baseline

pytestmark = pytest.mark.docker
SITE = "/opt/kit/lib/python3.11/site-packages"
REFUSED = {
    "LOCAL_KERNELS": "org/kernel=/out",
    "PYTHONPATH": "/out",
    "PYTHONPYCACHEPREFIX": "/out",
    "PYTHONOPTIMIZE": "1",
    "LD_PRELOAD": "/out/evil.so",
    "LD_LIBRARY_PATH": "/out",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2",
}
HAND_SET = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OMP_NUM_THREADS": "3",
    "ACCELERATE_MIXED_PRECISION": "fp16",
    "HF_HOME": "/hf",
    "PYTHONNOUSERSITE": "",
    "HOME": "/home/me",
}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    return path


def docker_run(
    baseline: Baseline, store: Store, run_dir: Path, verb: str, *extra: str
) -> subprocess.CompletedProcess[str]:
    """The line that `kitbuild run` prints, with `extra` before the image."""
    spec = container_spec(baseline.lock, image=baseline.image, run_dir=run_dir, store=store, resume=False)
    words = replace(spec, command=(verb,)).command_line_words()
    place = words.index(spec.image)
    return subprocess.run([*words[:place], *extra, *words[place:]], capture_output=True, text=True, check=False)


def variables(given: dict[str, str]) -> list[str]:
    return [word for name, value in given.items() for word in ("-e", f"{name}={value}")]


def mount(host: Path, container: str) -> tuple[str, str]:
    return "--mount", f"type=bind,source={host},target={container},readonly"


@pytest.mark.slow_extra
def test_as_it_is(baseline: Baseline, store: Store, run_dir: Path) -> None:
    """Nothing added: every byte is the locked one, and nothing of the engine's own is taken for an addition."""
    done = docker_run(baseline, store, run_dir, "verify")
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith("files are the locked ones\n")


@pytest.mark.slow_extra
def test_selftest_alone(baseline: Baseline, store: Store, run_dir: Path) -> None:
    """`docker run … IMAGE selftest` prints one JSON object with every check, and leaves /out as it is."""
    done = docker_run(baseline, store, run_dir, "selftest")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["schema"] == "kitbuild.selftest/1"
    assert [check["check"] for check in found["checks"]] == ["attention sdpa in a layer of the model (padded rows)"]
    assert done.stderr.endswith("kit: selftest: every kernel is right (checks: 1)\n")
    assert list(run_dir.iterdir()) == []


def test_variables_that_bring_in_code(baseline: Baseline, store: Store, run_dir: Path) -> None:
    """Each of them is exit 7 by name, all at once, and nothing is trained."""
    done = docker_run(baseline, store, run_dir, "train", *variables(REFUSED))
    assert done.returncode == 7, done.stderr
    told = json.loads((run_dir / "exit.json").read_bytes())
    named = {problem["key"] for problem in told["problems"] if problem["key"]}
    assert named == REFUSED.keys()
    assert {"file": "/out", "message": "is searched for modules"}.items() <= told["problems"][-1].items()
    assert not (run_dir / "metrics.jsonl").exists()


def test_mounts_over_the_image(baseline: Baseline, store: Store, run_dir: Path, tmp_path: Path) -> None:
    """A .pth and a sitecustomize among the packages, a module of the base, another kernel: exit 7, each by name."""
    evil = tmp_path / "evil"
    evil.write_text("import os\n")
    places = [f"{SITE}/evil.pth", f"{SITE}/sitecustomize.py", "/usr/lib/python3.11/this.py", f"{SITE}/trl/__init__.py"]
    done = docker_run(baseline, store, run_dir, "verify", *(word for place in places for word in mount(evil, place)))
    assert done.returncode == 7, done.stderr
    for place in places:
        assert f"  {place}: is mounted over the image" in done.stderr
    for place in places[:2]:
        assert f"  {place}: is in no lock" in done.stderr
    assert f"  {SITE}/trl/__init__.py: sha256 is " in done.stderr


@pytest.mark.slow_extra
def test_compiled_code_in_a_mounted_cache(baseline: Baseline, store: Store, run_dir: Path, tmp_path: Path) -> None:
    """Kernels that an earlier run compiled, or somebody else, are not taken over under strict."""
    (tmp_path / "triton/abc").mkdir(parents=True)
    (tmp_path / "triton/abc/kernel.cubin").write_text("")
    done = docker_run(baseline, store, run_dir, "verify", *mount(tmp_path / "triton", "/cache/triton"))
    assert done.returncode == 7, done.stderr
    assert "/cache/triton: holds Triton's kernels from before, which nobody locked" in done.stderr


def test_settings_by_hand_have_no_effect(
    kit: Kitbuild, baseline: Baseline, store: Store, run_dir: Path, tmp_path: Path
) -> None:
    """Instruction sets, threads, a mounted HF_HOME with an accelerate file, a user's site: IDENTICAL, and recorded."""
    hugging, home = tmp_path / "hf", tmp_path / "me"
    (hugging / "accelerate").mkdir(parents=True)
    (hugging / "accelerate/default_config.yaml").write_text("mixed_precision: fp16\nnum_processes: 3\n")
    site = home / ".local/lib/python3.11/site-packages"
    site.mkdir(parents=True)
    (site / "usercustomize.py").write_text("raise SystemExit('a user's code ran')\n")
    extra = [*variables(HAND_SET), *mount(hugging, "/hf"), *mount(home, "/home/me")]
    done = docker_run(baseline, store, run_dir, "train", *extra)
    assert done.returncode == 0, done.stderr
    told = json.loads((run_dir / "manifest.json").read_bytes())["determinism"]["overridden"]
    without = {"PYTHONNOUSERSITE", "HOME"}
    assert {name: value for name, value in HAND_SET.items() if name not in without} == told
    if os.geteuid() == 0:
        os.chown(run_dir, 0, 0)
    assert kit("compare", baseline.run_dir, run_dir)["verdict"] == "IDENTICAL"
