"""Print the Python of a recipe's locked environment, laid out as `--engine local` does; used by scripts/test."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kitbuild import recipe as recipes
from kitbuild.flow.building import fetch_all
from kitbuild.flow.context import Context
from kitbuild.flow.locking import ensure_lock
from kitbuild.image import HostCompiler
from kitbuild.image.local import find_python, materialise
from kitbuild.progress import Silent
from kitbuild.store import Store


def main() -> None:
    """Lay the environment out and print the path of its Python."""
    context = Context(environ=os.environ, store=Store.open(os.environ), progress=Silent())
    loaded = recipes.read(Path(sys.argv[1]))
    lock = ensure_lock(context, loaded)
    fetch_all(context, lock, loaded, base=False)
    python = find_python(lock.base.python, context.environ)
    root = materialise(
        lock,
        recipe=loaded.content,
        python=python,
        store=context.store,
        compiler=HostCompiler(python),
        progress=context.progress,
    )
    print(root / "opt/kit/bin/python")


if __name__ == "__main__":
    main()
