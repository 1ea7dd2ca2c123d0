"""What is said of the tested versions is true: of each other, and of the packages themselves."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from kitbuild.base.targets import load_known, load_target, target_names
from kitbuild.flow import upkeep

KNOWN = load_known()


def versions_of(name: str) -> dict[str, str]:
    target = load_target(name)
    everything = target.packages | {key: value for extra in target.extras.values() for key, value in extra.items()}
    return {str(canonicalize_name(key)): value for key, value in everything.items()}


@pytest.mark.parametrize("name", target_names())
def test_every_tested_version_is_known_and_fits_the_others(name: str) -> None:
    """Each package of a set says why it is there, and takes every other version of the set."""
    versions = versions_of(name)
    for package, version in versions.items():
        about = KNOWN[package][version]
        assert about.why
        for other, wanted in about.with_.items():
            assert other not in versions or versions[other] in SpecifierSet(wanted), (package, other)


def test_what_packages_ask_for() -> None:
    """What a version works with is what its own metadata asks for, in the environment of the tested set."""
    code = (
        "import importlib.metadata as m, json\n"
        "print(json.dumps({d.name: [d.version, d.requires or []] for d in m.distributions()}))"
    )
    python = os.environ["KITBUILD_TRAIN_PYTHON"]
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    installed = {str(canonicalize_name(name)): value for name, value in json.loads(done.stdout).items()}
    seen = set()
    for package, versions in KNOWN.items():
        version, requires = installed.get(package, (None, ()))
        if version not in versions:
            continue
        asked: dict[str, set[str]] = {}
        for text in requires:
            requirement = Requirement(text)
            asked.setdefault(str(canonicalize_name(requirement.name)), set()).add(str(requirement.specifier))
        for other, wanted in versions[version].with_.items():
            assert str(SpecifierSet(wanted)) in asked[other], (package, other)
        seen.add(package)
    assert seen >= {"transformers", "kernels", "trl", "accelerate", "datasets", "tokenizers", "peft", "huggingface-hub"}


def test_stack_shows_it() -> None:
    """Each version once, with the targets that install it, what it works with and why."""
    told = upkeep.stack()
    assert [line.split()[0] for line in told.lines[:3]] == list(target_names())
    at = told.lines.index("kernels 0.17.2  (cpu, cuda128, cuda129)")
    assert told.lines[at + 1 : at + 3] == (
        "  with  huggingface-hub >=1.10.0",
        "  why   transformers 5.20 to 5.22 take nothing older, and nothing from 0.18 on",
    )
    assert "liger-kernel 0.8.5  (cpu for liger, cuda128, cuda129)" in told.lines
    assert "transformers 5.17.0  (for image.packages: no target installs it)" in told.lines
    known = told.fields["known"]
    assert known["trl"]["1.14.2"]["with"]["transformers"] == ">=4.56.2"
    assert {item["target"] for item in told.fields["targets"]} == set(target_names())
