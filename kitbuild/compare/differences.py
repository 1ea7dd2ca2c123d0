"""Step 6: what differs between two manifests, item by item, unranked. Pure.

Each thing appears once: what has a name of its own (a package, a kernel, an argument) is not repeated as part of the
document that holds it.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kitbuild.compare.items import ABSENT, cause, tables
from kitbuild.compare.models import Cause
from kitbuild.compare.surroundings import image, machine
from kitbuild.lock.models import canonical

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kitbuild.archive.models import Manifest
    from kitbuild.lock.models import Lock, LockedDataset, LockedKernel, LockedTree

# Where a run writes, and what it is called: never a reason for another number.
PLACES = frozenset({"output_dir", "logging_dir", "run_name", "hub_model_id", "project"})
# Told by items of their own.
_TOLD = frozenset(
    {"seed", "name", "kernels", "model", "dataset", "evaluate", "launch", "train", "determinism", "liger"}
)
_MODEL_SOURCES = frozenset({"repo", "path", "revision", "config", "tokenizer", "chat_template"})
_LAUNCH = ("nodes", "processes_per_node", "world_size", "strategy")
_DERIVED_LAUNCH = frozenset({"accumulation", "backend", "use_cpu"})
# In the recipe, and never a reason for another number.
_BESIDE = frozenset({"policy", "track"})


def differences(left: Manifest, right: Manifest) -> Iterator[Cause]:
    """Everything in the manifests that could bear on a value."""
    yield from _seed(left, right)
    yield from _inputs(left.lock, right.lock)
    yield from _kernels(left, right)
    yield from _packages(left, right)
    yield from _settings(left, right)
    yield from machine(left, right)
    yield from image(left, right)


def _seed(left: Manifest, right: Manifest) -> Iterator[Cause]:
    one, two = (m.seed if m.seed is not None else m.lock.recipe.get("seed") for m in (left, right))
    if one != two:
        yield cause("seed", "seed", one, two)


def _inputs(left: Lock, right: Lock) -> Iterator[Cause]:
    yield from _tree("model", "model", left.model.weights, right.model.weights)
    yield from tables("model", left.model.config or {}, right.model.config or {}, what="model config {}")
    yield from _tree("model", "tokenizer", left.model.tokenizer, right.model.tokenizer)
    templates = [m.chat_template.sha256 if m.chat_template else None for m in (left.model, right.model)]
    if templates[0] != templates[1]:
        yield _file("model", "chat_template", "chat template", *templates)
    for number in range(max(len(left.datasets), len(right.datasets))):
        pair = [lock.datasets[number] if number < len(lock.datasets) else None for lock in (left, right)]
        yield from _dataset(f"dataset {number}", *pair)
    yield from _dataset("evaluate", left.evaluate, right.evaluate)


def _dataset(name: str, left: LockedDataset | None, right: LockedDataset | None) -> Iterator[Cause]:
    kind = "evaluate" if name == "evaluate" else "dataset"
    yield from _tree(kind, name, left.tree if left else None, right.tree if right else None)
    if left and right:
        exclude = {"tree", "format"}
        pair = (dataset.model_dump(mode="json", exclude=exclude) for dataset in (left, right))
        yield from tables(kind, *pair, what=f"{name} {{}}")


def _tree(kind: str, name: str, left: LockedTree | None, right: LockedTree | None) -> Iterator[Cause]:
    """Named by its files; where only the commit moved and no byte did, nothing differs."""
    files = [{file.path: file.sha256 for file in tree.files} if tree else {} for tree in (left, right)]
    if files[0] == files[1]:
        return
    places = [
        f"{tree.repo}@{tree.commit[:12] if tree.commit else tree.revision}" if tree and tree.repo else None
        for tree in (left, right)
    ]
    if places[0] != places[1] and all(places):
        yield cause(kind, name, *places)
        return
    for path in sorted({*files[0], *files[1]}):
        if files[0].get(path) != files[1].get(path):
            yield _file(kind, f"{name}/{path}", f"{name} {path}", files[0].get(path), files[1].get(path))


def _file(kind: str, name: str, what: str, left: str | None, right: str | None) -> Cause:
    one, two = (f"sha256 {digest[:12]}…" if digest else ABSENT for digest in (left, right))
    return Cause(kind=kind, name=name, left=left, right=right, text=f"{what} {one} vs {two}")


def _kernels(left: Manifest, right: Manifest) -> Iterator[Cause]:
    """The attention path is told apart only where no locked attention kernel explains it."""
    ours, theirs = ({(k.role, k.repo, k.member or ""): k for k in m.lock.kernels} for m in (left, right))
    roles = set()
    for key in sorted({*ours, *theirs}):
        one, two = _kernel_texts(ours.get(key), theirs.get(key))
        if one != two:
            roles.add(key[0])
            yield cause("kernel", key[1], one, two, f"{key[0]} kernel {key[1]}")
    if "attention" not in roles and left.attention.used != right.attention.used:
        yield cause("kernel", "attention", left.attention.used, right.attention.used)
    patches = ({name: value for name, value in m.liger.items() if name != "calls"} for m in (left, right))
    yield from tables("kernel", *patches, what="liger {}")
    layers = [
        {layer: f"{k.repo}:{member}" for k in m.lock.kernels for layer, member in k.layers.items()}
        for m in (left, right)
    ]
    if "layers" not in roles:
        yield from tables("kernel", *layers, what="layer {}")


def _kernel_texts(left: LockedKernel | None, right: LockedKernel | None) -> tuple[str | None, str | None]:
    one, two = (f"{k.commit[:12]} ({k.variant})" if k else None for k in (left, right))
    if left and right and one == two and left.files != right.files:
        return f"{one} files {_files_digest(left)}…", f"{two} files {_files_digest(right)}…"
    return one, two


def _files_digest(kernel: LockedKernel) -> str:
    return hashlib.sha256(canonical([file.model_dump() for file in kernel.files])).hexdigest()[:12]


def _packages(left: Manifest, right: Manifest) -> Iterator[Cause]:
    """By what was installed; where versions agree, by the locked wheel's digest."""
    locked = [{wheel.name: wheel for wheel in m.lock.wheels} for m in (left, right)]
    found = [
        {_plain(name): version for name, version in m.environment.packages.items()}
        or {_plain(wheel.name): wheel.version for wheel in m.lock.wheels}
        for m in (left, right)
    ]
    versions = list(tables("package", *found))
    yield from versions
    told = {item.name for item in versions}
    for name in sorted({*locked[0], *locked[1]}):
        one, two = locked[0].get(name), locked[1].get(name)
        if _plain(name) in told or (one and two and one.sha256 == two.sha256):
            continue
        texts = [f"{wheel.version} (locked wheel {wheel.sha256[:12]}…)" if wheel else None for wheel in (one, two)]
        yield cause("package", _plain(name), *texts)
    if left.environment.python != right.environment.python and left.lock.base.python == right.lock.base.python:
        yield cause("package", "python", left.environment.python, right.environment.python)


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def _settings(left: Manifest, right: Manifest) -> Iterator[Cause]:
    arguments = [
        {name: argument.value for name, argument in m.lock.defaults.arguments.items()} | m.arguments
        for m in (left, right)
    ]
    if all(table.get("data_seed") == m.seed for table, m in zip(arguments, (left, right), strict=True)):
        for table in arguments:  # It follows the seed, which is told.
            table.pop("data_seed", None)
    origins = [{name: argument.origin for name, argument in m.lock.defaults.arguments.items()} for m in (left, right)]
    for item in tables(
        "argument", *({k: v for k, v in table.items() if k not in _TOLD | PLACES} for table in arguments)
    ):
        yield replace(item, kind=_argument_kind(item.name.partition(".")[0], *origins))
    named = {*arguments[0], *arguments[1]}
    train = [{k: v for k, v in _part(m, "train").items() if k not in named} for m in (left, right)]
    yield from tables("argument", *train)
    yield from tables("determinism", *(_determinism(m) for m in (left, right)), what="determinism {}")
    yield from _launch(left, right)
    for key, skip in (("model", _MODEL_SOURCES), ("evaluate", {"dataset"})):
        parts = [{k: v for k, v in _part(m, key).items() if k not in skip} for m in (left, right)]
        yield from tables("evaluate" if key == "evaluate" else "recipe", *parts, what=f"{key} {{}}")
    recipes = [
        {k: v for k, v in m.lock.recipe.items() if k not in _TOLD | {"image", "kitbuild"}} for m in (left, right)
    ]
    for item in tables("recipe", *recipes):
        yield replace(item, kind="beside") if item.name.partition(".")[0] in _BESIDE else item
    declared = [m.lock.defaults.declared for m in (left, right)]
    yield from tables("default", *declared, what="default {}")


def _launch(left: Manifest, right: Manifest) -> Iterator[Cause]:
    """What the recipe says; what follows from it (accumulation, the back end, the world size) is derived."""
    launches = [{**m.lock.launch, **{k: m.launch[k] for k in _LAUNCH if k in m.launch}} for m in (left, right)]
    found = [*tables("launch", *launches, what="launch {}")]
    chosen = {item.name for item in found} & {"nodes", "processes_per_node"}
    derived = _DERIVED_LAUNCH | ({"world_size"} if chosen else set())
    for item in found:
        yield replace(item, kind="derived") if item.name in derived else item


def _argument_kind(name: str, left: Mapping[str, str], right: Mapping[str, str]) -> str:
    """`default` where a library chose on both sides; what kitbuild derives (accumulation) follows from the recipe."""
    found = {origins[name] for origins in (left, right) if name in origins}
    if "recipe" in found or not found:
        return "argument"
    return "derived" if "kitbuild" in found else "default"


def _part(manifest: Manifest, key: str) -> dict[str, Any]:
    value = manifest.lock.recipe.get(key)
    return value if isinstance(value, dict) else {}


def _determinism(manifest: Manifest) -> dict[str, Any]:
    value = manifest.lock.recipe.get("determinism")
    return value if isinstance(value, dict) else {"mode": value}
