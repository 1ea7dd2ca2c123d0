"""Step 1: the kinds of string in a recipe, each with its own pattern and its own words.

A commit, a name and a kernel reference are not the same type.
"""

from __future__ import annotations

import re
from typing import Annotated, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    StringConstraints,
)

from kitbuild.recipe.words import suggestion

REPO = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}$"
REVISION = r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,199}$"
NAME = r"^[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?$"
GPU_ARCH = r"^[0-9]{1,2}\.[0-9][a-z]?$"
PACKAGE = r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,126}[A-Za-z0-9])?$"
VERSION = r"^[0-9]+(\.[0-9]+)*[A-Za-z0-9.!+_-]{0,60}$"
LAYER = r"^[A-Za-z_][A-Za-z0-9_]{0,127}$"
PATTERN_WORDS = {
    REPO: "a repo on the Hub is written org/name",
    REVISION: "a revision is a branch, a tag or a commit",
    NAME: "a name has lower-case letters, digits, `.`, `_` and `-`, and at most 64 of them",
    GPU_ARCH: 'an architecture is a compute capability in quotes, such as "9.0"',
    PACKAGE: "a package or index name has letters, digits, `.`, `_` and `-`",
    VERSION: 'give one exact version in quotes, such as "2.8.0"',
    LAYER: "a layer is named as the model's own code registers it, such as RMSNorm",
}

Repo = Annotated[str, StringConstraints(pattern=REPO)]
Revision = Annotated[str, StringConstraints(pattern=REVISION)]
Name = Annotated[str, StringConstraints(pattern=NAME)]
GpuArch = Annotated[str, StringConstraints(pattern=GPU_ARCH)]
PackageName = Annotated[str, StringConstraints(pattern=PACKAGE)]
ExactVersion = Annotated[str, StringConstraints(pattern=VERSION)]
LayerName = Annotated[str, StringConstraints(pattern=LAYER)]
Text = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
BUILT_IN_ATTENTION = ("sdpa", "eager", "flex_attention")
WHEEL_ATTENTION = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
_KERNEL = re.compile(
    r"^(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[A-Za-z0-9][\w./-]*))?(?::(?P<member>[A-Za-z_]\w*))?$",
    re.ASCII,
)
_USER = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*://[^/?#]*@")


class RefusedError(ValueError):
    """A value that a validator refuses, with what to write instead."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class Closed(BaseModel):
    """The base of every model: closed, frozen, strict about types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True)


class KernelReference(Closed):
    """`org/repo[@revision][:member]`, as transformers' `attn_implementation` takes it."""

    repo: str
    revision: str | None = None
    member: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Split a reference; `ValueError` says what is wrong with it."""
        match = _KERNEL.fullmatch(text)
        if match is None:
            raise RefusedError(f"{text!r} is not org/repo[@revision][:name]")
        return cls(**match.groupdict())

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return self.repo + revision + (f":{self.member}" if self.member else "")


def attention_kernel(value: str) -> str:
    """A name of transformers, or a Hub kernel with its revision."""
    if value in BUILT_IN_ATTENTION + WHEEL_ATTENTION:
        return value
    if "/" not in value:
        known = ", ".join(BUILT_IN_ATTENTION + WHEEL_ATTENTION)
        meant = suggestion(value, BUILT_IN_ATTENTION + WHEEL_ATTENTION)
        raise RefusedError(f"{value!r} is not one of {known}, nor org/repo@revision[:function]", meant)
    reference = KernelReference.parse(value)
    if reference.revision is None:
        member = f":{reference.member}" if reference.member else ""
        raise RefusedError(
            f"{value} names no revision", f"write {reference.repo}@v1{member}, say: a branch, tag or commit"
        )
    return value


def layer_kernel(value: str) -> str:
    """A Hub layer with its revision and its name."""
    reference = KernelReference.parse(value)
    if reference.revision is None or reference.member is None:
        raise RefusedError(
            f"{value} does not name a revision and a layer",
            f"write {reference.repo}@{reference.revision or 'v1'}:{reference.member or 'LayerName'}, say",
        )
    return value


def without_password(value: str) -> str:
    """An address in a recipe is copied into the lock, the image and the archive."""
    if _USER.match(value):
        raise RefusedError(
            "the address has a user or password in it",
            "take it out; put it in ~/.netrc, or in UV_INDEX beside the name",
        )
    return value


def power_of_two(value: int) -> int:
    """1, 2, 4, 8 and so on."""
    if value & (value - 1):
        raise RefusedError(
            f"{value} is not a power of two", "gradients are summed in a fixed binary tree: 1, 2, 4, 8, …"
        )
    return value
