"""Step 2: what differs between two locks, item by item, as a person would say it. Pure.

Every byte of a lock but the digests of the lock and of the recipe is in one of the tables below, so that two locks
without a difference say the same.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from kitbuild.lock.models import Lock, LockedDataset, LockedFile, LockedKernel, LockedTree, LockedWheel

MOST_FILES = 6
# A sha256 or a commit: twelve digits tell it from any other.
_DIGEST = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{28}(?:[0-9a-f]{24})?\b")
_SHORT = r"\1…"


@dataclass(frozen=True, kw_only=True)
class Change:
    """One thing of a part of the lock, before and after; None where it was not or is no more."""

    part: str
    name: str
    old: str | None
    new: str | None

    def __str__(self) -> str:
        if self.old is None or self.new is None:
            sign, value = ("-", self.old) if self.new is None else ("+", self.new)
            return f"{sign} {self.name} {_DIGEST.sub(_SHORT, str(value))}"
        return f"{self.name} {_DIGEST.sub(_SHORT, self.old)} → {_DIGEST.sub(_SHORT, self.new)}"


def changes(old: Lock, new: Lock) -> tuple[Change, ...]:
    """Everything that differs, grouped by part: what runs first, then what is read, then what follows."""
    return tuple(_changes(old, new))


def lines(found: Iterable[Change]) -> list[str]:
    """For people: a heading for each part, then what changed in it."""
    return [
        line
        for part, items in groupby(found, key=lambda change: change.part)
        for line in (f"{part}:", *(f"  {change}" for change in items))
    ]


def _changes(old: Lock, new: Lock) -> Iterator[Change]:
    yield from _packages(old.wheels, new.wheels)
    yield from _kernels(old.kernels, new.kernels)
    yield from _tree("model", old.model.weights, new.model.weights)
    yield from _table("model", _flat(old.model.config, "config"), _flat(new.model.config, "config"))
    yield from _tree("tokenizer", old.model.tokenizer, new.model.tokenizer)
    templates = [(lock.model.chat_template,) if lock.model.chat_template else () for lock in (old, new)]
    yield from _files("chat template", *templates)
    for index in range(max(len(old.datasets), len(new.datasets))):
        pair = [lock.datasets[index] if index < len(lock.datasets) else None for lock in (old, new)]
        yield from _dataset(f"dataset {index}", *pair)
    yield from _dataset("evaluate", old.evaluate, new.evaluate)
    yield from _base(old, new)
    declared = [_flat(lock.defaults.declared) for lock in (old, new)]
    yield from _table("library defaults", *declared)
    forces = [
        {name: f"{_text(item.value)} ({item.origin})" for name, item in lock.defaults.arguments.items()}
        | {"(from the device)": ", ".join(lock.defaults.device_dependent)}
        for lock in (old, new)
    ]
    yield from _table("arguments in force", *forces)
    yield from _table("launch", *(_flat(lock.launch) for lock in (old, new)))
    yield from _table("recipe", *(_flat(lock.recipe) for lock in (old, new)))
    yield from _table("advisories", *({item.id: item.severity for item in lock.advisories} for lock in (old, new)))
    rest = [
        {"name": lock.name, "target": lock.target}
        | _flat(lock.package_set.model_dump(mode="json"), "package set")
        | _flat(lock.kitbuild.model_dump(mode="json"), "kitbuild")
        for lock in (old, new)
    ]
    yield from _table("lock", *rest)


def _packages(old: Iterable[LockedWheel], new: Iterable[LockedWheel]) -> Iterator[Change]:
    """By version; of one version in both, by what else differs."""
    before, after = ({wheel.name: wheel for wheel in wheels} for wheels in (old, new))
    for name in sorted({*before, *after}):
        one, two = before.get(name), after.get(name)
        if one is None or two is None or one.version != two.version:
            versions = [wheel.version if wheel else None for wheel in (one, two)]
            yield Change(part="packages", name=name, old=versions[0], new=versions[1])
        else:
            fields = [_flat(wheel.model_dump(mode="json"), f"{name} {one.version}") for wheel in (one, two)]
            yield from _table("packages", *fields)


def _kernels(old: Iterable[LockedKernel], new: Iterable[LockedKernel]) -> Iterator[Change]:
    before, after = (_by_place(kernels) for kernels in (old, new))
    for name in sorted({*before, *after}):
        one, two = before.get(name), after.get(name)
        if one is None or two is None:
            texts = [f"{item.revision} {item.commit}, {item.variant}" if item else None for item in (one, two)]
            yield Change(part="kernels", name=name, old=texts[0], new=texts[1])
            continue
        left_out = {"files", "role", "repo"}
        if (one.commit, one.variant) != (two.commit, two.variant):
            left_out |= {"rejected", "metadata_sha256", "metadata_digest"}
        fields = [_flat(item.model_dump(mode="json", exclude=left_out), name) for item in (one, two)]
        yield from _table("kernels", *fields)
        yield from _files("kernels", one.files, two.files, of=f"{name} ")


def _by_place(kernels: Iterable[LockedKernel]) -> dict[str, LockedKernel]:
    found: dict[str, LockedKernel] = {}
    for kernel in kernels:
        name = f"{kernel.role} {kernel.repo}"
        found[name if name not in found else f"{name}@{kernel.revision}"] = kernel
    return found


def _dataset(part: str, old: LockedDataset | None, new: LockedDataset | None) -> Iterator[Change]:
    yield from _tree(part, old.tree if old else None, new.tree if new else None)
    fields = [_flat(item.model_dump(mode="json", exclude={"tree"})) if item else {} for item in (old, new)]
    if old and new:
        yield from _table(part, *fields)


def _tree(part: str, old: LockedTree | None, new: LockedTree | None) -> Iterator[Change]:
    places = [_place(tree) if tree else None for tree in (old, new)]
    if places[0] != places[1]:
        yield Change(part=part, name="from", old=places[0], new=places[1])
    if old and new:
        yield from _files(part, old.files, new.files)


def _place(tree: LockedTree) -> str:
    return tree.path if tree.path is not None else f"{tree.repo}@{tree.revision} {tree.commit}"


def _files(part: str, old: Iterable[LockedFile], new: Iterable[LockedFile], *, of: str = "") -> Iterator[Change]:
    """Each file that differs, by name; many of them by number."""
    tables = [
        {f"{of}{file.path}": f"sha256 {file.sha256}, {file.size} bytes" for file in files} for files in (old, new)
    ]
    found = list(_table(part, *tables))
    if len(found) <= MOST_FILES:
        yield from found
        return
    yield Change(part=part, name=f"{of}files", old=f"{len(tables[0])}", new=f"{len(tables[1])}, {len(found)} differ")


def _base(old: Lock, new: Lock) -> Iterator[Change]:
    left_out = {"packages", "diff_ids"} if old.base.diff_ids == new.base.diff_ids else {"packages"}
    fields = [_flat(lock.base.model_dump(mode="json", exclude=left_out)) for lock in (old, new)]
    yield from _table("base", *fields)
    packages = [
        {
            f"{item.name}:{item.architecture}": item.version + (f" sha256 {item.sha256}" if item.sha256 else "")
            for item in lock.base.packages
        }
        for lock in (old, new)
    ]
    yield from _table("base", *packages)


def _table(part: str, old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[Change]:
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            yield Change(part=part, name=name, old=old.get(name), new=new.get(name))


def _flat(value: Any, name: str = "") -> dict[str, str]:
    """Leaves of nested mappings by dotted name; a list is one leaf, unless it holds mappings."""
    nested: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict) and value:
        nested = value.items()
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        nested = zip(_own_names(value), value, strict=True)
    else:
        return {name: _text(value)}
    separator = " " if " " in name else "."
    return {
        key: leaf
        for own, item in nested
        for key, leaf in _flat(item, f"{name}{separator}{own}" if name else str(own)).items()
    }


def _own_names(items: list[Any]) -> list[str]:
    """What each item of a list is called: by its own name where it has one that no other has."""
    found = []
    for index, item in enumerate(items):
        names = (item.get(key) for key in ("variant", "repo", "path", "name")) if isinstance(item, dict) else ()
        name = next((str(name) for name in names if name), str(index))
        found.append(name if name not in found else str(index))
    return found


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)
