"""What `virtual_ranks` costs: the same training with and without it, alternating, on 1, 2, 4 … processes.

SmolLM2-135M on the command set, eight micro-batches a step, through `kitbuild run --engine local`. A figure is the ratio
of median step seconds, and of peak memory, of runs that alternate. The runs with virtual ranks are compared too: they
must be IDENTICAL.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "benchmarks")]

from machine import keep, machine  # noqa: E402 - a script: the checkout is put on the path first

RANKS, STEPS, WARM = 8, 6, 2


def recipe(folder: Path, processes: int, *, virtual: bool) -> Path:
    """The real recipe with eight micro-batches, one thread a process, and no evaluation."""
    lines, skipping = [], False
    for line in (CHECKOUT / "recipes/smollm2-135m-cpu.yaml").read_text().splitlines():
        skipping = line.startswith(("evaluate:", "batch:", "launch:", "determinism:")) or (
            skipping and line.startswith(" ")
        )
        if not skipping:
            lines.append(line.replace("max_steps: 12", f"max_steps: {STEPS}"))
    text = "\n".join(lines)
    for name, place in (("data/", "recipes/data/"), ("../models/", "models/")):
        text = text.replace(f"path: {name}", f"path: {CHECKOUT}/{place}")
        text = text.replace(f"chat_template: {name}", f"chat_template: {CHECKOUT}/{place}")
    text += f"\nbatch: {{global: {2 * RANKS}, micro: 2}}\nlaunch: {{processes_per_node: {processes}}}\n"
    text += f"determinism: {{mode: strict, virtual_ranks: {RANKS}}}\n" if virtual else "determinism: strict\n"
    path = folder / f"{'virtual' if virtual else 'plain'}-{processes}.yaml"
    path.write_text(text)
    return path


def kitbuild(*words: str) -> dict[str, Any]:
    """One command; its JSON."""
    environ = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    command = [sys.executable, "-m", "kitbuild", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}{done.stderr[-3000:]}")
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def run(path: Path) -> dict[str, Any]:
    """Train; step seconds after the warm ones, and the peak."""
    place = Path(kitbuild("run", str(path), "--engine", "local", "--out", str(path.parent / "runs"))["run_dir"])
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    seconds = [float.fromhex(line["seconds"]) for line in lines[WARM:]]
    return {"run": place, "seconds": seconds, "peak": max(line["peak_memory_bytes"] for line in lines)}


def measured(folder: Path, processes: int, rounds: int) -> tuple[dict[str, Any], Path]:
    """Both sides, alternating; the ratios and a run with virtual ranks."""
    paths = {virtual: recipe(folder, processes, virtual=virtual) for virtual in (False, True)}
    sides: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for _ in range(rounds):
        for virtual, path in paths.items():
            sides[virtual].append(run(path))
    step = {
        key: statistics.median([value for item in held for value in item["seconds"]]) for key, held in sides.items()
    }
    peak = {key: statistics.median(item["peak"] for item in held) for key, held in sides.items()}
    told = {
        "plain_seconds": round(step[False], 3),
        "virtual_seconds": round(step[True], 3),
        "seconds_ratio": round(step[True] / step[False], 3),
        "plain_peak_gib": round(peak[False] / 2**30, 3),
        "virtual_peak_gib": round(peak[True] / 2**30, 3),
        "peak_ratio": round(peak[True] / peak[False], 3),
    }
    return told, sides[True][-1]["run"]


def main() -> None:
    """Every number of processes; the first's weights are those of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], choices=(1, 2, 4, 8))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    facts, cells, runs = machine(), {}, []
    with tempfile.TemporaryDirectory() as folder:
        for processes in given.processes:
            cells[str(processes)], place = measured(Path(folder), processes, given.rounds)
            runs.append(place)
        verdicts = [kitbuild("compare", str(runs[0]), str(other))["verdict"] for other in runs[1:]]
    result = {
        "machine": facts,
        "virtual_ranks": RANKS,
        "rounds": given.rounds,
        "processes": cells,
        "verdicts": verdicts,
    }
    keep(result, given.output)


if __name__ == "__main__":
    main()
