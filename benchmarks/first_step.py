"""From `docker run` to the first optimizer step: our `train` against plain `trl sft`, same image, same settings.

Both train SmolLM2-135M on the command set with the values of recipes/smollm2-135m-cpu.yaml, without evaluation. The
moment of the first step is the first line that names a finished step: our status.json, TRL's first logged loss.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "benchmarks")]

from machine import keep, machine, summary  # noqa: E402 - a script: the checkout is put on the path first

from kitbuild import recipe as recipes  # noqa: E402
from kitbuild.flow.building import build, fetch_all  # noqa: E402
from kitbuild.flow.context import Context  # noqa: E402
from kitbuild.flow.locking import ensure_lock  # noqa: E402
from kitbuild.progress import Silent  # noqa: E402
from kitbuild.run.docker_engine import container_spec  # noqa: E402
from kitbuild.store import Store  # noqa: E402

POLL_SECONDS = 0.02
STEPS = 2


def recipe_without_evaluation(folder: Path) -> Path:
    """The real recipe, shortened: two steps and no evaluation."""
    lines = (CHECKOUT / "recipes/smollm2-135m-cpu.yaml").read_text().splitlines()
    kept, skipping = [], False
    for line in lines:
        skipping = line.startswith("evaluate:") or (skipping and line.startswith(" "))
        if not skipping:
            kept.append(line.replace("max_steps: 12", f"max_steps: {STEPS}"))
    text = "\n".join(kept).replace("path: data/", f"path: {CHECKOUT}/recipes/data/")
    text = text.replace("chat_template: data/", f"chat_template: {CHECKOUT}/recipes/data/")
    path = folder / "first-step.yaml"
    path.write_text(text.replace("path: ../models/", f"path: {CHECKOUT}/models/") + "\n")
    return path


def plain_trl(command: list[str], lock: Any) -> list[str]:
    """The same `docker run`, with `trl sft` in place of our guest."""
    train = lock.recipe["train"]
    flags = {
        "model_name_or_path": "/inputs/model",
        "dtype": "float32",
        "dataset_name": "/inputs/data/0",
        "chat_template_path": "/inputs/chat_template.jinja",
        "output_dir": "/out/trl",
        "per_device_train_batch_size": lock.recipe["batch"]["micro"],
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "logging_steps": 1,
        "seed": lock.recipe["seed"],
        **train,
    }
    place = command.index("--user")
    threads = str(lock.recipe["launch"]["threads_per_process"])
    extra = ["-e", f"OMP_NUM_THREADS={threads}", "-e", "PYTHONUNBUFFERED=1", "--entrypoint", "/opt/kit/bin/trl"]
    return [*command[:place], *extra, *command[place:-1], "sft", *(f"--{key}={value}" for key, value in flags.items())]


def seconds_to_first_step(command: list[str], out: Path, *, ours: bool) -> float:
    """Start, wait for the first finished step, end."""
    log = out.parent / f"{out.name}.log"
    began = time.monotonic()
    with log.open("wb") as stream, subprocess.Popen(command, stdout=stream, stderr=stream) as process:
        while process.poll() is None:
            if _our_step(out) if ours else b"'loss'" in log.read_bytes():
                seconds = time.monotonic() - began
                process.wait()
                return seconds
            time.sleep(POLL_SECONDS)
    sys.exit(f"ended before a step: {log.read_text()[-3000:]}")


def _our_step(out: Path) -> bool:
    try:
        return int(json.loads((out / "status.json").read_bytes()).get("step") or 0) >= 1
    except (OSError, ValueError):
        return False


def main() -> None:
    """Measure alternately and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    facts = machine()
    context = Context(environ=os.environ, store=Store.open(os.environ), progress=Silent())
    seconds: dict[str, list[float]] = {"kitbuild": [], "trl": []}
    phases: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as name:
        path = recipe_without_evaluation(Path(name))
        loaded = recipes.read(path)
        lock = ensure_lock(context, loaded)
        fetch_all(context, lock, loaded)
        built = build(context, lock, recipe=loaded.content)
        for number in range(options.repeats):
            for side in ("kitbuild", "trl"):
                out = Path(name) / f"{side}-{number}"
                out.mkdir()
                spec = container_spec(lock, image=built.identity(), run_dir=out, store=context.store, resume=False)
                command = spec.command_line_words()
                if side == "trl":
                    command = plain_trl(command, lock)
                seconds[side].append(seconds_to_first_step(command, out, ours=side == "kitbuild"))
                if side == "kitbuild":
                    phases.append(json.loads((out / "manifest.json").read_bytes())["results"]["seconds"])
    result = {
        "machine": facts,
        "kitbuild": summary(seconds["kitbuild"]),
        "trl_sft": summary(seconds["trl"]),
        "phases": phases[-1],
    }
    result["ratio"] = round(result["kitbuild"]["median"] / result["trl_sft"]["median"], 3)
    keep(result, options.output)


if __name__ == "__main__":
    main()
