"""Step 2: what the user told pip about indexes, for uv, which does not read it.

Files and variables in pip's own order (https://pip.pypa.io/en/stable/topics/configuration/): global, user, site,
PIP_CONFIG_FILE, then PIP_* variables; the later wins, key by key. Only what says where packages are is read.
"""

from __future__ import annotations

import configparser
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_KEYS = ("index-url", "extra-index-url", "find-links", "cert", "no-index")
_SECTIONS = ("global", "install")


@dataclass(frozen=True, kw_only=True)
class PipSettings:
    """Where pip would look."""

    index_url: str | None = None
    extra_index_urls: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    cert: str | None = None
    no_index: bool = False


def read_pip_settings(
    environ: Mapping[str, str], *, prefixes: Sequence[str] = (sys.base_prefix, sys.prefix)
) -> PipSettings:
    """The settings that `environ` and the files on disk give."""
    values: dict[str, str] = {}
    for path in _files(environ, prefixes):
        values |= _read(path)
    for key in _KEYS:
        value = environ.get("PIP_" + key.upper().replace("-", "_"))
        if value:
            values[key] = value
    return PipSettings(
        index_url=values.get("index-url", "").strip() or None,
        extra_index_urls=tuple(values.get("extra-index-url", "").split()),
        find_links=tuple(values.get("find-links", "").split()),
        cert=values.get("cert", "").strip() or None,
        no_index=values.get("no-index", "").strip().lower() in {"1", "true", "yes", "on"},
    )


def _files(environ: Mapping[str, str], prefixes: Sequence[str]) -> Iterator[Path]:
    named = environ.get("PIP_CONFIG_FILE")
    if named == os.devnull:
        return
    home = Path(environ.get("HOME", "~")).expanduser()
    for folder in reversed(environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":")):
        yield Path(folder or "/etc/xdg") / "pip" / "pip.conf"
    yield Path("/etc/pip.conf")
    yield home / ".pip" / "pip.conf"
    yield Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "pip" / "pip.conf"
    for prefix in dict.fromkeys(prefixes):
        yield Path(prefix) / "pip.conf"
    if named:
        yield Path(named)


def _read(path: Path) -> dict[str, str]:
    parser = configparser.RawConfigParser()
    try:
        parser.read_string(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, configparser.Error):
        return {}
    return {
        key: parser.get(section, option)
        for section in _SECTIONS
        if parser.has_section(section)
        for option in parser.options(section)
        if (key := option.lower().replace("_", "-")) in _KEYS
    }
