"""Known-bad combinations, as data, and which of them a recipe meets.

Part of step 2; no network: `kitbuild check` asks with the tested versions, `lock` with the resolved ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, ConfigDict, Field

from kitbuild.errors import Problem

if TYPE_CHECKING:
    from kitbuild.lock.models import LockedKernel
    from kitbuild.recipe.models import Recipe


class BadKernel(BaseModel):
    """A version of a Hub kernel: `v3` is the branch, and the number in the build's metadata."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    repo: str
    version: str


class Conditions(BaseModel):
    """All that are given must hold. See advisories.yaml for what each means."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    packages: dict[str, str | tuple[str, ...]] = Field(default_factory=dict)
    recipe: dict[str, Any] = Field(default_factory=dict)
    kernel: BadKernel | None = None
    model: dict[str, Any] = Field(default_factory=dict)
    lacking: tuple[str, ...] = ()


class Advisory(BaseModel):
    """One known-bad combination."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    severity: Literal["info", "warning", "error"]
    summary: str
    when: Conditions
    advice: str
    source: str

    def as_problem(self) -> Problem:
        """How it is shown."""
        return Problem(key=self.id, message=self.summary, hint=f"{self.advice} ({self.source})")


def load_advisories() -> tuple[Advisory, ...]:
    """The list that this kitbuild carries."""
    from ruamel.yaml import YAML  # noqa: PLC0415

    text = (files("kitbuild.lock") / "advisories.yaml").read_text(encoding="utf-8")
    return tuple(Advisory.model_validate(entry) for entry in YAML(typ="safe", pure=True).load(text))


def met_advisories(
    recipe: Recipe,
    *,
    versions: Mapping[str, str],
    model_config: Mapping[str, Any] | None,
    kernels: Iterable[LockedKernel] = (),
) -> Iterator[Advisory]:
    """The advisories whose conditions hold. `model_config` is config.json's content where it is known.

    `kernels`, once they are locked, tell the version of one that is asked for by commit.
    """
    fields = recipe.model_dump(mode="json", by_alias=True)
    model = None if model_config is None else {**model_config, "grouped_query": _grouped(model_config)}
    builds = {(kernel.repo, f"v{kernel.kernel_version}") for kernel in kernels if kernel.role == "attention"}
    attention = recipe.kernels.attention_reference
    builds |= {(attention.repo, str(attention.revision))} if attention else set()
    for advisory in load_advisories():
        when = advisory.when
        if (
            all(_in(versions.get(name), wanted) for name, wanted in when.packages.items())
            and all(_equals(_lookup(fields, key), value) for key, value in when.recipe.items())
            and (when.kernel is None or (when.kernel.repo, when.kernel.version) in builds)
            and all(model is not None and _equals(_lookup(model, key), value) for key, value in when.model.items())
            and not any(name in versions for name in when.lacking)
        ):
            yield advisory


def _in(version: str | None, wanted: str | tuple[str, ...]) -> bool:
    specifiers = (wanted,) if isinstance(wanted, str) else wanted
    try:
        return version is not None and any(
            Version(version) in SpecifierSet(specifier, prereleases=True) for specifier in specifiers
        )
    except InvalidVersion:
        return False


def _lookup(fields: Mapping[str, Any], key: str) -> Any:
    value: Any = fields
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _equals(value: Any, wanted: Any) -> bool:
    if wanted == "*":
        return value is not None
    values = value if isinstance(value, list) else [value]
    return any(item in wanted if isinstance(wanted, list) else item == wanted for item in values)


def _grouped(config: Mapping[str, Any]) -> bool:
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    return isinstance(heads, int) and isinstance(kv_heads, int) and kv_heads < heads
