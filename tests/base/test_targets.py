"""Every target's data loads, and the CUDA Dockerfiles differ in their arguments only."""

from __future__ import annotations

import difflib

import pytest

from kitbuild.base.build import default_upstream
from kitbuild.base.targets import data_path, dockerfile_path, load_bootstrap, load_target, target_names
from kitbuild.errors import UsageError


def test_targets() -> None:
    """There are three targets, each with its base, torch and no floating version."""
    assert target_names() == ("cpu", "cuda128", "cuda129")
    for name in target_names():
        target = load_target(name)
        assert (target.target, target.base) == (name, f"kitbuild/base-{name}")
        assert all(version[0].isdigit() for version in target.packages.values())
    assert load_target("cpu").packages["torch"] == "2.13.0+cpu"
    assert load_target("cuda128").packages["torch"] == "2.10.0"
    assert load_target("cuda129").packages["torch"] == "2.8.0+cu129"


def test_targets_share_one_tested_set() -> None:
    """Beside torch and Liger, the versions of all targets are the same."""
    sets = []
    for name in target_names():
        target = load_target(name)
        everything = target.packages | {k: v for extra in target.extras.values() for k, v in extra.items()}
        sets.append({package: version for package, version in everything.items() if package != "torch"})
    assert sets[0] == sets[1] == sets[2]


def test_cpu_has_no_liger_by_default() -> None:
    """Liger brings a GB of triton: on a CPU only where the recipe asks for it."""
    assert "liger-kernel" not in load_target("cpu").packages
    assert load_target("cpu").extras["liger"] == {"liger-kernel": "0.8.5"}


def test_dockerfiles_differ_in_arguments_only() -> None:
    """Line by line, only `ARG` lines differ."""
    old, new = (data_path(f"Dockerfile.{name}").read_text().splitlines() for name in ("cuda128", "cuda129"))
    changed = [line for line in difflib.ndiff(old, new) if line[0] in "+-"]
    assert [line[2:].partition("=")[0] for line in changed] == ["ARG BASE", "ARG BASE", "ARG CUDA", "ARG CUDA"]


@pytest.mark.parametrize(("name", "cuda"), [("cuda128", "12.8"), ("cuda129", "12.9")])
def test_dockerfile_fits_target(name: str, cuda: str) -> None:
    """The default upstream is NVIDIA's image of the target's CUDA, by digest."""
    target = load_target(name)
    upstream = default_upstream(dockerfile_path(target).read_bytes())
    assert target.cuda == cuda
    assert upstream.startswith(f"nvidia/cuda:{cuda}.1-devel-ubuntu24.04@sha256:")
    assert f"ARG CUDA={cuda}\n" in dockerfile_path(target).read_text()


def test_unknown_target() -> None:
    """The error lists the targets."""
    with pytest.raises(UsageError) as caught:
        load_target("cuda130")
    assert (caught.value.message, caught.value.hint) == (
        "'cuda130' is not a target",
        "one of cpu, cuda128, cuda129",
    )


def test_build_and_bootstrap_are_not_mixed_up() -> None:
    """Each of the two commands names the other for the wrong target."""
    with pytest.raises(UsageError, match=r"the base of cuda129 is built from Dockerfile\.cuda129"):
        load_bootstrap("cuda129")
    with pytest.raises(UsageError, match="the base of cpu is bootstrapped, not built"):
        dockerfile_path(load_target("cpu"))
