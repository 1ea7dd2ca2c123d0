"""pip's own settings, read as pip reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kitbuild.lock.pip_config import PipSettings, read_pip_settings
from kitbuild.lock.uv import Sources

if TYPE_CHECKING:
    from pathlib import Path


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path / "home"), "XDG_CONFIG_DIRS": str(tmp_path / "xdg")}


def read(environ: dict[str, str], *prefixes: Path) -> PipSettings:
    return read_pip_settings(environ, prefixes=[str(prefix) for prefix in prefixes])


def test_the_later_place_wins_key_by_key(environ: dict[str, str], tmp_path: Path) -> None:
    """Global, old user file, user file, environment's prefix, PIP_CONFIG_FILE, variables."""
    keys = ["index-url", "cert", "find-links", "extra-index-url", "no-index"]
    places = [
        tmp_path / "xdg/pip/pip.conf",
        tmp_path / "home/.pip/pip.conf",
        tmp_path / "home/.config/pip/pip.conf",
        tmp_path / "prefix/pip.conf",
        tmp_path / "named.conf",
    ]
    for number, path in enumerate(places):
        write(path, "[global]\n" + "".join(f"{key} = from-{number}\n" for key in keys[: len(keys) - number]))
    environ["PIP_CONFIG_FILE"] = str(places[-1])
    found = read(environ, tmp_path / "prefix")
    assert found == PipSettings(
        index_url="from-4", cert="from-3", find_links=("from-2",), extra_index_urls=("from-1",), no_index=False
    )
    environ["PIP_INDEX_URL"] = "from-variable"
    assert read(environ, tmp_path / "prefix").index_url == "from-variable"


def test_lists_and_the_install_section(environ: dict[str, str], tmp_path: Path) -> None:
    """Several values stand on lines or in a row; [install] beats [global]; underscores are dashes."""
    text = "[install]\nextra_index_url =\n  one\n  two three\nno-index = yes\n[global]\nextra-index-url = none\n"
    write(tmp_path / "home/.config/pip/pip.conf", text)
    found = read(environ)
    assert (found.extra_index_urls, found.no_index) == (("one", "two", "three"), True)


@pytest.mark.parametrize("text", ["no section\n", "[global\n", "[global]\nindex-url\n", "\xff\xfe"])
def test_a_broken_file_says_nothing(environ: dict[str, str], tmp_path: Path, text: str) -> None:
    """What pip itself would refuse is passed over."""
    path = tmp_path / "home/.config/pip/pip.conf"
    write(path, "")
    path.write_bytes(text.encode("latin-1"))
    assert read(environ).index_url is None


def test_the_null_device_turns_files_off(environ: dict[str, str], tmp_path: Path) -> None:
    """PIP_CONFIG_FILE=/dev/null, as pip documents; variables still count; a percent sign is no interpolation."""
    write(tmp_path / "home/.config/pip/pip.conf", "[global]\nindex-url = http://u:a%2Fb@x/simple\n")
    assert read(environ).index_url == "http://u:a%2Fb@x/simple"
    assert read(environ | {"PIP_CONFIG_FILE": "/dev/null"}).index_url is None
    assert read(environ | {"PIP_CONFIG_FILE": "/dev/null", "PIP_FIND_LINKS": "a b"}).find_links == ("a", "b")


def test_uv_gets_what_pip_was_told(environ: dict[str, str]) -> None:
    """Index, find-links, CA and the recipe's indexes become uv's variables; extra indexes only when asked for."""
    environ |= {
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_INDEX_URL": "http://mirror/simple",
        "PIP_EXTRA_INDEX_URL": "http://extra/simple",
        "PIP_FIND_LINKS": "/links",
        "PIP_CERT": "/ca.pem",
        "UV_FIND_LINKS": "/own",
        "VIRTUAL_ENV": "/some/venv",
    }
    sources = Sources.read({"corp": "http://corp/simple"}, environ)
    found = sources.variables(spare=False)
    assert found["UV_DEFAULT_INDEX"] == "http://mirror/simple"
    assert found["UV_INDEX"] == "corp=http://corp/simple"
    assert found["UV_FIND_LINKS"] == "/own,/links"
    assert found["SSL_CERT_FILE"] == "/ca.pem"
    assert "VIRTUAL_ENV" not in found
    assert "UV_INDEX_STRATEGY" not in found
    spare = sources.variables(spare=True)
    assert spare["UV_INDEX"] == "corp=http://corp/simple http://extra/simple"
    assert spare["UV_INDEX_STRATEGY"] == "unsafe-best-match"


def test_uvs_own_settings_win(environ: dict[str, str]) -> None:
    """Where uv has been told, pip's settings do not count."""
    environ |= {
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_INDEX_URL": "http://pip/simple",
        "PIP_EXTRA_INDEX_URL": "http://pip-extra/simple",
        "PIP_CERT": "/pip.pem",
        "UV_DEFAULT_INDEX": "http://uv/simple",
        "UV_INDEX": "own=http://uv-extra/simple",
        "SSL_CERT_FILE": "/uv.pem",
    }
    sources = Sources.read({}, environ)
    found = sources.variables(spare=False)
    assert (found["UV_DEFAULT_INDEX"], found["UV_INDEX"]) == ("http://uv/simple", "own=http://uv-extra/simple")
    assert found["SSL_CERT_FILE"] == "/uv.pem"
    assert sources.spare == ()
