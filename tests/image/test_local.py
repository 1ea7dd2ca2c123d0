"""The image's files as a directory, for the local engine."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kitbuild.errors import ImageError
from kitbuild.image import HostCompiler, materialise
from kitbuild.image.local import damaged, find_python
from kitbuild.progress import Silent
from tests.image.kit import RECIPE, SITE, locked_wheel, make_kernel, make_lock, make_wheel, new_store

if TYPE_CHECKING:
    from kitbuild.lock.models import Lock
    from kitbuild.store import Store

PYTHON = Path(sys.executable).resolve()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return new_store(tmp_path / "store")


def make(lock: Lock, store: Store, python: Path = PYTHON) -> Path:
    return materialise(
        lock, recipe=RECIPE, python=python, store=store, compiler=HostCompiler(python), progress=Silent()
    )


def test_content_is_what_is_there(store: Store) -> None:
    """content.json lists each file with its digest, compiled modules too, and each link."""
    root = make(make_lock(store, bake=("model",)), store)
    content = json.loads((root / "kit/content.json").read_bytes())
    for path, sha256 in content["files"].items():
        assert hashlib.sha256((root / path[1:]).read_bytes()).hexdigest() == sha256
    for path, target in content["links"].items():
        assert str((root / path[1:]).readlink()) == target
    places = [*(root / "kit").rglob("*"), *(root / "opt/kit/").resolve().rglob("*")]
    kit = (root / "opt/kit").resolve()
    found = {
        f"/opt/kit/{place.relative_to(kit)}" if place.is_relative_to(kit) else f"/{place.relative_to(root)}"
        for place in places
        if place.is_file() and not place.is_symlink()
    }
    assert found - {"/kit/content.json"} == set(content["files"])
    assert any(path.endswith(".pyc") for path in found)
    assert not (root / "inputs").exists()


def test_interpreter_runs_the_packages(store: Store) -> None:
    """bin/python is the given Python in a virtual environment that has the wheels and the guest."""
    root = make(make_lock(store), store)
    code = "import sys, tool, kitbuild.errors as e; print(sys.prefix, e.__file__)"
    python = root / "opt/kit/bin/python"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.split() == [f"{root}/opt/kit", f"{root}{SITE}/kitbuild/errors.py"]


def test_made_once(store: Store) -> None:
    """The same lock gives the same directory, untouched; another kernel keeps the environment."""
    first = make(make_lock(store), store)
    inode = first.stat().st_ino
    assert make(make_lock(store), store) == first
    assert first.stat().st_ino == inode
    other = make(make_lock(store, kernels=(make_kernel(store, source=b"x = 1\n"),)), store)
    assert other != first
    assert (other / "opt/kit").resolve() == (first / "opt/kit").resolve()


def test_nothing_half_made(store: Store) -> None:
    """A failure leaves no directory behind."""
    wheels = [make_wheel(name, {"shared.py": name.encode()}) for name in ("aa", "bb")]
    with pytest.raises(ImageError, match="both bring"):
        make(make_lock(store, tuple(locked_wheel(store, *wheel) for wheel in wheels)), store)
    assert not (store.root / "envs").exists()
    assert list((store.root / "work").iterdir()) == []


@pytest.mark.parametrize("harm", ["byte", "missing", "link"])
def test_a_damaged_environment_is_found_and_made_again(store: Store, harm: str) -> None:
    """A changed or missing file, or a link that leads elsewhere, is told, removed on request, and laid out anew."""
    root = make(make_lock(store), store)
    assert damaged(store, progress=Silent(), repair=False) == ()
    kit = (root / "opt/kit").resolve()
    victim = kit / ("bin/python" if harm == "link" else "pyvenv.cfg")
    content = victim.read_bytes()
    victim.unlink()
    if harm == "byte":
        victim.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    elif harm == "link":
        victim.symlink_to("/bin/false")
    (problem,) = damaged(store, progress=Silent(), repair=False)
    assert f"{victim.name} is not what was laid out" in str(problem)
    assert len(damaged(store, progress=Silent(), repair=True)) == 1
    assert make(make_lock(store), store) == root
    assert victim.read_bytes() == content
    assert damaged(store, progress=Silent(), repair=False) == ()


def test_python_of_another_version(store: Store) -> None:
    """A Python of another minor version is refused: the wheels are not for it."""
    lock = make_lock(store)
    other = lock.model_copy(update={"base": lock.base.model_copy(update={"python": "3.99.1"})})
    with pytest.raises(ImageError) as caught:
        make(other, store)
    minor = ".".join(str(part) for part in sys.version_info[:2])
    assert caught.value.message == f"{PYTHON} is Python {minor}, the lock's packages are for 3.99"


def test_no_python(store: Store) -> None:
    """What is no Python is refused by name."""
    with pytest.raises(ImageError, match="/nonexistent/python is not a Python that runs"):
        make(make_lock(store), store, Path("/nonexistent/python"))


def test_without_wheels(store: Store) -> None:
    """For a given environment only guest, kernels and lock are laid out, whatever its version."""
    lock = make_lock(store)
    lock = lock.model_copy(update={"base": lock.base.model_copy(update={"python": "3.99.1"})})
    root = materialise(
        lock,
        recipe=RECIPE,
        python=PYTHON,
        wheels=False,
        store=store,
        compiler=HostCompiler(PYTHON),
        progress=Silent(),
    )
    files = set(json.loads((root / "kit/content.json").read_bytes())["files"])
    assert "/opt/kit/lib/python3.99/site-packages/kitbuild/errors.py" in files
    assert not [path for path in files if "tool" in path or "torch/" in path or path.endswith(".pyc")]


def test_find_python() -> None:
    """The Python that is found is of the asked version and no virtual environment's."""
    found = find_python(".".join(str(part) for part in sys.version_info[:3]), os.environ)
    code = "import sys; print(sys.version_info[:2], sys.prefix == sys.base_prefix)"
    done = subprocess.run([found, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{sys.version_info[:2]} True"


def test_find_no_python(tmp_path: Path) -> None:
    """A version that is nowhere is named, with how to get it."""
    with pytest.raises(ImageError) as caught:
        find_python("3.99.1", {"PATH": str(tmp_path), "HOME": str(tmp_path)})
    assert caught.value.message == "there is no Python 3.99 on this machine, and the lock's packages are for it"
    assert "uv python install 3.99" in str(caught.value.hint)
