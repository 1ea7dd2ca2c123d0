"""The documents say what the code does."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from kitbuild.guest import settings, surroundings

REPOSITORY = Path(__file__).resolve().parents[1]
DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(REPOSITORY / "scripts/determinism_table.py"))


def test_determinism_tables_are_current(script: dict[str, Any]) -> None:
    """docs/determinism.md has every setting of the guest; scripts/determinism_table.py writes it."""
    text = (REPOSITORY / "docs/determinism.md").read_text(encoding="utf-8")
    assert script["rendered"](text) == text
    assert all(f"| `{setting.name}` |" in text for setting in settings.TABLE)
    assert all(f"| `{family.prefix}…` |" in text for family in settings.FAMILIES)
    assert all(f"| `{name}` | [" in text for name, *_ in surroundings.REFUSED)
    assert all(f"- `train.{field}`: " in text for field, *_ in settings.REFUSED)


def test_advisory_table_is_current() -> None:
    """docs/lock.md has every advisory; scripts/advisory_table.py writes it."""
    table = runpy.run_path(str(REPOSITORY / "scripts/advisory_table.py"))
    text = (REPOSITORY / "docs/lock.md").read_text(encoding="utf-8")
    assert table["rendered"](text) == text
    assert "| [KIT-2026-001](" in text


def test_every_flag_is_named() -> None:
    """Each library flag that the guest sets is in docs/determinism.md."""
    source = (REPOSITORY / "kitbuild/guest/determinism.py").read_text(encoding="utf-8")
    names = set(
        re.findall(r'^ +(?:table\[)?f?"((?:torch|cudnn|cuda|mkl)\.[a-z0-9_.{}]+)"\]?(?:: \(| =)', source, re.MULTILINE)
    )
    assert len(names) >= 8
    text = (REPOSITORY / "docs/determinism.md").read_text(encoding="utf-8")
    assert {name for name in names if name.partition("{")[0] not in text} == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    """Each relative link is a file of the repository."""
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (document.parent / target).exists()] == []


def test_readme_names_only_commands_that_exist() -> None:
    """Each `kitbuild VERB` in the documents is a verb."""
    import typer  # noqa: PLC0415

    from kitbuild.cli import app  # noqa: PLC0415

    root: Any = typer.main.get_command(app)
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for words in re.findall(r"(?:^\$ |`)kitbuild ([a-z]+)", text, re.MULTILINE):
            assert words in root.commands, f"{document.name}: kitbuild {words}"
