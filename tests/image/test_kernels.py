"""The kernels' cache works offline and read-only with the real `kernels`."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from kitbuild.errors import ImageError
from kitbuild.image import kernel_files
from kitbuild.image.kernels import kernel_entries, kernel_refs
from tests.image.kit import COMMIT, locked_file, make_kernel, make_lock, new_store

if TYPE_CHECKING:
    from pathlib import Path

    from kitbuild.lock.models import LockedKernel
    from kitbuild.store import Store

ROOT = f"kernels--org--tiny/snapshots/{COMMIT}/build/torch-universal"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return new_store(tmp_path / "store")


def test_layout(store: Store) -> None:
    """Files lie in the snapshot of their commit; there is no ref by which an unpinned name could load."""
    found = {path for path, _file, _kernel in kernel_files(make_lock(store))}
    assert found == {f"{ROOT}/__init__.py", f"{ROOT}/metadata.json"}


def test_kernel_with_two_roles(store: Store) -> None:
    """A kernel that does attention and a layer is there once."""
    kernel = make_kernel(store)
    again = kernel.model_copy(update={"role": "layers", "layers": {"RMSNorm": "org/tiny@v1:Norm"}})
    entries = kernel_entries(make_lock(store, kernels=(kernel, again)), store)
    assert [f"/kit/kernels/{ROOT}/__init__.py", f"/kit/kernels/{ROOT}/metadata.json"] == [e.path for e in entries]


def test_what_a_kernel_depends_on(store: Store) -> None:
    """A dependency has the name by which it is asked for, as a ref to the locked commit; what is pinned has none."""
    kernel = make_kernel(store)
    needed = kernel.model_copy(update={"role": "dependency", "repo": "org/needed"})
    pinned = needed.model_copy(update={"repo": "org/pinned", "revision": COMMIT})
    entries = kernel_entries(make_lock(store, kernels=(kernel, needed, pinned)), store)
    (ref,) = [entry for entry in entries if "/refs/" in entry.path]
    assert ref.path == "/kit/kernels/kernels--org--needed/refs/v1"
    assert ref.sha256 == hashlib.sha256(COMMIT.encode()).hexdigest()


def test_two_digests_for_one_file(store: Store) -> None:
    """A lock with two contents for one file of a commit is refused."""
    kernels = (make_kernel(store), make_kernel(store, source=b"other"))
    with pytest.raises(ImageError, match=r"the lock has build/torch-universal/__init__\.py twice"):
        kernel_entries(make_lock(store, kernels=kernels), store)


LOAD = """
import sys
from kernels import get_kernel
module = get_kernel("org/tiny", revision=sys.argv[1], backend="cpu")
print(module.answer(), module.__file__)
"""


def unpack(store: Store, root: Path, kernels: tuple[LockedKernel, ...] | None = None) -> None:
    lock = make_lock(store, kernels=kernels)
    files = {path: store.path(file.sha256).read_bytes() for path, file, _kernel in kernel_files(lock)}
    for path, data in {**files, **{path: commit.encode() for path, commit in kernel_refs(lock).items()}}.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        target.chmod(0o444)
    for folder in (*root.rglob("*"), root):
        if folder.is_dir():
            folder.chmod(0o555)


def get_kernel(root: Path, revision: str) -> subprocess.CompletedProcess[str]:
    """By the real library, offline, as a user who may write nothing there."""
    python = os.environ["KITBUILD_TRAIN_PYTHON"]
    return subprocess.run(
        [python, "-B", "-W", "ignore", "-c", LOAD, revision],
        env={"KERNELS_CACHE": str(root), "HF_HUB_OFFLINE": "1", "HF_HOME": "/nonexistent", "PATH": os.defpath},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.train
def test_real_library_loads_it(store: Store, tmp_path: Path) -> None:
    """`kernels.get_kernel` loads the commit offline from a read-only cache, and writes nothing."""
    root = tmp_path / "cache"
    unpack(store, root)
    before = sorted(root.rglob("*"))
    done = get_kernel(root, COMMIT)
    assert done.stdout.split() == ["42", f"{root}/{ROOT}/__init__.py"], done.stderr
    assert sorted(root.rglob("*")) == before


@pytest.mark.train
@pytest.mark.parametrize("revision", ["v1", "main", "d" * 40])
def test_real_library_loads_nothing_else(store: Store, tmp_path: Path, revision: str) -> None:
    """A branch or another commit does not load."""
    root = tmp_path / "cache"
    unpack(store, root)
    done = get_kernel(root, revision)
    assert done.returncode == 1
    assert "Cannot find a local snapshot for org/tiny" in done.stderr


@pytest.mark.train
def test_real_library_loads_what_a_kernel_needs(store: Store, tmp_path: Path) -> None:
    """A kernel that names another by version finds it offline, at the locked commit."""
    root = tmp_path / "cache"
    metadata = {
        "name": "tiny",
        "id": "tiny2",
        "version": 1,
        "license": "Apache-2.0",
        "backend": {"type": "cpu"},
        "python-depends": [],
        "kernel-depends": [{"repo-id": "org/needed", "version": 1}],
    }
    source = b'from kernels import get_kernel_dep\n\nanswer = get_kernel_dep("org/needed").answer\n'
    files = {"__init__.py": source, "metadata.json": json.dumps(metadata).encode()}
    locked = tuple(locked_file(store, f"build/torch-universal/{name}", data) for name, data in files.items())
    kernel = make_kernel(store).model_copy(update={"files": locked})
    needed = make_kernel(store).model_copy(update={"role": "dependency", "repo": "org/needed", "commit": "e" * 40})
    unpack(store, root, (kernel, needed))
    done = get_kernel(root, COMMIT)
    assert done.stdout.split()[:1] == ["42"], done.stderr
