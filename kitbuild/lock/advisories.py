"""Known-bad combinations, as data, and which of them a recipe meets.

Part of step 2; no network: `kitbuild check` asks with the tested versions, `lock` with the resolved ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, ConfigDict, Field

from kitbuild.errors import Problem

if TYPE_CHECKING:
    from kitbuild.recipe.models import Recipe


class Conditions(BaseModel):
    """All that are given must hold. See advisories.yaml for what each means."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    packages: dict[str, str] = Field(default_factory=dict)
    recipe: dict[str, Any] = Field(default_factory=dict)
    kernel: dict[str, str] | None = None
    model: dict[str, bool] = Field(default_factory=dict)
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
    recipe: Recipe, *, versions: Mapping[str, str], model_config: Mapping[str, Any] | None
) -> Iterator[Advisory]:
    """The advisories whose conditions hold. `model_config` is config.json's content where it is known."""
    fields = recipe.model_dump(mode="json", by_alias=True)
    for advisory in load_advisories():
        if _holds(advisory.when, recipe=recipe, fields=fields, versions=versions, model_config=model_config):
            yield advisory


def _holds(
    when: Conditions,
    *,
    recipe: Recipe,
    fields: Mapping[str, Any],
    versions: Mapping[str, str],
    model_config: Mapping[str, Any] | None,
) -> bool:
    return (
        all(_in(versions.get(name), specifier) for name, specifier in when.packages.items())
        and all(_equals(_lookup(fields, key), value) for key, value in when.recipe.items())
        and (when.kernel is None or _asks_for(recipe, when.kernel))
        and (not when.model or (model_config is not None and _grouped(model_config) == when.model["grouped_query"]))
        and not any(name in versions for name in when.lacking)
    )


def _in(version: str | None, specifier: str) -> bool:
    try:
        return version is not None and Version(version) in SpecifierSet(specifier, prereleases=True)
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
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        return value in wanted
    return bool(value == wanted)


def _asks_for(recipe: Recipe, kernel: Mapping[str, str]) -> bool:
    attention = recipe.kernels.attention_reference
    return attention is not None and attention.repo == kernel["repo"] and attention.revision == kernel["version"]


def _grouped(config: Mapping[str, Any]) -> bool:
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    return isinstance(heads, int) and isinstance(kv_heads, int) and kv_heads < heads
