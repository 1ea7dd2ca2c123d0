"""Step 6, two manifests as one table: every fact under its dotted name, both values, and whether they agree. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kitbuild.archive.read import Archive

# What names an item of a list, in this order of preference.
_NAMES = ("name", "path", "file", "repo", "variant", "id", "rank", "prompt")
ABSENT = "–"


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One fact of both sides."""

    name: str
    left: str
    right: str

    @property
    def same(self) -> bool:
        """Whether both sides say the same."""
        return self.left == self.right


@dataclass(frozen=True, kw_only=True)
class Section:
    """Facts that belong together."""

    title: str
    facts: tuple[Fact, ...]

    @property
    def differences(self) -> int:
        """How many are not equal."""
        return sum(not fact.same for fact in self.facts)


def sections(left: Archive, right: Archive) -> tuple[Section, ...]:
    """The manifests by their first name (the lock by its second), in the order of the names."""
    tables = [dict(_flat("", archive.manifest.model_dump(mode="json", exclude_none=True))) for archive in (left, right)]
    held: dict[str, list[Fact]] = {}
    for name in sorted({*tables[0], *tables[1]}, key=_natural):
        title, rest = _split(name)
        held.setdefault(title, []).append(
            Fact(name=rest, left=tables[0].get(name, ABSENT), right=tables[1].get(name, ABSENT))
        )
    return tuple(Section(title=title, facts=tuple(facts)) for title, facts in held.items())


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(f"{name}\0{key}" if name else str(key), inner)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for key, inner in _named(value).items():
            yield from _flat(f"{name}\0{key}", inner)
    else:
        yield name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)


def _named(items: list[Any]) -> Mapping[str, Any]:
    """A list by what names its items; by number where that is not unique."""
    for name in _NAMES:
        keys = [str(item[name]) for item in items if isinstance(item, dict) and item.get(name) is not None]
        if len(set(keys)) == len(items):
            return {
                key: {k: v for k, v in item.items() if k != name} or "listed"
                for key, item in zip(keys, items, strict=True)
            }
    return {str(number): item for number, item in enumerate(items)}


def _split(name: str) -> tuple[str, str]:
    parts = name.split("\0")
    depth = 2 if parts[0] == "lock" and len(parts) > 2 else 1 if len(parts) > 1 else 0  # noqa: PLR2004 - lock.PART.NAME
    return ".".join(parts[:depth]) or "run", ".".join(parts[depth:])


def _natural(name: str) -> tuple[bool, list[tuple[int, str]]]:
    """Single facts first; numbers in their order."""
    parts = name.split("\0")
    return len(parts) > 1, [(len(part) if part.isdecimal() else 0, part) for part in parts]
