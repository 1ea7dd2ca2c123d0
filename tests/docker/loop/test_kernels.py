"""Two kernels of the test Hub, pinned, in the image, used in training without any Hub."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.docker.loop.recipes import ATTENTION, KERNELS, LAYERS, read_lock, recipe
from tests.hub import kernel_repos
from tests.hub.fixtures import standard_hub

if TYPE_CHECKING:
    import docker

    from kitbuild.store import Store
    from tests.docker.loop.command import Kitbuild

pytestmark = pytest.mark.docker
SCALE = b"scale = width**-0.5 if softmax_scale is None else softmax_scale\n"
OTHER_ROUNDING = SCALE + b"    scale = scale * (1.0 + 2.0**-20)\n"


@dataclass(frozen=True, kw_only=True)
class Locked:
    """A recipe with its lock and image; the Hub that made them is gone."""

    recipe: Path
    commits: dict[str, str]
    image: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The pinned recipe, and two with another attention kernel."""

    kit: Kitbuild
    v2: Locked
    v1: Locked
    moved: Locked
    run: dict[str, Any]


@pytest.fixture(scope="module")
def kernels(kit: Kitbuild, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    folder = tmp_path_factory.mktemp("kernels")
    with standard_hub(folder / "hub") as hub:
        there = kit.given(**hub.environment(folder / "hf"))

        def locked(name: str, *, version: int = 2) -> Locked:
            path = recipe(folder / name, KERNELS, changed={f"{ATTENTION}@v2": f"{ATTENTION}@v{version}"})
            lock = there("lock", path)
            assert (lock["schema"], lock["changed"]) == ("kitbuild.lock/1", True)
            commits = {ATTENTION: hub.sha(ATTENTION, f"v{version}"), LAYERS: hub.sha(LAYERS, "v3")}
            return Locked(recipe=path, commits=commits, image=there("image", path))

        v2, v1 = locked("v2"), locked("v1", version=1)
        package = kernel_repos.attention()
        assert SCALE in package["flash_attn.py"]
        package["flash_attn.py"] = package["flash_attn.py"].replace(SCALE, OTHER_ROUNDING)
        hub.commit(ATTENTION, kernel_repos.variant_files("flash-attn2", "torch-cpu", package, version=2), "v2")
        moved = locked("moved")
        assert v2.commits[ATTENTION] != moved.commits[ATTENTION]
        # The branch moved, and the lock does not: a newer upstream makes no lock stale.
        assert there("lock", v2.recipe)["changed"] is False
        assert there("lock", v2.recipe, "--check")["changed"] is False
    gone = kit.given(HF_ENDPOINT=hub.url)
    return Kernels(kit=gone, v2=v2, v1=v1, moved=moved, run=gone("run", v2.recipe, "--out", folder / "runs"))


def manifest(run: dict[str, Any]) -> dict[str, Any]:
    found = json.loads((Path(run["run_dir"]) / "manifest.json").read_bytes())
    assert isinstance(found, dict)
    return found


def test_lock_holds_commits_and_variants(kernels: Kernels, store: Store) -> None:
    """The lock names commit, variant and every file's digest of both kernels, and what it did not take."""
    lock = read_lock(kernels.v2.recipe)
    found = {kernel.repo: kernel for kernel in lock.kernels}
    assert kernels.v2.commits == {repo: kernel.commit for repo, kernel in found.items()}
    assert {(kernel.variant, kernel.trusted) for kernel in lock.kernels} == {("torch-cpu", True)}
    assert {item.variant for item in found[ATTENTION].rejected} == set(kernel_repos.ATTENTION_VARIANTS)
    for kernel in lock.kernels:
        assert {file.path.split("/")[1] for file in kernel.files} == {"torch-cpu"}
        assert all(store.path(file.sha256).stat().st_size == file.size for file in kernel.files)
    assert found[LAYERS].layers == {"RMSNorm": "LigerRMSNorm"}


def test_kernel_layer_holds_exactly_the_locked_files(
    kernels: Kernels, engine: docker.DockerClient, store: Store
) -> None:
    """One layer of the image in the engine is the kernels', and holds the locked variants and nothing else."""
    (layer,) = [layer for layer in kernels.v2.image["layers"] if layer["name"] == "kernels"]
    place = {kernel.repo: kernel for kernel in read_lock(kernels.v2.recipe).kernels}
    expected = {
        f"kit/kernels/kernels--{repo.replace('/', '--')}/snapshots/{kernel.commit}/{file.path}": file.sha256
        for repo, kernel in place.items()
        for file in kernel.files
    }
    assert layer["digest"] in engine.images.get(kernels.v2.image["engine_id"]).attrs["RootFS"]["Layers"]
    with tarfile.open(store.path(layer["digest"].removeprefix("sha256:"))) as tar:
        found = {item.name.lstrip("/") for item in tar if item.isfile()}
    assert expected.keys() == {name for name in found if "/snapshots/" in name}
    assert all("/trees/" in name and name.startswith("kit/kernels/") for name in found - expected.keys())
    seen = in_image(engine, kernels.v2.image["engine_id"], "/kit/kernels")
    assert found == {f"kit/{name}" for name in seen}
    assert expected.items() <= {(f"kit/{name}", sha256) for name, sha256 in seen.items()}


def in_image(engine: docker.DockerClient, image: str, folder: str) -> dict[str, str]:
    """sha256 of every file below a folder, as the engine itself gives them out."""
    container = engine.containers.create(image)
    try:
        chunks, _ = container.get_archive(folder)
        with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as tar:
            files = ((item.name, tar.extractfile(item)) for item in tar if item.isfile())
            return {name: hashlib.sha256(stream.read()).hexdigest() for name, stream in files if stream}
    finally:
        container.remove()


def test_only_the_kernel_layer_is_new(kernels: Kernels) -> None:
    """A recipe with another kernel shares every layer but the kernels' and the lock's."""
    mine, other = (
        {layer["name"]: layer["digest"] for layer in locked.image["layers"]} for locked in (kernels.v2, kernels.moved)
    )
    assert {name for name in mine if mine[name] != other[name]} == {"kernels", "lock"}


def test_training_uses_the_locked_kernels(kernels: Kernels) -> None:
    """With the Hub stopped and no network, both kernels ran from their locked commits: the archive counts the calls."""
    found = manifest(kernels.run)
    assert found["environment"]["hardening"]["network"] == "none"
    used = {kernel["repo"]: kernel for kernel in found["kernels"]}
    assert kernels.v2.commits == {repo: kernel["commit"] for repo, kernel in used.items()}
    assert all(kernel["calls"]["0"] > 0 for kernel in used.values())
    assert ATTENTION in found["attention"]["used"]


def test_reproduce_without_the_hub(kernels: Kernels, tmp_path: Path) -> None:
    """The archive runs again to the same values with no Hub."""
    again = kernels.kit("reproduce", kernels.run["run_dir"], "--out", tmp_path)
    assert (again["verdict"], again["causes"]) == ("IDENTICAL", [])


def test_moved_commit_differs(kernels: Kernels, tmp_path: Path) -> None:
    """A kernel that rounds differently is exit 8 at its step, and the kernel is the first cause, by commit."""
    other = kernels.kit("run", kernels.moved.recipe, "--out", tmp_path)
    verdict = kernels.kit("compare", kernels.run["run_dir"], other["run_dir"], exit_code=8)
    assert verdict["verdict"] == "DIFFERENT"
    assert verdict["first_difference"]["step"] == 1
    assert verdict["first_difference"]["field"] in {"loss", "grad_norm"}
    first = verdict["causes"][0]
    assert (first["kind"], first["name"]) == ("kernel", ATTENTION)
    assert kernels.v2.commits[ATTENTION][:12] in first["left"]
    assert kernels.moved.commits[ATTENTION][:12] in first["right"]


def test_other_version_of_the_same_code_is_identical(kernels: Kernels, tmp_path: Path) -> None:
    """The verdict is about values: version 1 holds the same code, so it is IDENTICAL, and the other kernel is named."""
    other = kernels.kit("run", kernels.v1.recipe, "--out", tmp_path)
    verdict = kernels.kit("compare", kernels.run["run_dir"], other["run_dir"])
    assert verdict["verdict"] == "IDENTICAL"
    (note,) = [note for note in verdict["notes"] if f"kernel {ATTENTION}" in note]
    assert kernels.v2.commits[ATTENTION][:12] in note
    assert kernels.v1.commits[ATTENTION][:12] in note
