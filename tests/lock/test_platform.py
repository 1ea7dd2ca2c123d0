"""The target as tags and markers see it."""

from __future__ import annotations

import pytest

from kitbuild.lock.platform import Platform

DEBIAN = Platform(python="3.11.2", glibc="2.36", architecture="amd64")


def test_tags_go_from_the_best_to_the_most_general() -> None:
    """This Python and the newest glibc first, any platform last; old names stand beside the new ones."""
    tags = [str(tag) for tag in DEBIAN.tags]
    assert tags[0] == "cp311-cp311-manylinux_2_36_x86_64"
    assert tags[-1] == "py30-none-any"
    assert tags.index("cp311-cp311-manylinux_2_17_x86_64") + 1 == tags.index("cp311-cp311-manylinux2014_x86_64")
    assert tags.index("cp311-abi3-manylinux_2_28_x86_64") < tags.index("cp39-abi3-manylinux_2_36_x86_64")


@pytest.mark.parametrize(
    "tag",
    [
        "cp311-cp311-manylinux_2_37_x86_64",
        "cp311-cp311-manylinux_2_28_aarch64",
        "cp311-cp311-musllinux_1_2_x86_64",
        "cp312-cp312-manylinux_2_28_x86_64",
        "cp312-abi3-manylinux_2_28_x86_64",
        "cp311-cp311-win_amd64",
        "cp311-cp311t-manylinux_2_28_x86_64",
    ],
)
def test_what_does_not_run_there_has_no_tag(tag: str) -> None:
    """A newer glibc, another machine, libc, Python or system."""
    assert tag not in {str(item) for item in DEBIAN.tags}


@pytest.mark.parametrize(
    ("glibc", "architecture", "name"),
    [
        ("2.36", "amd64", "x86_64-manylinux_2_36"),
        ("2.30", "amd64", "x86_64-manylinux_2_28"),
        ("2.41", "amd64", "x86_64-manylinux_2_40"),
        ("2.39", "arm64", "aarch64-manylinux_2_39"),
        ("2.12", "amd64", "x86_64-manylinux_2_17"),
    ],
)
def test_uvs_platform_is_never_newer_than_the_target(glibc: str, architecture: str, name: str) -> None:
    """uv knows some glibc versions; the newest that is not too new is named."""
    assert Platform(python="3.12.3", glibc=glibc, architecture=architecture).uv_name == name
