"""Step 1: what a rule between keys yields."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kitbuild.recipe.strict_yaml import Path


@dataclass(frozen=True)
class Finding:
    """What a rule refuses, and the key where it is best mended."""

    path: Path
    message: str
    hint: str | None = None


Findings = Iterator[Finding]
