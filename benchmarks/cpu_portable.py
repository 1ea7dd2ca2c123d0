"""`cpu_portable` on processors of several vendors: the same lock, natively and on processors that QEMU emulates.

    python benchmarks/cpu_portable.py --python PYTHON [--steps 3] [--output F]

PYTHON: the training Python of the cpu target, as for the tests. Needs `qemu-x86_64` (Debian: qemu-user). A program sees
an emulated processor's vendor, family and instructions, and each library chooses its code by them. Every value of every
step is compared with the native run; timings say nothing. QEMU 7.2 ends with an error when weights are saved from
several threads, which is after the last step.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "benchmarks")]

from machine import keep, machine  # noqa: E402 - a script: the checkout is put on the path first

from tests.guest import root  # noqa: E402

PROCESSORS = ("native", "Haswell-noTSX", "EPYC")
VALUES = ("step", "loss", "grad_norm", "learning_rate", "batch_sha256")


def train(folder: Path, python: Path, processor: str, *, portable: bool, steps: int) -> list[list[Any]]:
    """The values of each step of one run."""
    made = folder / f"{processor}-{portable}"
    made.mkdir()
    determinism = {"mode": "strict", "cpu_portable": portable}
    tree = root.build(
        made,
        kernels={"attention": "sdpa", "layers": {}},
        determinism=determinism,
        train={"max_length": 128, "learning_rate": 1e-3, "max_steps": steps},
    )
    environ = {
        **tree.environ, "PATH": os.environ["PATH"], "PYTHONPATH": str(CHECKOUT), "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    emulator = [] if processor == "native" else ["qemu-x86_64", "-cpu", processor]
    command = [*emulator, str(python), "-m", "kitbuild.guest", "train"]
    done = subprocess.run(command, env=environ, cwd=made, capture_output=True, text=True, check=False)
    path = tree.out / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    assert len(lines) == steps, done.stderr[-2000:]
    return [[line[name] for name in VALUES] for line in lines]


def main() -> None:
    """Compare, print and keep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    assert shutil.which("qemu-x86_64"), "install qemu-user"
    result: dict[str, Any] = {
        "what": "the same steps on other processors",
        "machine": machine(),
        "steps": arguments.steps,
    }
    with tempfile.TemporaryDirectory() as folder:
        for portable in (True, False):
            runs = {
                name: train(Path(folder), arguments.python, name, portable=portable, steps=arguments.steps)
                for name in PROCESSORS
            }
            result["cpu_portable" if portable else "plain strict"] = {
                name: {"identical to native": values == runs["native"], "loss": [line[1] for line in values]}
                for name, values in runs.items()
            }
    keep(result, arguments.output)


if __name__ == "__main__":
    main()
