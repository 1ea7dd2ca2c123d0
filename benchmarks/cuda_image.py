"""A real CUDA 12.8 image: torch 2.10.0 and the whole training set, on a Debian base through Dockerfile.cuda128.

The recipe is recipes/qwen3-8b-cuda128.yaml with DeepSpeed as its strategy, so that every tested package is in it;
model, data and kernels come from the test Hub, wheels from the package index. No GPU is needed: every package is
imported in the image, nothing is trained. Base, images and (without --store) everything downloaded are removed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "benchmarks")]

from assembly import into_engine, uv_install  # noqa: E402 - a script: the checkout is put on the path first
from machine import keep, machine  # noqa: E402

from kitbuild import recipe as recipes  # noqa: E402
from kitbuild.base.bootstrap import bootstrap  # noqa: E402
from kitbuild.base.build import build as build_base  # noqa: E402
from kitbuild.base.engine import find_image  # noqa: E402
from kitbuild.flow.building import fetch_all  # noqa: E402
from kitbuild.flow.context import Context  # noqa: E402
from kitbuild.flow.locking import ensure_lock  # noqa: E402
from kitbuild.image import Image, Loaded, load_base  # noqa: E402
from kitbuild.lock.closure import closure  # noqa: E402
from kitbuild.lock.files import lock_path  # noqa: E402
from kitbuild.progress import Silent  # noqa: E402
from kitbuild.store import Store  # noqa: E402
from tests.hub import kernel_repos  # noqa: E402
from tests.hub.fixtures import standard_hub  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator


UPSTREAM, LOADED, BASE = "kitbuild-benchmark/debian:1", "kitbuild-benchmark/base:1", "kitbuild/base-cuda128"
KERNEL_BYTES = 200_000_000
VARIANT = "torch210-cxx11-cu128-x86_64-linux"
ATTENTION = "kernels-community/flash-attn2"
IMPORTS = """
import importlib, importlib.metadata, json, sys
from packaging.requirements import Requirement
from packaging.version import Version
failed, modules, missing = {}, [], []
for name, owners in sorted(importlib.metadata.packages_distributions().items()):
    if name.startswith("_") or not name.isidentifier():
        continue
    try:
        importlib.import_module(name)
        modules.append(name)
    except BaseException as error:
        failed[name] = f"{owners[0]}: {type(error).__name__}: {str(error)[:120]}"
for found in importlib.metadata.distributions():
    for line in found.requires or ():
        need = Requirement(line)
        if need.marker and not need.marker.evaluate({"extra": ""}):
            continue
        try:
            has = Version(importlib.metadata.version(need.name))
        except importlib.metadata.PackageNotFoundError:
            missing.append(f"{found.name} needs {line}")
            continue
        if not need.specifier.contains(has, prereleases=True):
            missing.append(f"{found.name} needs {line}, has {has}")
import torch
versions = {found.name: found.version for found in importlib.metadata.distributions()}
print(json.dumps({"modules": len(modules), "failed": failed, "unmet": missing, "torch_cuda": torch.version.cuda,
                  "versions": versions, "archs": torch.cuda.get_arch_list()}))
"""
TRAINING = (
    *("accelerate", "datasets", "deepspeed", "huggingface_hub", "kernels", "liger_kernel", "peft", "safetensors"),
    *("tokenizers", "torch", "transformers", "triton", "trl"),
)


def whole_set(folder: Path) -> Path:
    """The real recipe with DeepSpeed, so that what is needed only for that is in the image too."""
    text = (CHECKOUT / "recipes/qwen3-8b-cuda128.yaml").read_text()
    assert text.count("strategy: ddp ") == 1
    path = folder / "qwen3-8b-cuda128.yaml"
    path.write_text(text.replace("strategy: ddp ", "strategy: deepspeed "))
    return path


@contextlib.contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Note how long it took, and say so while one waits."""
    began = time.monotonic()
    yield
    seconds[name] = round(time.monotonic() - began, 3)
    print(f"{name}: {seconds[name]} s", file=sys.stderr)


def in_image(image: str, *command: str, entrypoint: str = "/opt/kit/bin/kit") -> tuple[float, str]:
    """Seconds and output of a command in the image, hardened as a run is."""
    words = ["docker", "run", "--rm", "--network", "none", "--read-only", "--cap-drop", "ALL", "--tmpfs", "/tmp"]  # noqa: S108 - in the container
    words += ["--tmpfs", "/cache:exec,mode=1777", "--entrypoint", entrypoint, image, *command]
    began = time.monotonic()
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command} failed in the image: {done.stdout[-2000:]}{done.stderr[-4000:]}")
    return round(time.monotonic() - began, 3), done.stdout


def table(image: Image, loaded: Loaded) -> list[dict[str, Any]]:
    """The layers, bottom first."""
    return [
        {
            "name": layer.name,
            "digest": layer.digest,
            "mb": round(layer.size / 1e6, 1),
            "reused": layer.digest in loaded.reused,
        }
        for layer in image.layers
    ]


def installed_bytes(image: Image, store: Store) -> int:
    """The content of every file that kitbuild added, each once."""
    own = {layer.digest.removeprefix("sha256:") for layer in image.layers}
    sizes: dict[str, int] = {}
    for sha256 in own - {image.layers[0].digest.removeprefix("sha256:")}:
        with tarfile.open(store.path(sha256)) as archive:
            sizes |= {member.name: member.size for member in archive if member.isfile()}
    return sum(sizes.values())


def real_size(version: int) -> dict[str, bytes]:
    """The stand-in of flash-attn2, its build for this target padded to the size of a real one."""
    files = kernel_repos.flash_attn2(version)
    prefix = f"build/{VARIANT}/"
    package = {path.removeprefix(prefix): data for path, data in files.items() if path.startswith(prefix)}
    package.pop("metadata.json")
    (shared,) = [path for path in package if path.endswith(".so")]
    package[shared] += random.Random(version).randbytes(KERNEL_BYTES)  # noqa: S311 - any bytes that do not compress
    return files | kernel_repos.variant_files("flash-attn2", VARIANT, package, version=version)


def measure(context: Context, folder: Path) -> dict[str, Any]:
    """Lock, image, a changed kernel, and every import."""
    seconds: dict[str, float] = {}
    path = whole_set(folder)
    with standard_hub(folder / "hub") as hub:
        context.environ = {**os.environ, **hub.environment(folder / "hf")}
        hub.commit(ATTENTION, real_size(2), "v2")
        recipe = recipes.read(path)
        with timed(seconds, "lock"):
            lock = ensure_lock(context, recipe)
        with timed(seconds, "fetch"):
            fetch_all(context, lock, recipe)
        load_base(lock.base, context.client(), store=context.store, progress=Silent(), tag=LOADED)
        seconds["uv_install"] = uv_install(lock, context.store, folder)
        print(f"uv: {seconds['uv_install']} s", file=sys.stderr)
        first, loaded, cold = into_engine(context, lock, recipe.content)
        print(f"cold: {cold}", file=sys.stderr)
        _again, _loaded, unchanged = into_engine(context, lock, recipe.content)
        hub.commit(ATTENTION, real_size(1), "v2")
        lock_path(path).unlink()
        changed_lock = ensure_lock(context, recipe)
        fetch_all(context, changed_lock, recipe)
        changed, reloaded, kernel = into_engine(context, changed_lock, recipe.content)
        print(f"kernel: {kernel}", file=sys.stderr)
    for name, both in (("cold", cold), ("unchanged", unchanged), ("kernel", kernel)):
        seconds |= {f"{name}_{key}": value for key, value in both.items()}
    try:
        info_seconds, info = in_image(loaded.engine_id, "info")
        import_seconds, told = in_image(loaded.engine_id, "-c", IMPORTS, entrypoint="/opt/kit/bin/python")
        found = json.loads(told.splitlines()[-1])
    finally:
        forget(changed.tag, first.tag, f"kitbuild/base:{lock.base.config_digest[7:19]}")
    own = sum(layer.size for layer in first.layers[1:])
    installed = installed_bytes(first, context.store)
    return {
        "recipe": "recipes/qwen3-8b-cuda128.yaml, strategy deepspeed",
        "base": {"upstream": lock.base.upstream.name if lock.base.upstream else None, "python": lock.base.python},
        "wheels": len(lock.wheels),
        "downloaded_mb": round(sum(context.store.path(sha256).stat().st_size for sha256 in closure(lock)) / 1e6),
        "image_mb": round(sum(layer.size for layer in first.layers) / 1e6),
        "image_id": first.config_digest,
        "manifest_digest": first.manifest_digest,
        "layers": table(first, loaded),
        "bytes_to_installed": round(own / installed, 4),
        "assembly_to_uv": round(seconds["cold_assembly"] / seconds["uv_install"], 3),
        "seconds": seconds,
        "kernel_changed": {
            "seconds": round(seconds["kernel_assembly"] + seconds["kernel_load"], 3),
            "sent_mb": round(reloaded.sent_bytes / 1e6, 1),
            "layers": [layer["name"] for layer in table(changed, reloaded) if not layer["reused"]],
        },
        "info": {"seconds": info_seconds, "output": info.splitlines()},
        "imports": {
            "seconds": import_seconds,
            "modules": found["modules"],
            "failed": found["failed"],
            "unmet_requirements": found["unmet"],
            "torch_cuda": found["torch_cuda"],
            "training": {
                name: found["versions"].get(name) or found["versions"].get(name.replace("_", "-")) for name in TRAINING
            },
        },
    }


def forget(*tags: str) -> None:
    """Remove images from the engine."""
    subprocess.run(["docker", "rmi", "-f", *tags], check=False, capture_output=True)


@contextlib.contextmanager
def own_name(context: Context, name: str) -> Iterator[None]:
    """What the engine calls `name` has that name again at the end."""
    before = find_image(context.client(), name)
    try:
        yield
    finally:
        forget(name)
        if before is not None:
            before.tag(name)


def main() -> None:
    """Make the base, measure, clean up, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--store", type=Path, help="a store to use and keep; without, one that is removed")
    parser.add_argument("--note", help="what a reader must know of the machine")
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": machine(), **({"note": options.note} if options.note else {})}
    with tempfile.TemporaryDirectory(dir=options.store) as name:
        folder = Path(name)
        store = Store.open({"KITBUILD_HOME": str(options.store or folder / "store")})
        context = Context(environ=dict(os.environ), store=store, progress=Silent())
        seconds: dict[str, float] = {}
        with contextlib.ExitStack() as stack:
            stack.callback(forget, UPSTREAM, LOADED)
            stack.enter_context(own_name(context, BASE))
            with timed(seconds, "bootstrap"):
                debian = bootstrap("cpu", store=store, progress=Silent(), environ=os.environ)
            load_base(debian, context.client(), store=store, progress=Silent(), tag=UPSTREAM)
            with timed(seconds, "dockerfile"):
                build_base("cuda128", upstream=UPSTREAM, client=context.client(), store=store, progress=Silent())
            result |= measure(context, folder)
            result["seconds"] |= {f"base_{key}": value for key, value in seconds.items()}
    failed = [name for name in TRAINING if name in result["imports"]["failed"]]
    if failed or result["imports"]["unmet_requirements"]:
        sys.exit(f"not everything imports: {failed} {result['imports']['unmet_requirements']}")
    keep(result, options.output)


if __name__ == "__main__":
    main()
