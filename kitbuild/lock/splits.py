"""Step 2: which files of a Hub dataset make a split: by the card's `configs`, else by the Hub's conventions. Pure.

https://huggingface.co/docs/hub/datasets-manual-configuration and datasets-file-names-and-splits.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text", ".arrow": "arrow"}
_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_NOT_DATA = {"dataset_infos.json", "dataset_info.json", "state.json"}


def split_files(names: Iterable[str], about: Mapping[str, Any], *, config: str | None, split: str) -> list[str]:
    """Data files of a split, in the order in which they are read; none where the split or configuration is unknown."""
    data = sorted(name for name in names if _is_data(name))
    entries = _entries(about)
    if not entries:
        return _by_name([name for name in data if config is None or config in PurePosixPath(name).parts], split)
    chosen = _entry(entries, config)
    if chosen is None:
        return []
    if chosen.get("data_files"):
        found = [name for pattern in _patterns(chosen, split) for name in data if matches(name, pattern)]
        return list(dict.fromkeys(found))
    folder = str(chosen.get("data_dir") or "").strip("/")
    return _by_name([name for name in data if not folder or name.startswith(f"{folder}/")], split)


def config_names(about: Mapping[str, Any]) -> tuple[str, ...]:
    """Configurations that the card names, for a message."""
    return tuple(str(entry.get("config_name", "default")) for entry in _entries(about))


def matches(name: str, pattern: str) -> bool:
    """Whether a path fits a pattern: `*` stays inside a folder, `**` does not."""
    return _fits(name.split("/"), pattern.removeprefix("./").strip("/").split("/"))


def _fits(parts: list[str], pattern: list[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        # At the end it stands for any file below, in between for any number of folders.
        return bool(parts) if len(pattern) == 1 else any(_fits(parts[n:], pattern[1:]) for n in range(len(parts)))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _fits(parts[1:], pattern[1:])


def _is_data(name: str) -> bool:
    path = PurePosixPath(name)
    hidden = any(part.startswith((".", "__")) for part in path.parts)
    return path.suffix in FORMATS and path.name not in _NOT_DATA and not hidden and path.name != "requirements.txt"


def _entries(about: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = about.get("configs")
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def _entry(entries: list[Mapping[str, Any]], config: str | None) -> Mapping[str, Any] | None:
    """The configuration that is asked for; without a name the default, or the only one."""
    if config is not None:
        return next((entry for entry in entries if str(entry.get("config_name", "default")) == config), None)
    marked = [entry for entry in entries if entry.get("default") or entry.get("config_name", "default") == "default"]
    return marked[0] if marked else entries[0] if len(entries) == 1 else None


def _patterns(entry: Mapping[str, Any], split: str) -> list[str]:
    given = entry.get("data_files")
    found: list[str] = []
    for item in given if isinstance(given, list) else [given]:
        if isinstance(item, str):
            found += [item] if split == "train" else []
        elif isinstance(item, dict) and item.get("split") == split:
            paths = item.get("path")
            found += [paths] if isinstance(paths, str) else [str(path) for path in paths or ()]
    return found


def _by_name(names: list[str], split: str) -> list[str]:
    named = [name for name in names if _names_split(name, split)]
    if named or split != "train":
        return named
    return [] if any(_names_split(name, other) for name in names for other in ("validation", "test")) else names


def _names_split(name: str, split: str) -> bool:
    """Whether a path has the split as a word: `data/train-00000-of-00001.parquet`, `train.jsonl`, `train/0.parquet`."""
    if re.sub(r"-\d{5}-of-\d{5}$", "", PurePosixPath(name).stem.lower()) == split.lower():
        return True
    words = set(re.split(r"[/\-_. 0-9]+", name.lower()))
    return not words.isdisjoint(_WORDS.get(split.lower(), (split.lower(),)))
