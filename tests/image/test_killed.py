"""Killed at any moment, or with others at work in the same store: what is in the store is valid, and the image right."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kitbuild.progress import Silent
from kitbuild.store.gc import verify
from tests.image.kit import new_store

CHECKOUT = Path(__file__).parents[2]
# Every file operation below the store is counted; at the given one the process kills itself as kill -9 would.
BUILD = """
import os, signal, sys
from pathlib import Path
store_root, last = sys.argv[1], int(sys.argv[2])
from kitbuild.image import HostCompiler, assemble
from kitbuild.progress import Silent
from tests.image.kit import RECIPE, make_lock, new_store
count = 0
def watch(event, arguments):
    global count
    if event in WATCHED and any(isinstance(a, (str, os.PathLike)) and os.fspath(a).startswith(store_root) for a in arguments):
        count += 1
        if count == last:
            os.kill(os.getpid(), signal.SIGKILL)
WATCHED = {"open", "os.rename", "os.link", "os.chmod", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "tempfile.mkdtemp"}
sys.addaudithook(watch)
store = new_store(Path(store_root))
image = assemble(make_lock(store), recipe=RECIPE, store=store, compiler=HostCompiler(Path(sys.executable)), progress=Silent())
print(count, image.manifest_digest)
"""
MOMENTS = 16


def start(root: Path, last: int = 0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", BUILD, root, str(last)],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str]:
    """How many file operations one build takes, and what it gives."""
    code, out, err = ended(start(tmp_path_factory.mktemp("whole") / "store"))
    assert code == 0, err
    count, digest = out.split()
    return int(count), digest


def test_killed_at_any_moment(whole: tuple[int, str], tmp_path: Path) -> None:
    """After kill -9 at any file operation no blob is wrong, and the next build goes on to the same image."""
    count, digest = whole
    assert count > 100
    root = tmp_path / "store"
    for moment in range(MOMENTS):
        # From the first operation to the last; the store keeps what each earlier one left.
        code, _out, err = ended(start(root, 1 + moment * (count - 1) // (MOMENTS - 1) if moment else 1))
        assert code in {0, -signal.SIGKILL}, err
        assert verify(new_store(root), progress=Silent()) == (), moment
    code, out, err = ended(start(root))
    assert code == 0, err
    assert out.split()[1] == digest
    assert verify(new_store(root), progress=Silent()) == ()


@pytest.mark.parametrize("part", [1, 2, 3])
def test_killed_in_an_empty_store(whole: tuple[int, str], tmp_path: Path, part: int) -> None:
    """The same where nothing was there before."""
    count, digest = whole
    root = tmp_path / "store"
    code, _out, err = ended(start(root, count * part // 4))
    assert code == -signal.SIGKILL, err
    assert verify(new_store(root), progress=Silent()) == ()
    code, out, err = ended(start(root))
    assert (code, out.split()[1]) == (0, digest), err


def test_three_at_once(whole: tuple[int, str], tmp_path: Path) -> None:
    """Processes that build the same image in one empty store get the same image; each layer is written once."""
    root = tmp_path / "store"
    processes = [start(root) for _ in range(3)]
    for process in processes:
        code, out, err = ended(process)
        assert (code, out.split()[1]) == (0, whole[1]), err
    assert verify(new_store(root), progress=Silent()) == ()
    assert list((root / "work").iterdir()) == []
