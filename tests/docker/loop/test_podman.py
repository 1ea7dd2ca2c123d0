"""The second engine: podman by its Docker-compatible socket gives the same image and the same run."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kitbuild.image import HostCompiler, assemble, connect, load, verify_image
from kitbuild.image.documents import from_engine
from kitbuild.progress import Silent
from tests.docker.loop.command import eventually
from tests.image.kit import RECIPE, make_kernel, make_lock, new_store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from docker import DockerClient

    from kitbuild.image import Image
    from kitbuild.store import Store
    from tests.docker.loop.command import Kitbuild
    from tests.docker.loop.conftest import Baseline

pytestmark = [pytest.mark.docker, pytest.mark.slow_extra]
# A container or a virtual machine often may not raise its own limits, and has no systemd to make cgroups.
SETTINGS = """
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """podman's service with a storage of its own; its address, as DOCKER_HOST has it."""
    folder = tmp_path_factory.mktemp("podman")
    (folder / "containers.conf").write_text(SETTINGS)
    words = ["podman", "--root", str(folder / "root"), "--runroot", str(folder / "run")]
    address = f"unix://{folder}/podman.sock"
    environ = {**os.environ, "CONTAINERS_CONF": str(folder / "containers.conf")}
    with (folder / "log").open("wb") as log:
        service = subprocess.Popen(
            [*words, "system", "service", "--time", "0", address], env=environ, stdout=log, stderr=log
        )
    try:
        eventually("podman", lambda: _answers(folder / "podman.sock"), seconds=30)
        yield address
    finally:
        subprocess.run([*words, "rmi", "--all", "--force"], env=environ, check=False, capture_output=True)
        service.terminate()
        service.wait(timeout=30)


def _answers(place: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as link, contextlib.suppress(OSError):
        link.connect(str(place))
        return True
    return False


@pytest.fixture
def client(podman: str) -> Iterator[DockerClient]:
    client = connect({"DOCKER_HOST": podman})
    yield client
    client.close()


def test_same_image_and_same_values(kit: Kitbuild, baseline: Baseline, podman: str, tmp_path: Path) -> None:
    """The digests of the first engine's image, the values of its run; the image tells of itself as anywhere."""
    there = kit.given(DOCKER_HOST=podman)
    image = there("image", baseline.recipe)
    for key in ("image_id", "manifest_digest", "engine_id", "content_sha256", "lock_sha256", "tag"):
        assert baseline.image[key] == image[key]
    assert [layer["digest"] for layer in baseline.image["layers"]] == [layer["digest"] for layer in image["layers"]]
    assert all(layer["reused"] for layer in there("image", baseline.recipe)["layers"])
    told, here = there("image", "inspect", image["tag"]), kit("image", "inspect", image["tag"])
    assert told == here
    run = there("run", baseline.recipe, "--out", tmp_path)
    assert kit("compare", baseline.run_dir, run["run_dir"])["verdict"] == "IDENTICAL"


def build(store: Store, name: str, source: bytes) -> Image:
    lock = make_lock(store, kernels=(make_kernel(store, source=source),), name=name)
    compiler = HostCompiler(Path(sys.executable))
    return assemble(lock, recipe=RECIPE, store=store, compiler=compiler, progress=Silent())


def test_changed_kernel_is_two_layers(client: DockerClient, tmp_path: Path) -> None:
    """podman, too, takes an archive without the layers that it has, and gives the image under our digest."""
    store, name = new_store(tmp_path / "store"), f"test-{uuid.uuid4().hex[:8]}"
    first, second = build(store, name, b"x = 1\n"), build(store, name, b"x = 2\n")
    assert load(first, client, store=store, progress=Silent()).engine_id == first.config_digest
    changed = load(second, client, store=store, progress=Silent())
    assert changed.engine_id == second.config_digest
    assert changed.reused == tuple(layer.digest for layer in second.layers[:-2])
    assert verify_image(client, changed.engine_id) == second.content_sha256
    told = from_engine(client, second.tag)
    assert told is not None
    assert told.config_digest == second.config_digest
    assert [digest for _name, digest in told.layers] == [layer.digest for layer in second.layers]
