"""Step 1: makes `train_keys.json`, the table of trainers' keys, from wheels or an installed environment.

`python -m kitbuild.recipe.trainers SITE_PACKAGES` rewrites it when the tested set moves. Read from source, never by
importing: `SFTConfig()` raises where there is no GPU, and several of its values follow the device.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kitbuild.errors import ResolveError
from kitbuild.recipe.declared import DeclaredField, declared_fields

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

CLASSES = {"train": "trl.trainer.sft_config.SFTConfig", "lora": "peft.tuners.lora.config.LoraConfig"}
TABLE = Path(__file__).with_name("train_keys.json")
_PACKAGES = ("transformers", "trl", "peft")
_ENUMS = ("transformers/training_args.py", "transformers/trainer_utils.py", "peft/utils/peft_types.py")
_METADATA = re.compile(r"^(?P<name>[A-Za-z0-9_]+)-(?P<version>[^-/]+)\.dist-info/METADATA$")
_KINDS = {"int": "int", "float": "float", "bool": "bool", "str": "str", "dict": "dict", "list": "list", "None": "null"}
# Chosen by a condition in the class body: torch 2.8 and later.
_CHOSEN_DEFAULTS = {"default_optim": "adamw_torch_fused"}


def trainer_table(sources: Iterable[Path]) -> dict[str, Any]:
    """`{"packages": {name: version}, "train": {key: {kinds, default[, choices]}}, "lora": …}`."""
    texts: dict[str, str] = {}
    versions: dict[str, str] = {}
    for source in sources:
        for name, text in _members(source):
            match = _METADATA.match(name)
            if match:
                versions[match["name"]] = match["version"]
            else:
                texts[name] = text
    missing = [name for name in _PACKAGES if name not in versions]
    if missing:
        raise ResolveError(f"no source of {', '.join(missing)}")
    enums = {name: values for file in _ENUMS if file in texts for name, values in _enums(texts[file])}
    return {
        "packages": versions,
        **{
            section: {key: _row(field, enums) for key, field in declared_fields(texts.get, name).items()}
            for section, name in CLASSES.items()
        },
    }


def dump(table: Mapping[str, Any]) -> str:
    """The text of `train_keys.json`."""
    return json.dumps(table, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _members(source: Path) -> Iterator[tuple[str, str]]:
    """Python files and METADATA names of the three packages, from a wheel or a site-packages directory."""
    if source.is_dir():
        for name in _PACKAGES:
            for file in (*source.glob(f"{name}-*.dist-info/METADATA"), *(source / name).rglob("*.py")):
                if "/models/" not in file.as_posix():
                    yield file.relative_to(source).as_posix(), file.read_text(encoding="utf-8")
        return
    with zipfile.ZipFile(source) as wheel:
        for name in wheel.namelist():
            if name.startswith(_PACKAGES) and name.endswith((".py", "/METADATA")) and "/models/" not in name:
                yield name, wheel.read(name).decode()


def _enums(text: str) -> Iterator[tuple[str, list[str]]]:
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and any("Enum" in ast.unparse(base) for base in node.bases):
            constants = [item.value for item in node.body if isinstance(item, ast.Assign)]
            yield (
                node.name,
                [item.value for item in constants if isinstance(item, ast.Constant) and isinstance(item.value, str)],
            )


def _row(field: DeclaredField, enums: Mapping[str, list[str]]) -> dict[str, Any]:
    kinds: set[str] = set()
    choices: list[str] = []
    for part in _union(ast.parse(field.type, mode="eval").body):
        base = ast.unparse(part).partition("[")[0].rpartition(".")[2]
        if base == "Literal" and isinstance(part, ast.Subscript):
            values = ast.literal_eval(part.slice)
            for value in values if isinstance(values, tuple) else (values,):
                kinds.add(_KINDS[type(value).__name__])
                choices.extend([value] if isinstance(value, str) else [])
        elif base in enums:
            kinds.add("str")
            choices.extend(enums[base])
        else:
            kinds.add(_KINDS.get(base, "dict"))
    default = field.default if field.literal else _CHOSEN_DEFAULTS.get(str(field.default))
    row: dict[str, Any] = {"kinds": sorted(kinds), "default": default}
    return {**row, "choices": choices} if choices else row


def _union(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.BinOp):
        yield from _union(node.left)
        yield from _union(node.right)
        return
    name = ast.unparse(node.value).rpartition(".")[2] if isinstance(node, ast.Subscript) else ""
    if not isinstance(node, ast.Subscript) or name not in {"Optional", "Union"}:
        yield node
        return
    for part in node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]:
        yield from _union(part)
    if name == "Optional":
        yield ast.Constant(value=None)


if __name__ == "__main__":
    TABLE.write_text(dump(trainer_table(map(Path, sys.argv[1:]))), encoding="utf-8")
