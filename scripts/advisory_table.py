#!/usr/bin/env python3
"""Write the table of advisories in docs/lock.md from kitbuild/lock/advisories.yaml."""

from __future__ import annotations

import re
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from kitbuild.lock.advisories import load_advisories  # noqa: E402 - the checkout's own

DOCUMENT = REPOSITORY / "docs" / "lock.md"
_PLACE = re.compile(r"(<!-- advisories: [^>]*-->\n).*(<!-- end -->)", re.DOTALL)


def rendered(text: str) -> str:
    """The document with the table of today."""
    rows = ["| id | severity | what | instead |", "|---|---|---|---|"]
    rows += [
        f"| [{item.id}]({_link(item.source)}) | {item.severity} | {item.summary} | {item.advice} |"
        for item in load_advisories()
    ]
    return _PLACE.sub(lambda found: found[1] + "\n".join(rows) + "\n" + found[2], text)


def _link(source: str) -> str:
    return source.removeprefix("docs/")


if __name__ == "__main__":
    DOCUMENT.write_text(rendered(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
