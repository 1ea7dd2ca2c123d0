"""A real registry for tests: the one that the test command has started, else one of the session's own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ENGINE = Path(__file__).parents[1] / "scripts" / "engine"


def running(state: Path) -> Iterator[str]:
    """`localhost:PORT`; `state` is a folder for one that is started here, and stopped at the end."""
    if os.environ.get("KITBUILD_TEST_REGISTRY"):
        yield os.environ["KITBUILD_TEST_REGISTRY"]
        return
    command = [str(ENGINE), "registry", "start", "--state", str(state)]
    started = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    yield started.stdout.strip()
    subprocess.run([ENGINE, "registry", "stop", "--state", state], check=True, capture_output=True)
