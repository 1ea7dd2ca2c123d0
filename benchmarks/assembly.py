"""Cold assembly, timed apart from the engine's load, and what it is compared with: uv installing the same wheels."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from uv import find_uv_bin

from kitbuild.image import Image, Loaded, assemble, base_compiler, load
from kitbuild.progress import Silent

if TYPE_CHECKING:
    from pathlib import Path

    from kitbuild.flow.context import Context
    from kitbuild.lock.models import Lock
    from kitbuild.store import Store


def into_engine(context: Context, lock: Lock, recipe: bytes) -> tuple[Image, Loaded, dict[str, float]]:
    """Assemble and load; seconds of each."""
    store, began = context.store, time.monotonic()
    compiler = base_compiler(lock.base, context.client, store=store, progress=Silent())
    made = assemble(lock, recipe=recipe, store=store, compiler=compiler, progress=Silent())
    assembled = time.monotonic()
    loaded = load(made, context.client(), store=store, progress=Silent())
    ended = time.monotonic()
    return made, loaded, {"assembly": round(assembled - began, 3), "load": round(ended - assembled, 3)}


def uv_install(lock: Lock, store: Store, folder: Path) -> float:
    """Seconds of `uv pip install --compile-bytecode` of the lock's wheels from files, with an empty cache."""
    wheels, environment = folder / "uv-wheels", folder / "uv-environment"
    wheels.mkdir()
    for wheel in lock.wheels:
        os.link(store.path(wheel.sha256), wheels / wheel.file)
    uv, environ = find_uv_bin(), {**os.environ, "UV_CACHE_DIR": str(folder / "uv-cache"), "UV_OFFLINE": "1"}
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, environment], env=environ, check=True)
    command = [uv, "pip", "install", "--quiet", "--python", environment / "bin/python", "--no-deps", "--no-index"]
    command += ["--compile-bytecode", *sorted(wheels.iterdir())]
    began = time.monotonic()
    subprocess.run(command, env=environ, check=True)
    seconds = time.monotonic() - began
    for place in (wheels, environment, folder / "uv-cache"):
        shutil.rmtree(place)
    return round(seconds, 3)
