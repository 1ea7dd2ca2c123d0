"""The image is a function of the lock: whatever else differs between two machines, the digests do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kitbuild.image import HostCompiler, assemble
from kitbuild.progress import Silent
from tests.image.kit import RECIPE, locked_wheel, make_lock, make_wheel, new_store

if TYPE_CHECKING:
    from kitbuild.store import Store

CHECKOUT = Path(__file__).parents[2]
# What a machine is to a build: its clock, its processors, how its store was filled, what is in it already.
BUILD = """
import json, os, sys, time
from pathlib import Path
folder, facts = Path(sys.argv[1]), json.loads(sys.argv[2])
if facts.get("one_cpu"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
shift = facts.get("clock_seconds", 0)
real, real_ns = time.time, time.time_ns
time.time, time.time_ns = lambda: real() + shift, lambda: real_ns() + shift * 10**9
from kitbuild.image import HostCompiler, assemble, write_oci
from kitbuild.progress import Silent
from kitbuild.store import sha256_file
from tests.image.kit import RECIPE, make_lock, new_store
store = new_store(folder / "store")
compiler = HostCompiler(Path(sys.executable))
def build(lock):
    return assemble(lock, recipe=RECIPE, store=store, compiler=compiler, progress=Silent())
if facts.get("full"):
    build(make_lock(store, kernels=(), name="other"))
lock = make_lock(store, bake=("model",))
if "file_times" in facts:
    for path in store.root.rglob("*"):
        os.utime(path, (facts["file_times"],) * 2)
image = build(lock)
write_oci(image, folder / "image.tar")
print(json.dumps({"config": image.config_digest, "manifest": image.manifest_digest,
                  "layers": {layer.name: layer.digest for layer in image.layers},
                  "archive": sha256_file(folder / "image.tar")[0]}))
"""


def built(
    folder: Path,
    *,
    facts: dict[str, Any] | None = None,
    variables: dict[str, str] | None = None,
    umask: int = 0o022,
    within: tuple[str, ...] = (),
) -> dict[str, Any]:
    folder.mkdir()
    done = subprocess.run(
        [*within, sys.executable, "-c", BUILD, folder, json.dumps(facts or {})],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT), **(variables or {})},
        umask=umask,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return built(tmp_path_factory.mktemp("machine") / "here")


DIFFERENCES: dict[str, dict[str, Any]] = {
    "a strict umask": {"umask": 0o077},
    "an open umask": {"umask": 0},
    "another time zone": {"variables": {"TZ": "Asia/Kathmandu"}},
    "another locale": {"variables": {"LANG": "tr_TR.UTF-8", "LC_ALL": "C", "PYTHONUTF8": "0"}},
    "another hash seed": {"variables": {"PYTHONHASHSEED": "12345"}},
    "a date of its own": {"variables": {"SOURCE_DATE_EPOCH": "86400"}},
    "another user": {
        "within": ("unshare", "--user", "--map-user=12345", "--map-group=12345"),
        "variables": {"HOME": "/home/somebody", "USER": "somebody", "LOGNAME": "somebody"},
    },
    "one processor": {"facts": {"one_cpu": True}},
    "a clock ten years ahead": {"facts": {"clock_seconds": 315_360_000}},
    "old files": {"facts": {"file_times": 1}},
    "a store that holds another image": {"facts": {"full": True}},
}


@pytest.mark.parametrize("name", sorted(DIFFERENCES))
def test_what_differs_between_machines_does_not_show(name: str, here: dict[str, Any], tmp_path: Path) -> None:
    """One difference at a time: the same config, manifest, layers and OCI archive, to the digest."""
    assert built(tmp_path / "there", **DIFFERENCES[name]) == here


def test_all_of_it_at_once(here: dict[str, Any], tmp_path: Path) -> None:
    """Every difference together, and another temporary directory."""
    facts: dict[str, Any] = {}
    variables: dict[str, str] = {"TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir()
    for difference in DIFFERENCES.values():
        facts |= difference.get("facts", {})
        variables |= difference.get("variables", {})
    within = DIFFERENCES["another user"]["within"]
    there = built(tmp_path / "there", facts=facts, variables=variables, umask=0o027, within=within)
    assert there == here
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return new_store(tmp_path / "store")


def test_the_order_of_wheels_does_not_show(store: Store, tmp_path: Path) -> None:
    """Wheels in any order, compiled in any company, give the same layers of wheels."""
    wheels = tuple(
        locked_wheel(store, *make_wheel(name, {f"{name}/__init__.py": f"x = {{'{name}', 'y', (1, 2)}}\n".encode()}))
        for name in ("torch", "alpha", "beta", "gamma")
    )
    compiler = HostCompiler(Path(sys.executable))

    def layers(place: Store, order: tuple[int, ...]) -> dict[str, str]:
        for wheel in wheels:
            place.add_file(store.path(wheel.sha256))
        lock = make_lock(place, tuple(wheels[index] for index in order))
        image = assemble(lock, recipe=RECIPE, store=place, compiler=compiler, progress=Silent())
        return {layer.name: layer.digest for layer in image.layers if layer.name != "lock"}

    first = layers(store, (0, 1, 2, 3))
    assert layers(new_store(tmp_path / "reversed"), (3, 2, 1, 0)) == first
    place = new_store(tmp_path / "one by one")
    for index in range(4):
        layers(place, (index,))
    assert layers(place, (2, 0, 3, 1)) == first
