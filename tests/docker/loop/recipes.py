"""Recipes of the checkout in a folder of a test's own, with lines exchanged."""

from __future__ import annotations

import shutil
import uuid
from typing import TYPE_CHECKING

from kitbuild.lock.files import lock_path, parse_lock
from tests.docker.loop.command import CHECKOUT

if TYPE_CHECKING:
    from pathlib import Path

    from kitbuild.lock.models import Lock

TINY = CHECKOUT / "recipes" / "tiny-cpu.yaml"
KERNELS = CHECKOUT / "tests" / "data" / "recipes" / "tiny-kernels.yaml"
ATTENTION = "kernels-community/flash-attn2"
LAYERS = "kernels-community/liger-kernels"
OURS = f"# of the tests of process {uuid.uuid4().hex}\n"
"""Makes our locks, and so our images, other ones than the user's and than those of a process beside us."""
MADE: list[Path] = []
"""Every recipe that was written, so that what became of it can be removed."""


def recipe(folder: Path, source: Path = TINY, *, changed: dict[str, str] | None = None, data: bool = True) -> Path:
    """A copy of `source` with its data beside it; `changed` maps text that is there once to what replaces it."""
    folder.mkdir(parents=True, exist_ok=True)
    if data:
        shutil.copytree(CHECKOUT / "recipes" / "data", folder / "data")
    text = source.read_text(encoding="utf-8").replace("../../../recipes/data", "data")
    for old, new in (changed or {}).items():
        assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {source.name}"
        text = text.replace(old, new)
    path = folder / source.name
    path.write_text(text + OURS, encoding="utf-8")
    MADE.append(path)
    return path


def read_lock(path: Path) -> Lock:
    """The lock beside a recipe."""
    place = lock_path(path)
    return parse_lock(place.read_bytes(), name=str(place))
