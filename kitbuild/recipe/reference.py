"""Step 1: the recipe's reference and its JSON schema, made from the models and tables that check recipes.

docs/recipe.md is `reference_markdown()`; a test compares them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from kitbuild.recipe import rules, train_keys
from kitbuild.recipe.kinds import PATTERN_WORDS, Closed
from kitbuild.recipe.models import Dataset, Determinism, Liger, Recipe, Tokenizer
from kitbuild.recipe.words import KINDS, either

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic.fields import FieldInfo

_INTRODUCTION = """\
<!-- Made by `python -m kitbuild.recipe`; edit the models and tables in kitbuild/recipe. -->
# The recipe

A recipe is one YAML file: what is trained, on what, with which kernels, in which image. `kitbuild check` reads it
with no network and reports every problem at once, each with its line and column.

## How the file is read

YAML 1.2, strictly; nothing changes silently.

- `1e-5` is a number. `no`, `off`, `yes` and `on` are strings: write `true` or `false`.
- `12.9` without quotes is a number: write `"12.9"`. The same goes for every version.
- Refused wherever they stand: duplicate keys, tabs as indentation, anchors and aliases, merge keys, tags, several
  documents, `0123`, `0x1F`, `.inf`, `.nan`, keys that are not strings, a byte order mark, other encodings than
  UTF-8, files over 1 MiB.
- `1_000`, `12:30` and `2026-01-01` are strings; where a number is needed, and in `model.config`, they are refused.
- A whole number may stand where a number is needed; nothing else is converted.
- Paths start from the recipe's directory.
"""


def schema() -> dict[str, Any]:
    """A JSON schema for editors; `kitbuild check` knows more."""
    made = Recipe.model_json_schema(by_alias=True)
    properties = made["properties"]
    one = {"$ref": "#/$defs/Dataset"}
    several = {"type": "array", "items": one, "minItems": 1}
    properties["dataset"] = {"description": properties["dataset"]["description"], "anyOf": [one, several]}
    properties["liger"] = {
        "description": properties["liger"]["description"],
        "anyOf": [{"$ref": "#/$defs/Liger"}, {"const": False}, {"type": "null"}],
    }
    properties["determinism"] = {
        "description": properties["determinism"]["description"],
        "anyOf": [{"enum": ["strict", "record"]}, {"$ref": "#/$defs/Determinism"}],
    }
    known = train_keys.table()
    for section, declared in ((train_keys.TRAIN, known.train), (train_keys.LORA, known.lora)):
        keys = {key: _key_schema(field) for key, field in declared.items() if key not in section.owned}
        closed = {"type": "object", "additionalProperties": False, "properties": keys}
        nullable = section is train_keys.LORA
        properties[section.name] = {
            "description": properties[section.name]["description"],
            **({"anyOf": [closed, {"type": "null"}]} if nullable else closed),
        }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made}


def _key_schema(field: Any) -> dict[str, Any]:
    names = {"int": "integer", "float": "number", "bool": "boolean", "str": "string", "dict": "object", "list": "array"}
    found: dict[str, Any] = {"type": [names.get(kind, kind) for kind in field["kinds"]]}
    if field.get("choices") and "[" not in "".join(field["choices"]) and field["kinds"] == ["str"]:
        found["enum"] = field["choices"]
    if field["default"] is not None:
        found["default"] = field["default"]
    return found


def reference_markdown() -> str:
    """The text of docs/recipe.md."""
    parts = [_INTRODUCTION, *_models(), *_trainer_keys(train_keys.TRAIN), *_trainer_keys(train_keys.LORA), *_rules()]
    return "\n".join(parts)


def _models() -> Iterator[str]:
    yield "## Keys\n"
    yield _table(Recipe)
    for name, field in Recipe.model_fields.items():
        model = _closed(field.annotation)
        if model is not None:
            yield from _model(name, model)


def _model(path: str, model: type[Closed]) -> Iterator[str]:
    yield f"### `{path}`\n"
    short = {Determinism: "`strict` and `record` may stand alone.", Dataset: "One, or a list of these."}
    if model is Liger:
        short[Liger] = "A mapping of options, or `false`."
    yield " ".join(part for part in ((model.__doc__ or "").strip(), short.get(model)) if part) + "\n"
    yield _table(model)
    for name, field in model.model_fields.items():
        below = _closed(field.annotation)
        if below not in (None, Dataset, Tokenizer):
            yield from _model(f"{path}.{name}", below)


def _table(model: type[Closed]) -> str:
    lines = ["| key | value | default | |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        default = "required" if field.is_required() else f"`{_shown(field)}`"
        lines.append(
            f"| `{field.alias or name}` | {_value(field.annotation)} | {default} | {field.description or ''} |"
        )
    return "\n".join(lines) + "\n"


def _shown(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Determinism):
        return value.mode
    if isinstance(value, Closed):
        return "{}"
    return _yaml(value)


def _yaml(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    return str(value) if value != "" else '""'


def _value(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " \\| ".join(f"`{value}`" for value in get_args(annotation))
    model = _closed(annotation)
    if model is not None:
        return "list of mappings" if get_origin(annotation) is tuple else "mapping"
    parts = [part for part in get_args(annotation) if part not in (type(None), ...) and not _is_metadata(part)]
    if get_origin(annotation) is tuple:
        return f"list of {_value(parts[0])}"
    if get_origin(annotation) is dict:
        return "mapping"
    if parts:
        return " or ".join(dict.fromkeys(map(_value, parts)))
    names = {str: "string", int: "whole number", float: "number", bool: "true or false"}
    return names.get(annotation, "any")


def _is_metadata(part: Any) -> bool:
    return not (isinstance(part, type) or get_args(part))


def _closed(annotation: Any) -> type[Closed] | None:
    if isinstance(annotation, type) and issubclass(annotation, Closed):
        return annotation
    return next(filter(None, map(_closed, get_args(annotation))), None)


def _trainer_keys(section: train_keys.Section) -> Iterator[str]:
    known = train_keys.table()
    versions = " and ".join(f"{name} {known.packages[name]}" for name in section.packages)
    yield f"## Keys of `{section.name}`\n"
    yield f"The fields of `{section.made_of}` in {versions}, with their declared defaults.\n"
    if section is train_keys.TRAIN:
        yield "The lock holds every value in force and where it comes from: the recipe, kitbuild or the library.\n"
    lines = ["| key | value | default |", "|---|---|---|"]
    for key, field in sorted(getattr(known, section.name).items()):
        if key in section.owned:
            continue
        value = either(KINDS[kind] for kind in train_keys.kinds(field))
        choices = train_keys.choices(key, field)
        if choices:
            value = ", ".join(f"`{choice}`" for choice in choices)
        if key in section.ranges:
            value += f"; {section.ranges[key].words()}"
        lines.append(f"| `{key}` | {value} | `{_yaml(field['default'])}` |")
    yield "\n".join(lines) + "\n"
    yield f"Refused in `{section.name}`, with what to use instead:\n"
    lines = ["| key | instead |", "|---|---|"]
    lines.extend(f"| `{key}` | {reason} |" for key, reason in sorted(section.owned.items()))
    yield "\n".join(lines) + "\n"


def _rules() -> Iterator[str]:
    yield "## Rules between keys\n"
    yield "\n".join(f"- {(rule.__doc__ or '').strip()}" for _, rule in rules.RULES) + "\n"
    yield "## Kinds of string\n"
    yield "\n".join(f"- {words[0].upper()}{words[1:]}." for words in PATTERN_WORDS.values()) + "\n"
