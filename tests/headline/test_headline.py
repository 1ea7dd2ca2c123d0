"""`kitbuild image recipes/qwen3-8b.yaml`, with the recipe as it is committed, for both CUDA targets.

The Hub, the package index and the CUDA image under the base are stand-ins; the command, the engine, the registry and
everything in between are real.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import tarfile
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import pytest

from tests.headline.conftest import Done, Machine, World, tag_kept

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.docker, pytest.mark.slow]

RECIPES = {"cuda129": "qwen3-8b.yaml", "cuda128": "qwen3-8b-cuda128.yaml"}
ATTENTION = {"cuda129": "torch28-cxx11-cu129-x86_64-linux", "cuda128": "torch210-cxx11-cu128-x86_64-linux"}
TORCH = {"cuda129": "2.8.0+cu129", "cuda128": "2.10.0"}


@dataclass(frozen=True, kw_only=True)
class Headline:
    """A base made and shared by one machine, and the command run on another."""

    target: str
    base: dict[str, Any]
    machine: Machine
    done: Done

    @property
    def recipe(self) -> str:
        return RECIPES[self.target]

    @property
    def lock_path(self) -> Path:
        return self.machine.file(self.recipe.replace(".yaml", ".lock.json"))

    @property
    def lock(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads(self.lock_path.read_bytes())
        return loaded

    def layer(self, name: str) -> Path:
        """The layer's tar in the store."""
        (found,) = [layer for layer in self.done.output["layers"] if layer["name"] == name]
        digest = found["digest"].removeprefix("sha256:")
        (path,) = (self.machine.place / "store" / "blobs").rglob(digest)
        return path


@pytest.fixture(scope="session", params=["cuda129", "cuda128"])
def headline(request: pytest.FixtureRequest, world: World) -> Iterator[Headline]:
    target = request.param
    name = f"kitbuild/base-{target}"
    maker = world.machine("maker")
    with tag_kept(world.client, name):
        reference = f"{world.registry}/{name}"
        made = maker.kitbuild("base", "build", target, "--upstream", world.upstream, "--push", reference)
    assert made.code == 0, made.errors
    with tag_kept(world.client, name):  # found in the registry, not in the engine
        machine = world.machine("first", RECIPES[target])
        done = machine.kitbuild("image", RECIPES[target])
        assert done.code == 0, done.errors
        world.images += [done.output["tag"], f"kitbuild/base:{made.output['config_digest'][7:19]}"]
        yield Headline(target=target, base=made.output, machine=machine, done=done)


def kernel(lock: dict[str, Any], role: str) -> dict[str, Any]:
    (found,) = [item for item in lock["kernels"] if item["role"] == role]
    kernel: dict[str, Any] = found
    return kernel


def test_what_it_prints(headline: Headline, world: World) -> None:
    """One object with the image's two digests, the engine's id of it, the layers and the lock's digest."""
    output = headline.done.output
    assert output["schema"] == "kitbuild.image/1"
    image = world.client.images.get(output["tag"])
    assert output["engine_id"] == image.id
    assert image.id in {output["image_id"], output["manifest_digest"]}
    lock_sha256 = hashlib.sha256(headline.lock_path.read_bytes()).hexdigest()
    assert output["lock_sha256"] == lock_sha256
    assert output["tag"] == f"kitbuild/{headline.lock['name']}:{lock_sha256[:12]}"
    assert [layer["digest"] for layer in output["layers"]] == image.attrs["RootFS"]["Layers"]
    assert image.labels["org.kitbuild.lock"] == lock_sha256
    assert image.labels["org.kitbuild.content"] == output["content_sha256"]
    assert image.labels["org.kitbuild.base.cuda"] == {"cuda129": "12.9", "cuda128": "12.8"}[headline.target]
    environment = dict(entry.split("=", 1) for entry in image.attrs["Config"]["Env"])
    assert environment["HF_HUB_OFFLINE"] == environment["TRANSFORMERS_OFFLINE"] == "1"
    assert environment["KERNELS_CACHE"] == "/kit/kernels"
    assert image.attrs["Config"]["Entrypoint"] == ["/opt/kit/bin/kit"]
    assert image.attrs["Config"]["User"] == "10001:10001"


def test_the_layers_in_order(headline: Headline) -> None:
    """Base, then groups of wheels with torch's first, the guest, the kernels, the lock."""
    names = [layer["name"] for layer in headline.done.output["layers"]]
    below = len(headline.lock["base"]["diff_ids"])
    assert all(name.startswith("base") for name in names[:below])
    assert names[-3:] == ["guest", "kernels", "lock"]
    assert all(name.startswith("wheels") for name in names[below:-3])
    digests = [layer["digest"] for layer in headline.done.output["layers"]]
    assert digests[:below] == headline.lock["base"]["diff_ids"]


def test_the_base_by_digest(headline: Headline) -> None:
    """The lock names the base that was pushed, by digest, with what it holds: Python, glibc, CUDA, packages."""
    base = headline.lock["base"]
    assert {key: base[key] for key in ("name", "manifest_digest", "config_digest", "python", "glibc", "cuda")} == {
        key: headline.base[key] for key in ("name", "manifest_digest", "config_digest", "python", "glibc", "cuda")
    }
    assert base["cuda"] == {"cuda129": "12.9", "cuda128": "12.8"}[headline.target]
    assert base["python"].startswith("3.11.")
    assert base["glibc"] == "2.36"
    assert len(base["packages"]) == headline.base["packages"] > 50


def test_the_variants(headline: Headline, world: World) -> None:
    """Each kernel is at its branch's commit, in the build for the target's torch and CUDA; the others have reasons."""
    attention, layers = kernel(headline.lock, "attention"), kernel(headline.lock, "layers")
    assert attention["variant"] == ATTENTION[headline.target]
    assert attention["revision"] == "v2"
    assert attention["commit"] == world.hub.sha("kernels-community/flash-attn2", "v2", kind="kernel")
    assert attention["trusted"] is True
    rejected = {item["variant"]: item["reason"] for item in attention["rejected"]}
    assert len(rejected) == 8
    assert attention["variant"] not in rejected
    assert all(rejected.values())
    assert layers["variant"] == "torch-cuda"
    assert layers["commit"] == world.hub.sha("kernels-community/liger-kernels", "v3", kind="kernel")
    assert layers["layers"] == {"RMSNorm": "LigerRMSNorm"}
    assert {item["variant"] for item in layers["rejected"]} == {"torch-cpu"}


def test_the_wheels(headline: Headline) -> None:
    """torch is the build for the target's CUDA, every wheel fits the base's Python, and no address is in the lock."""
    wheels = {wheel["name"]: wheel for wheel in headline.lock["wheels"]}
    assert wheels["torch"]["version"] == TORCH[headline.target]
    assert wheels["torch"]["file"].endswith("cp311-cp311-manylinux_2_28_x86_64.whl")
    assert wheels["torch"]["index"] == {"cuda129": "pytorch-cu129", "cuda128": "pypi"}[headline.target]
    assert (
        wheels["nvidia-cuda-runtime-cu12"]["version"] == {"cuda129": "12.9.79", "cuda128": "12.8.90"}[headline.target]
    )
    assert {"transformers", "trl", "kernels", "liger-kernel", "peft", "accelerate", "datasets"} <= wheels.keys()
    text = headline.lock_path.read_text()
    assert "127.0.0.1" not in text
    assert "localhost" not in text
    assert "://" not in text


def test_the_arguments_in_force(headline: Headline) -> None:
    """Every SFTConfig argument is in the lock with its origin, the recipe's among them."""
    arguments = headline.lock["defaults"]["arguments"]
    assert arguments["packing"] == {"value": True, "origin": "recipe"}
    assert arguments["gradient_accumulation_steps"] == {"value": 8, "origin": "kitbuild"}
    assert arguments["liger_kernel_config"]["value"]["fused_linear_cross_entropy"] is True
    assert arguments["adam_beta1"] == {"value": 0.9, "origin": "library"}


def test_only_the_locked_kernels(headline: Headline) -> None:
    """The kernels layer holds the files of the two locked variants, byte for byte, and nothing else."""
    expected = {
        f"kit/kernels/kernels--{item['repo'].replace('/', '--')}/snapshots/{item['commit']}/{file['path']}": file[
            "size"
        ]
        for item in headline.lock["kernels"]
        for file in item["files"]
    }
    with tarfile.open(headline.layer("kernels")) as archive:
        held = {member.name.lstrip("/"): member.size for member in archive if member.isfile()}
    assert held == expected
    assert any(name.endswith(".so") for name in held)
    assert {name.split("/build/")[1].split("/")[0] for name in held} == {ATTENTION[headline.target], "torch-cuda"}


def test_the_lock_layer(headline: Headline) -> None:
    """The last layer holds the lock, the recipe as it is in the repository, and the list of all files with digests."""
    with tarfile.open(headline.layer("lock")) as archive:
        files = {member.name.lstrip("/"): read(archive, member) for member in archive if member.isfile()}
    assert files["kit/lock.json"] == headline.lock_path.read_bytes()
    assert files["kit/recipe.yaml"] == headline.machine.file(headline.recipe).read_bytes()
    content = json.loads(files["kit/content.json"])
    assert {file["sha256"] for item in headline.lock["kernels"] for file in item["files"]} <= set(
        content["files"].values()
    )


def read(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    stream: IO[bytes] | None = archive.extractfile(member)
    assert stream is not None
    return stream.read()


def test_nothing_is_baked(headline: Headline, world: World) -> None:
    """Model and data are no layers, as `bake` names none; of the variants that were not taken no binary was fetched."""
    names = [layer["name"] for layer in headline.done.output["layers"]]
    assert not [name for name in names if "model" in name or "data" in name]
    lost = {item["variant"] for item in kernel(headline.lock, "attention")["rejected"]} - set(ATTENTION.values())
    assert not [
        request.path for request in world.hub.requests if any(f"/build/{name}/" in request.path for name in lost)
    ]


def test_the_same_image_from_nothing(headline: Headline, world: World) -> None:
    """Another machine with nothing but the recipe makes the same lock and image, whatever its clock, mask and seed."""
    machine = world.machine("second", headline.recipe)
    strange = {"TZ": "Pacific/Kiritimati", "PYTHONHASHSEED": "77", "LC_ALL": "C", "SOURCE_DATE_EPOCH": "1"}
    forget(headline, world)
    done = machine.kitbuild("image", headline.recipe, umask=0o077, variables=strange)
    assert done.code == 0, done.errors
    assert machine.file(headline.lock_path.name).read_bytes() == headline.lock_path.read_bytes()
    for key in ("image_id", "manifest_digest", "engine_id", "content_sha256", "lock_sha256"):
        assert done.output[key] == headline.done.output[key]


def forget(headline: Headline, world: World) -> None:
    """Let the engine know neither the image nor its base."""
    for image in (headline.done.output["tag"], headline.base["config_digest"]):
        world.client.images.remove(image, force=True)


def test_a_tag_that_moved(headline: Headline, world: World) -> None:
    """Where the base's tag means another image by now, the lock still gives the same one, from the registry by digest."""
    name = f"kitbuild/base-{headline.target}"
    reference = f"{world.registry}/{name}"
    other = world.machine("other-maker")
    with tag_kept(world.client, name), another_name(world, world.upstream) as upstream:
        moved = other.kitbuild("base", "build", headline.target, "--upstream", upstream, "--push", reference)
    assert moved.code == 0, moved.errors
    assert moved.output["manifest_digest"] != headline.base["manifest_digest"]
    machine = world.machine("third", headline.recipe)
    machine.file(headline.lock_path.name).write_bytes(headline.lock_path.read_bytes())
    forget(headline, world)
    done = machine.kitbuild("image", headline.recipe, "--verbose")
    assert done.code == 0, done.errors
    assert f"base {name} @ {headline.base['manifest_digest']} (registry localhost" in done.errors
    assert done.output["image_id"] == headline.done.output["image_id"]
    assert machine.file(headline.lock_path.name).read_bytes() == headline.lock_path.read_bytes()


@contextlib.contextmanager
def another_name(world: World, image: str) -> Iterator[str]:
    name = image.replace("/cuda:", "/cuda-other:")
    world.client.images.get(image).tag(*name.split(":"))
    yield name
    world.client.images.remove(name)


def test_a_base_that_is_nowhere(headline: Headline, world: World) -> None:
    """With a lock whose base no store, engine or registry has, exit 4 says which and where we looked; none is made."""
    machine = world.machine("lost", headline.recipe)
    machine.file(headline.lock_path.name).write_bytes(headline.lock_path.read_bytes())
    elsewhere = {"KITBUILD_BASE_REGISTRY": f"{world.registry}-empty", "DOCKER_HOST": "unix:///nonexistent.sock"}
    done = machine.kitbuild("image", headline.recipe, variables=elsewhere)
    assert done.code == 4, done.errors
    assert headline.lock["base"]["manifest_digest"] in done.output["message"]
    assert "not in the store or the engine (none answers) or the registry" in done.output["message"]
    assert "KITBUILD_BASE_REGISTRY" in done.output["hint"]


def edited(world: World, old: str, new: str, *, recipe: str = RECIPES["cuda129"]) -> Machine:
    machine = world.machine("edited", recipe)
    path = machine.file(recipe)
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    return machine


def test_an_architecture_without_a_build(headline: Headline, world: World) -> None:
    """A GPU that the kernel is not built for is exit 4 when locking, naming it and what there is; no lock is written."""
    machine = edited(world, 'gpu_archs: ["9.0"]', 'gpu_archs: ["7.5", "9.0"]', recipe=headline.recipe)
    done = machine.kitbuild("image", headline.recipe)
    assert done.code == 4, done.errors
    (problem,) = [item for item in done.output["problems"] if item["key"] == "kernels.attention"]
    assert problem["message"].endswith("is built for GPU architectures 8.0, 9.0, 10.0, not 7.5")
    assert not list(machine.place.glob("*.lock.json"))


def test_the_broken_version(world: World) -> None:
    """flash-attn2@v3 for a grouped-query model is exit 2 with advice, before anything of a kernel is asked for."""
    machine = edited(world, "flash-attn2@v2", "flash-attn2@v3")
    before = len(world.hub.requests)
    done = machine.kitbuild("image", RECIPES["cuda129"])
    assert done.code == 2, done.errors
    (problem,) = done.output["problems"]
    assert problem["key"] == "KIT-2026-001"
    assert "grouped-query" in problem["message"]
    assert problem["hint"].startswith("pin kernels-community/flash-attn2@v2")
    assert not [request.path for request in world.hub.requests[before:] if "kernels" in request.path]
    assert not list(machine.place.glob("*.lock.json"))


def test_flash_attention_without_its_wheel(world: World) -> None:
    """`flash_attention_2` with no such wheel is exit 2: it would quietly become an unpinned Hub kernel."""
    machine = edited(world, "kernels-community/flash-attn2@v2", "flash_attention_2")
    done = machine.kitbuild("image", RECIPES["cuda129"])
    assert done.code == 2, done.errors
    (problem,) = done.output["problems"]
    assert (problem["key"], problem["line"]) == ("kernels.attention", 17)
    assert problem["message"] == "flash_attention_2 needs the package flash-attn"
    assert "kernels-community/flash-attn2@v2" in problem["hint"]


def test_a_trainer_that_refuses_the_loss(world: World) -> None:
    """trl 1.15 with Liger's fused linear cross-entropy is exit 2 before anything is fetched."""
    machine = edited(world, "image:\n", 'image:\n  packages: {trl: "1.15.0"}\n')
    before = len(world.index.seen), len(world.hub.requests)
    done = machine.kitbuild("image", RECIPES["cuda129"])
    assert done.code == 2, done.errors
    assert [item["key"] for item in done.output["problems"]] == ["KIT-2026-002"]
    assert before == (len(world.index.seen), len(world.hub.requests))
