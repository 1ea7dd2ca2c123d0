"""How long the host's verbs take: check, lock (warm), image (cold, unchanged, one kernel changed; against uv)."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "benchmarks")]

from assembly import into_engine, uv_install  # noqa: E402 - a script: the checkout is put on the path first
from machine import keep, machine, summary  # noqa: E402

from kitbuild.flow.context import Context  # noqa: E402
from kitbuild.image import load_base  # noqa: E402
from kitbuild.lock.closure import closure  # noqa: E402
from kitbuild.lock.files import parse_lock  # noqa: E402
from kitbuild.progress import Silent  # noqa: E402
from kitbuild.store import Store  # noqa: E402
from tests.hub import kernel_repos  # noqa: E402
from tests.hub.fixtures import standard_hub  # noqa: E402


def kitbuild(*arguments: str, environ: dict[str, str]) -> tuple[float, dict[str, Any]]:
    """Seconds and the JSON object of one command."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "kitbuild", *arguments, "--json"],
        env=environ,
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.monotonic() - began
    if done.returncode:
        sys.exit(f"kitbuild {' '.join(arguments)} failed: {done.stdout}{done.stderr}")
    return seconds, json.loads(done.stdout)


def copied_recipe(folder: Path) -> Path:
    """The tiny recipe with Hub kernels, in a folder of its own so that its lock lies there."""
    text = (CHECKOUT / "tests/data/recipes/tiny-kernels.yaml").read_text()
    recipe = folder / "tiny-kernels.yaml"
    recipe.write_text(text.replace("../../../recipes/data", str(CHECKOUT / "recipes/data")))
    return recipe


def cold_store(warm: Store, cold: Path, lock: dict[str, Any]) -> None:
    """A store with what is downloaded (wheels, base) and nothing that is made."""
    names = [wheel["sha256"] for wheel in lock["wheels"]]
    names += [d.removeprefix("sha256:") for d in (lock["base"]["config_digest"], *lock["base"]["diff_ids"])]
    store = Store.open({"KITBUILD_HOME": str(cold)})
    for name in names:
        target = store.path(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.link(warm.path(name), target)
    for kind in ("bases", "base-names", "wheel-addresses"):
        if (warm.root / "records" / kind).is_dir():
            shutil.copytree(warm.root / "records" / kind, cold / "records" / kind)


def forget(image: dict[str, Any]) -> None:
    """Drop an image that this script made from the engine, so that its layers go too where nobody else has them."""
    subprocess.run(["docker", "rmi", "-f", image["engine_id"]], check=False, capture_output=True)


def against_uv(recipe: Path, lock: dict[str, Any], warm: Store, folder: Path, repeats: int) -> dict[str, Any]:
    """Cold assembly and uv, in turn; the base is in the engine before, and loading is timed apart."""
    ours, load, uv = [], [], []
    parsed = parse_lock(recipe.with_name("tiny-kernels.lock.json").read_bytes(), name=recipe.name)
    inputs = {sha256 for sha256 in closure(parsed) if warm.has(sha256)}
    for number in range(repeats):
        uv.append(uv_install(parsed, warm, folder))
        place = folder / f"cold-{number}"
        cold_store(warm, place, lock)
        store = Store.open({"KITBUILD_HOME": str(place)})
        for sha256 in inputs:
            store.add_file(warm.path(sha256), expected=sha256)
        context = Context(environ=os.environ, store=store, progress=Silent())
        load_base(parsed.base, context.client(), store=store, progress=Silent())
        image, _loaded, seconds = into_engine(context, parsed, recipe.read_bytes())
        ours.append(seconds["assembly"])
        load.append(seconds["load"])
        forget({"engine_id": image.tag})
        shutil.rmtree(place)
    ratio = round(statistics.median(ours) / statistics.median(uv), 3)
    return {"kitbuild": summary(ours), "engine_load": summary(load), "uv": summary(uv), "ratio": ratio}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": machine()}
    environ = dict(os.environ)
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a user's Python keeps its byte code
    warm = Store.open(environ)
    with tempfile.TemporaryDirectory(dir=warm.root) as name, standard_hub(Path(name) / "hub") as hub:
        folder = Path(name)
        environ |= hub.environment(folder)
        recipe = copied_recipe(folder)
        kitbuild("lock", str(recipe), environ=environ)
        result["check"] = summary([kitbuild("check", str(recipe), environ=environ)[0] for _ in range(options.repeats)])
        locked = recipe.with_name("tiny-kernels.lock.json")
        lock_seconds = []
        for _ in range(options.repeats):
            locked.unlink()
            lock_seconds.append(kitbuild("lock", str(recipe), environ=environ)[0])
        result["lock_warm"] = summary(lock_seconds)

        cold = folder / "cold"
        cold_store(warm, cold, json.loads(locked.read_bytes()))
        environ["KITBUILD_HOME"] = str(cold)
        seconds, image = kitbuild("image", str(recipe), environ=environ)
        result["image_cold"] = {
            "seconds": round(seconds, 3),
            "reused": sum(layer["reused"] for layer in image["layers"]),
        }
        result["image_unchanged"] = summary(
            [kitbuild("image", str(recipe), environ=environ)[0] for _ in range(options.repeats)]
        )
        result["assembly"] = against_uv(recipe, json.loads(locked.read_bytes()), warm, folder, min(options.repeats, 3))
        kernel_seconds, sent = [], 0
        for version in (1, 4, 2):
            hub.commit("kernels-community/flash-attn2", kernel_repos.flash_attn2(version), "v2")
            kitbuild("lock", str(recipe), "--update", "kernels-community/flash-attn2", environ=environ)
            seconds, other = kitbuild("image", str(recipe), environ=environ)
            kernel_seconds.append(seconds)
            sent = sum(layer["size"] for layer in other["layers"] if not layer["reused"])
            forget(other)
        result["image_kernel_changed"] = summary(kernel_seconds) | {"sent_mb": round(sent / 1e6, 1)}
        forget(image)
    cold_seconds = result["image_cold"]["seconds"]
    result["ratios"] = {
        "unchanged_to_cold": round(result["image_unchanged"]["median"] / cold_seconds, 4),
        "kernel_to_cold": round(result["image_kernel_changed"]["median"] / cold_seconds, 4),
    }
    keep(result, options.output)


if __name__ == "__main__":
    main()
