"""The same bits on a GPU: each cell trained in two fresh processes and once with a stop and a resume, then compared.

    python benchmarks/gpu_proof.py prepare DIR [--cells SUBSTRING]            # with a network: recipes, data, locks
    python benchmarks/gpu_proof.py run DIR --python PYTHON [--output FILE]    # on the GPU's machine, without one

Cells are attention × Liger × padded or packed in the shape of Qwen3-0.6B, several at once on one GPU, and a few
steps in the shape of Qwen3-8B, alone, strict and not, beside plain TRL with the same settings. Weights are random
and follow from the seed. PYTHON's own packages train: they are recorded, not locked, and every verdict says so.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ruamel.yaml import YAML

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
SHAPES = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
             "tie_word_embeddings": True},
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
           "tie_word_embeddings": False},
}  # fmt: skip
COMMON = {
    "model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40960, "rms_norm_eps": 1.0e-6, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1.0e6},
}  # fmt: skip
LIGER = {"rope": True, "swiglu": True, "rms_norm": True, "fused_linear_cross_entropy": True}
SETTLED = 3  # steps before which nothing is timed: compilation, autotuning, the allocator


def recipe(name: str, *, shape: str, attention: str, liger: bool, packing: bool, strict: bool = True) -> dict[str, Any]:
    """One cell as a recipe."""
    large = shape == "8b"
    packages = {"flash-attn-4": "4.0.0b36"} if attention == "flash_attention_4" else {}
    return {
        "kitbuild": 1,
        "name": name,
        "seed": 42,
        "model": {"config": {**COMMON, **SHAPES[shape]}, "tokenizer": {"path": "tokenizer"}, "dtype": "bfloat16"},
        "dataset": {"path": "long.jsonl" if large else "short.jsonl"},
        "kernels": {"attention": attention},
        "liger": LIGER if liger else False,
        "image": {"cuda": "12.8", "packages": packages},
        "batch": {"global": 8, "micro": 2 if large else 4},
        "train": {
            "max_length": 4096 if large else 512, "max_steps": 10 if large else 16, "packing": packing,
            "learning_rate": 1.0e-5, "lr_scheduler_type": "constant", "optim": "adamw_torch_fused",
            "gradient_checkpointing": False,
        },
        "determinism": "strict" if strict else "record",
    }  # fmt: skip


def cells() -> dict[str, dict[str, Any]]:
    """Every cell by name."""
    found = {}
    for attention in ("sdpa", "flex_attention", "flash_attention_4"):
        for liger in (False, True):
            for packing in (False, True):
                name = f"0.6b-{attention.split('_')[0]}{'4' if '4' in attention else ''}"
                name += f"-{'liger' if liger else 'plain'}-{'packed' if packing else 'padded'}"
                found[name] = recipe(name, shape="0.6b", attention=attention, liger=liger, packing=packing)
    for attention, word in (("flash_attention_4", "flash4"), ("sdpa", "sdpa")):
        for strict in (True, False):
            name = f"8b-{word}-{'strict' if strict else 'record'}"
            found[name] = recipe(name, shape="8b", attention=attention, liger=True, packing=False, strict=strict)
    return found


def prepare(folder: Path, chosen: str) -> None:
    """Recipes, data and locks: all that needs a network."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(ROOT / "recipes/data/tiny-tokenizer", folder / "tokenizer", dirs_exist_ok=True)
    words = random.Random(0)  # noqa: S311 - text, not a secret
    with (folder / "short.jsonl").open("w") as short, (folder / "long.jsonl").open("w") as long:
        for file, rows, longest in ((short, 400, 200), (long, 88, 2600)):
            for _ in range(rows):
                count = longest if file is long else words.randint(20, longest)
                text = " ".join(f"{words.randrange(10**6)}" for _ in range(count))
                turns = [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": text}]
                file.write(json.dumps({"messages": turns}) + "\n")
    yaml = YAML()
    for name, value in cells().items():
        if chosen in name:
            yaml.dump(value, folder / f"{name}.yaml")
            kitbuild("lock", folder / f"{name}.yaml")


def kitbuild(*arguments: Any, **named: Any) -> subprocess.CompletedProcess[str]:
    """Kitbuild of this checkout."""
    done = subprocess.run(
        [sys.executable, "-m", "kitbuild", *map(str, arguments)],
        check=False, capture_output=True, text=True, env=environment(), **named,
    )  # fmt: skip
    if done.returncode not in (0, 8, 9, 10):
        raise SystemExit(
            f"kitbuild {' '.join(map(str, arguments))}: exit {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}"
        )
    return done


def environment() -> dict[str, str]:
    """The variables of a subprocess: its kitbuild is that of this checkout."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def train(folder: Path, name: str, python: str, out: Path) -> Path:
    """One run from start to end; its directory."""
    arguments = ("--engine", "local", "--python", python, "--out", out, "--json")
    done = kitbuild("run", folder / f"{name}.yaml", *arguments)
    return Path(json.loads(done.stdout)["run_dir"])


def stopped_and_resumed(folder: Path, name: str, python: str, out: Path) -> tuple[Path, int]:
    """One run that gets SIGTERM after its second step and then goes on; its directory and the step of the stop."""
    line = [sys.executable, "-m", "kitbuild", "run", folder / f"{name}.yaml"]
    line += ["--engine", "local", "--python", python, "--out", out, "--json"]
    with subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        while process.poll() is None and not any(_steps(path) for path in out.glob("*/metrics.jsonl")):
            time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        told, errors = process.communicate()
    if process.returncode != 10:  # noqa: PLR2004 - DESIGN: stopped, resumable
        raise SystemExit(f"{name}: exit {process.returncode} after SIGTERM\n{(told + errors)[-3000:]}")
    run_dir = Path(json.loads(told)["run_dir"])
    step = _steps(run_dir / "metrics.jsonl")
    kitbuild("run", folder / f"{name}.yaml", "--engine", "local", "--python", python, "--resume", run_dir)
    return run_dir, step


def _steps(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def verdict(left: Path, right: Path) -> str:
    """What `kitbuild compare` says."""
    return str(json.loads(kitbuild("compare", left, right, "--json").stdout)["verdict"])


def facts(run_dir: Path) -> dict[str, Any]:
    """A run's settled speed and memory, its losses and digests."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    manifest = json.loads((run_dir / "manifest.json").read_bytes())
    settled = [float.fromhex(line["seconds"]) for line in lines[SETTLED:]]
    return {
        "loss": [line["loss"] for line in lines],
        "step_seconds": statistics.median(settled),
        "spread": [min(settled), max(settled)],
        "peak_gib": max(line["peak_memory_bytes"] for line in lines) / 2**30,
        "tokens_per_second": sum(line["tokens"] for line in lines[SETTLED:]) / sum(settled),
        "data_fingerprint": manifest["data"]["fingerprint"],
        "first_step_seconds": manifest["results"]["seconds"]["first_step"],
        "machine": {
            "device": manifest["device"]["name"], "driver": manifest["driver"],
            "packages": {name: manifest["environment"]["packages"].get(name) for name in
                         ("torch", "transformers", "trl", "liger-kernel", "flash-attn-4", "accelerate")},
        },
    }  # fmt: skip


def prove(folder: Path, name: str, python: str, runs: Path) -> dict[str, Any]:
    """Two fresh processes and a resume, compared."""
    out = runs / name
    try:
        first = train(folder, name, python, out / "first")
        second = train(folder, name, python, out / "second")
        row = {"cell": name, "repeat": verdict(first, second), **facts(first)}
        resumed, step = stopped_and_resumed(folder, name, python, out / "stopped")
        return {**row, "resume": verdict(first, resumed), "stopped_at": step}
    except SystemExit as error:
        return {"cell": name, "error": str(error)[-1500:]}
    finally:
        shutil.rmtree(out, ignore_errors=True)


def large(folder: Path, name: str, python: str, runs: Path) -> Iterator[dict[str, Any]]:
    """The 8B shape: strict twice, or once beside plain TRL with the very same arguments."""
    out = runs / name
    try:
        first = train(folder, name, python, out / "first")
        row = {"cell": name, **facts(first)}
        if name.endswith("strict"):
            shutil.rmtree(first / "model", ignore_errors=True)
            second = train(folder, name, python, out / "second")
            row["repeat"], row["step_seconds_again"] = verdict(first, second), facts(second)["step_seconds"]
        yield row
    except SystemExit as error:
        yield {"cell": name, "error": str(error)[-1500:]}
    finally:
        shutil.rmtree(out, ignore_errors=True)


def run(folder: Path, python: str, chosen: str, jobs: int, runs: Path) -> Iterator[dict[str, Any]]:
    """Rows as they come: small cells at once, large ones alone."""
    names = [name for name in cells() if chosen in name and (folder / f"{name}.yaml").exists()]
    small = [name for name in names if name.startswith("0.6b")]
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(prove, folder, name, python, runs) for name in small]
        for future in concurrent.futures.as_completed(futures):
            yield future.result()
    for name in names:
        if name not in small:
            yield from large(folder, name, python, runs)
            if name.endswith("record"):
                yield plain(folder, name, python)


def plain(folder: Path, name: str, python: str) -> dict[str, Any]:
    """TRL's own SFTTrainer with the arguments of the lock and nothing of kitbuild."""
    done = subprocess.run(
        [python, ROOT / "benchmarks/plain_trl.py", folder / f"{name}.lock.json", folder],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        return {"cell": f"{name}-plain-trl", "error": done.stderr[-1500:]}
    held = json.loads(done.stdout.splitlines()[-1])
    return {"cell": f"{name}-plain-trl", "step_seconds": statistics.median(held["seconds"][SETTLED:]), **held}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("prepare", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cells", default="", help="only cells whose name contains this")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--jobs", type=int, default=6, help="small cells at once")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where runs are kept while they are compared")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    if given.step == "prepare":
        prepare(given.folder, given.cells)
        return
    rows = []
    for row in run(given.folder, given.python, given.cells, given.jobs, given.runs):
        rows.append(row)
        print(json.dumps({key: value for key, value in row.items() if key not in ("loss", "machine")}), flush=True)
        if given.output:
            given.output.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
