"""What is known per target: the default base, Python, the tested package set. Data: `images/<target>/`."""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path
from typing import Any

from pydantic import Field

from kitbuild.base.models import Closed, Sha256
from kitbuild.errors import UsageError

_PACKAGE = Path(__file__).resolve().parents[1]


class Bootstrap(Closed):
    """`images/cpu/bootstrap.toml`: how a base is made from Debian packages."""

    suite: str
    source_date_epoch: int
    include: tuple[str, ...]
    drop: tuple[str, ...]
    keep: tuple[str, ...]
    sha256: Sha256


class Target(Closed):
    """`images/<target>/packages.toml`. `sha256` is of the file, so that a lock can name the set.

    `extras` are sets by feature (`liger`, `deepspeed`), for recipes that use it.
    """

    target: str
    base: str
    dockerfile: str | None = None
    cuda: str | None = None
    python: str
    torch_backend: str
    packages: dict[str, str]
    extras: dict[str, dict[str, str]] = Field(default_factory=dict)
    sha256: Sha256


class Known(Closed):
    """What is known of one version of a package: what it works `with` (a specifier by name), and why it was taken."""

    with_: dict[str, str] = Field(alias="with")
    why: str


def data_path(relative: str) -> Path:
    """A data file: inside the installed wheel, else in the checkout that this module is in."""
    installed = _PACKAGE / "_data" / relative
    return installed if installed.exists() else _PACKAGE.parent / relative


def target_names() -> tuple[str, ...]:
    """Every target there is data for."""
    return tuple(sorted(path.parent.name for path in data_path("images").glob("*/packages.toml")))


def load_target(name: str) -> Target:
    """The target called `name`: cpu, cuda128 or cuda129."""
    if name not in target_names():
        raise UsageError(f"{name!r} is not a target", hint=f"one of {', '.join(target_names())}")
    return Target(**_read(f"images/{name}/packages.toml"))


def load_known() -> dict[str, dict[str, Known]]:
    """`images/known.toml`: by package and version."""
    data = tomllib.loads(data_path("images/known.toml").read_text(encoding="utf-8"))
    return {name: {version: Known(**fields) for version, fields in held.items()} for name, held in data.items()}


def load_bootstrap(name: str) -> Bootstrap:
    """How to bootstrap the base of a target, where it is bootstrapped rather than built."""
    target = load_target(name)
    if target.dockerfile is not None:
        raise UsageError(
            f"the base of {name} is built from {target.dockerfile}", hint=f"run `kitbuild base build {name}`"
        )
    return Bootstrap(**_read(f"images/{name}/bootstrap.toml"))


def dockerfile_path(target: Target) -> Path:
    """The Dockerfile that builds the base of a target."""
    if target.dockerfile is None:
        raise UsageError(
            f"the base of {target.target} is bootstrapped, not built",
            hint=f"run `kitbuild base bootstrap {target.target}`",
        )
    return data_path(target.dockerfile)


def _read(relative: str) -> dict[str, Any]:
    data = data_path(relative).read_bytes()
    return tomllib.loads(data.decode()) | {"sha256": hashlib.sha256(data).hexdigest()}
