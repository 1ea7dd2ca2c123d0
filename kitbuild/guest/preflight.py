"""Phase 2: what can be known to fail before anything slow starts. Standard library only; every problem at once."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from kitbuild.errors import Problem, RunError
from kitbuild.guest.config import cores

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kitbuild.guest.config import Config

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - asked for its size only
SHARED_MEMORY_BYTES = 48 << 20
GIB = 1 << 30
# https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/ (minor-version compatibility)
MINIMUM_DRIVER = {12: 525, 13: 580}
PORTABLE_FLAGS = {"avx2", "fma"}
BYTES_PER_VALUE = {"float32": 4, "bfloat16": 2, "float16": 2}


def cpu_flags() -> set[str]:
    """What this processor can do, as the kernel names it."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    found = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return set(found[1].split()) if found else set()


def check(config: Config, environ: Mapping[str, str]) -> list[str]:
    """Raise one error with every problem (exit 6); return what is only worth a line."""
    problems = [
        *_writable(config),
        *_shared_memory(config),
        *_device(config, environ),
        *_memory(config),
        *_nodes(config, environ),
    ]
    if problems:
        text = "; ".join(problem.message for problem in problems)
        hint = next((problem.hint for problem in problems if problem.hint), None)
        raise RunError(f"preflight: {text}", hint=hint, problems=problems)
    wanted, have = config.launch.processes_per_node * config.launch.threads_per_process, cores()
    return [f"{wanted} threads on {have} cores: slower, with the same bits"] if wanted > have else []


def _writable(config: Config) -> Iterator[Problem]:
    for place in (config.places.out, config.places.cache, Path(tempfile.gettempdir())):
        try:
            place.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=place):
                pass
        except OSError as error:
            hint = f"mount a directory that user {os.getuid()} can write to"
            yield Problem(message=f"{place} is not writable: {error.strerror}", hint=hint)


def _shared_memory(config: Config) -> Iterator[Problem]:
    several = config.launch.processes_per_node > 1 or config.train.get("dataloader_num_workers", 0) > 0
    if several and SHARED_MEMORY.is_dir():
        free = shutil.disk_usage(SHARED_MEMORY).free
        if free < SHARED_MEMORY_BYTES:
            text = f"{SHARED_MEMORY} has {free >> 20} MiB free; processes exchange tensors through it"
            yield Problem(message=text, hint="start the container with --shm-size 1g")


def _device(config: Config, environ: Mapping[str, str]) -> Iterator[Problem]:
    if not config.cuda:
        lacking = sorted(PORTABLE_FLAGS - cpu_flags()) if config.portable else []
        if lacking:
            text = f"cpu_portable needs {' and '.join(lacking)}, and this processor has none"
            yield Problem(message=text, key="determinism.cpu_portable", hint="another machine, or lock without it")
        if config.recipe.get("liger") and environ.get("TRITON_INTERPRET") != "1":
            text = "Liger's kernels are written in Triton and need a GPU"
            yield Problem(message=text, key="liger", hint="set liger: false for a CPU")
        if config.launch.strategy == "fsdp":
            # https://github.com/huggingface/accelerate/blob/main/src/accelerate/state.py
            yield Problem(message="fsdp on a CPU is silently DDP in Accelerate", key="launch.strategy", hint="use ddp")
        return
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        text = f"the image is for {config.raw['target']} and no NVIDIA driver answers here"
        yield Problem(message=text, hint="start with --gpus all on a machine with a GPU, or lock for image.cuda: cpu")
        return
    found = re.search(r"(?:Kernel Module|for \S+)\s+(\d+)\.", text)
    major = int(str(config.raw["base"].get("cuda") or "12").split(".")[0])
    needed = MINIMUM_DRIVER.get(major, 0)
    if found and int(found[1]) < needed and config.locked:
        yield Problem(
            message=f"driver {found[1]} is older than {needed}, which CUDA {major} needs", hint="update the driver"
        )


def parameters(config: Config) -> int:
    """About how many values the model has: from the files, or from the configuration's sizes."""
    weights = config.raw["model"]["weights"]
    if weights is not None:
        held = sum(file["size"] for file in weights["files"] if file["path"].endswith(".safetensors"))
        return int(held // BYTES_PER_VALUE[_stored_dtype(config)])
    given = config.raw["model"]["config"]
    hidden, layers = given.get("hidden_size", 0), given.get("num_hidden_layers", 0)
    inner, vocabulary = given.get("intermediate_size", 4 * hidden), given.get("vocab_size", 0)
    return int(layers * hidden * (4 * hidden + 3 * inner) + 2 * vocabulary * hidden)


def _stored_dtype(config: Config) -> str:
    try:
        given = json.loads((config.places.inputs / "model" / "config.json").read_bytes())
    except (OSError, ValueError):
        return "bfloat16"
    name = given.get("dtype") or given.get("torch_dtype")
    return name if name in BYTES_PER_VALUE else "float32"


def memory_estimate(config: Config) -> int:
    """Bytes for weights, gradients and two Adam states, per node; activations come on top.

    With virtual ranks, for partial sums of the gradients too.
    """
    size = parameters(config) * BYTES_PER_VALUE[config.recipe["model"]["dtype"]]
    waiting = (config.virtual_ranks // config.launch.world_size).bit_length() - 1 if config.virtual_ranks else 0
    copies = 1 if config.recipe.get("lora") else 4 + waiting
    return int(size * copies * (1 if config.launch.strategy != "ddp" else config.launch.processes_per_node))


def _memory(config: Config) -> Iterator[Problem]:
    if config.cuda:
        yield from _device_memory(config)
        return
    needed, free = memory_estimate(config), free_memory()
    if free is not None and needed > free:
        text = f"training needs at least {needed / GIB:.1f} GiB of memory and {free / GIB:.1f} GiB are free"
        yield Problem(message=text, hint="a smaller model, lora, or more memory for the container")


def _device_memory(config: Config) -> Iterator[Problem]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return
    query = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    found = subprocess.run(query, capture_output=True, text=True, check=False, timeout=60).stdout.split()
    if len(found) < config.launch.processes_per_node:
        text = f"{config.launch.processes_per_node} processes on a node and {len(found)} GPUs"
        yield Problem(message=text, key="launch.processes_per_node", hint="one process per GPU")
    elif all(item.isdigit() for item in found):
        needed, have = memory_estimate(config) // config.launch.processes_per_node, min(map(int, found)) << 20
        if needed > have:
            text = f"training needs at least {needed / GIB:.1f} GiB a GPU and it has {have / GIB:.1f}"
            yield Problem(message=text, hint="lora, deepspeed or fsdp over more GPUs, or a smaller model")


def free_memory() -> int | None:
    """Bytes this container may still take: the smaller of its limit's rest and the machine's."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    found = re.search(r"MemAvailable:\s+(\d+) kB", text)
    free = int(found[1]) * 1024 if found else None
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            rest = int(Path("/sys/fs/cgroup", limit).read_text()) - int(Path("/sys/fs/cgroup", used).read_text())
        except (OSError, ValueError):
            continue
        free = rest if free is None else min(free, rest)
    return free


def _nodes(config: Config, environ: Mapping[str, str]) -> Iterator[Problem]:
    if config.launch.nodes > 1:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK") if not environ.get(name)]
        if missing:
            text = f"{config.launch.nodes} nodes need {', '.join(missing)} in the environment"
            yield Problem(message=text, hint="kitbuild render writes a job that sets them")
