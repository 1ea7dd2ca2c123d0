"""Step 1, and again in step 2: what a library's configuration class declares, read from its source.

The classes are dataclasses; their fields, types and defaults stand in the source as text, so nothing of the
library is imported (importing would need torch, and would answer for this machine and not for the target).
The source comes through a function, from an installed package or from inside a wheel.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    ReadSource = Callable[[str], str | None]

_EMPTY: dict[str, Callable[[], Any]] = {"list": list, "dict": dict}
_FOLLOWED_REEXPORTS = 8


@dataclass(frozen=True, kw_only=True)
class DeclaredField:
    """One field. `default` is JSON-able where `literal`, else the source text; None and not `required` is None."""

    type: str
    default: Any
    literal: bool
    required: bool = False


def declared_fields(read_source: ReadSource, qualified: str) -> dict[str, DeclaredField]:
    """Fields of the dataclass `package.module.Class`, inherited ones first, as `dataclasses` orders them.

    `read_source("package/module.py")` gives the text of a file, or None where it is not there. A base class that
    lies outside what `read_source` knows declares no field. `LookupError` where the class itself is not found.
    """
    module, _, name = qualified.rpartition(".")
    found = _find(read_source, module, name)
    if found is None:
        raise LookupError(f"{qualified} is not in the source")
    return _fields(read_source, found)


@dataclass(frozen=True)
class _Class:
    module: str
    package: str
    tree: ast.Module
    node: ast.ClassDef


def _fields(read_source: ReadSource, found: _Class) -> dict[str, DeclaredField]:
    fields: dict[str, DeclaredField] = {}
    for base in reversed(found.node.bases):
        name = ast.unparse(base).rpartition(".")[2]
        inherited = _find_name(read_source, found.tree, module=found.module, package=found.package, name=name)
        if inherited is not None:
            fields |= _fields(read_source, inherited)
    if any("dataclass" in ast.unparse(decorator) for decorator in found.node.decorator_list):
        fields |= dict(_own_fields(found.node))
    return fields


def _own_fields(node: ast.ClassDef) -> Iterator[tuple[str, DeclaredField]]:
    for statement in node.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        annotation = ast.unparse(statement.annotation)
        if not annotation.startswith(("ClassVar", "typing.ClassVar")):
            yield statement.target.id, _field(annotation, statement.value)


def _field(annotation: str, value: ast.expr | None) -> DeclaredField:
    if isinstance(value, ast.Call) and ast.unparse(value.func) in {"field", "dataclasses.field"}:
        options = {option.arg: option.value for option in value.keywords}
        factory = options.get("default_factory")
        if factory is not None:
            text = ast.unparse(factory)
            known = _EMPTY.get(text)
            default = known() if known else f"{text}()"
            return DeclaredField(type=annotation, default=default, literal=known is not None)
        value = options.get("default")
    if value is None:
        return DeclaredField(type=annotation, default=None, literal=False, required=True)
    try:
        return DeclaredField(type=annotation, default=_plain(ast.literal_eval(value)), literal=True)
    except ValueError:
        return DeclaredField(type=annotation, default=ast.unparse(value), literal=False)


def _plain(value: object) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"{value!r} has no JSON form")


def _find(read_source: ReadSource, module: str, name: str, depth: int = 0) -> _Class | None:
    path = module.replace(".", "/")
    source, package = read_source(f"{path}.py"), module.rpartition(".")[0]
    if source is None:
        source, package = read_source(f"{path}/__init__.py"), module
    if source is None or depth > _FOLLOWED_REEXPORTS:
        return None
    return _find_name(read_source, ast.parse(source), module=module, package=package, name=name, depth=depth)


def _find_name(
    read_source: ReadSource, tree: ast.Module, *, module: str, package: str, name: str, depth: int = 0
) -> _Class | None:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return _Class(module, package, tree, node)
    for imported in (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)):
        for alias in imported.names:
            if (alias.asname or alias.name) == name:
                return _find(read_source, _absolute(imported, package), alias.name, depth + 1)
    return None


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    kept = parts[: len(parts) - node.level + 1]
    return ".".join([*kept, *([node.module] if node.module else [])])
