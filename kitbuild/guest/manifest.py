"""The archive's manifest: what ran, where, and what came of it. Facts are read, never assumed."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kitbuild.guest import determinism, record, seal
from kitbuild.guest.config import cores

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kitbuild.guest.config import Config

FORMAT = 1
RECORDED = (
    "PYTHONHASHSEED",
    "ATEN_CPU_CAPABILITY",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "CUDA_VISIBLE_DEVICES",
    "LD_PRELOAD",
    "LD_LIBRARY_PATH",
    "GLIBC_TUNABLES",
)


def cpu() -> dict[str, Any]:
    """The processor by vendor, family and model, as the kernel names them."""
    try:
        text = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        text = ""
    found = dict(re.findall(r"^(.+?)\s*:\s*(.*)$", text, re.MULTILINE))
    return {
        "vendor": found.get("vendor_id"),
        "family": found.get("cpu family"),
        "model": found.get("model"),
        "model_name": found.get("model name") or platform.machine(),
        "cores": cores(),
    }


def device(config: Config) -> dict[str, Any]:
    """In a worker: the device that trains, and the processor beside it."""
    import torch

    processor = {**cpu(), "isa": torch.backends.cpu.get_cpu_capability()}
    common = {"cpu": processor, "threads": torch.get_num_threads()}
    if not config.cuda:
        name = processor["model_name"]
        empty = dict.fromkeys(("compute_capability", "sm_count", "mig"))
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return {
            "kind": "cpu",
            "name": name,
            "count": config.launch.processes_per_node,
            "memory_bytes": memory,
            **empty,
            **common,
        }
    facts = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "kind": "cuda",
        "name": facts.name,
        "count": config.launch.world_size,
        "compute_capability": f"{facts.major}.{facts.minor}",
        "sm_count": facts.multi_processor_count,
        # A MIG slice is named after its profile: "NVIDIA H200 MIG 1g.18gb".
        "mig": facts.name.partition(" MIG ")[2] or None,
        "memory_bytes": facts.total_memory,
        **common,
    }


def identity(config: Config) -> dict[str, Any]:
    """In a worker: what has to stay the same when a run goes on, for the bits to."""
    import torch

    facts = device(config)
    held = {name: facts[name] for name in ("kind", "name", "compute_capability", "sm_count", "mig")}
    if not config.cuda:
        held |= {"threads": facts["threads"], "isa": facts["cpu"]["isa"]}
    return {**held, "torch": torch.__version__, "locked": config.locked}


def driver() -> str | None:
    """The NVIDIA driver's version, where there is one."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"(\d+\.\d+(?:\.\d+)?)", text)
    return found[1] if found else None


def build() -> dict[str, Any]:
    """How the torch in use was built."""
    import torch

    cudnn = torch.backends.cudnn.version() if torch.version.cuda else None
    return {"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": cudnn, "config": torch.__config__.show()}


def environment(config: Config) -> dict[str, Any]:
    """What was installed and set."""
    packages = {item.metadata["Name"]: item.version for item in metadata.distributions()}
    names = [*determinism.environment(config), *RECORDED]
    return {
        "locked": config.locked,
        "python": platform.python_version(),
        "packages": dict(sorted(packages.items())),
        "variables": {name: os.environ[name] for name in sorted(set(names)) if name in os.environ},
        "hardening": dict(config.hardening),
    }


def weights(folder: Path) -> dict[str, dict[str, Any]]:
    """Digest per tensor, of the bytes that are in the safetensors files."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= _tensors(path)
    return dict(sorted(found.items()))


def _tensors(path: Path) -> dict[str, dict[str, Any]]:
    # https://github.com/huggingface/safetensors#format
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)

    def one(item: tuple[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
        name, facts = item
        start, end = facts["data_offsets"]
        with path.open("rb") as file:
            file.seek(8 + size + start)
            digest, left = hashlib.sha256(), end - start
            while left and (block := file.read(min(left, 1 << 20))):
                digest.update(block)
                left -= len(block)
        return name, {"dtype": facts["dtype"], "shape": facts["shape"], "sha256": digest.hexdigest()}

    with ThreadPoolExecutor(cores()) as pool:
        return dict(pool.map(one, header.items()))


def fingerprint(digests: Iterable[str]) -> str:
    """One digest of the whole token stream."""
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def metrics_digest(path: Path) -> str | None:
    """Digest of metrics.jsonl as it was written."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None


def content_digest(config: Config) -> str | None:
    """Digest of content.json: the image's own list of its files."""
    path = config.places.kit / "content.json"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None


def write(config: Config, parts: dict[str, Any]) -> None:
    """manifest.json, from what the run got to; what is not known is null."""
    lines = record.read_metrics(config.places.out / "metrics.jsonl")
    results = parts.pop("results", {})
    image = {name: config.image.get(name) for name in ("config_digest", "manifest_digest", "engine_id")}
    empty = ("device", "driver", "build", "launch", "arguments", "attention", "liger", "started", "finished")
    value = {
        "format": FORMAT,
        "files": seal.NAME,
        "name": config.name,
        "lock": dict(config.raw),
        "lock_sha256": config.lock_sha256,
        "content_sha256": config.raw["content_sha256"],
        "image": {**image, "content_sha256": content_digest(config)},
        "engine": config.engine,
        "environment": environment(config),
        "kernels": [],
        "weights": {},
        "seed": config.seed,
        "complete": False,
        "resumed": [],
        **dict.fromkeys(empty),
        **parts,
        "data": {
            "fingerprint": fingerprint(line["batch_sha256"] for line in lines),
            "steps": len(lines),
            "rows": parts.get("rows"),
        },
        "results": {
            "steps": len(lines),
            "loss_first": lines[0]["loss"] if lines else None,
            "loss_last": lines[-1]["loss"] if lines else None,
            "tokens": sum(line["tokens"] for line in lines),
            "metrics_sha256": metrics_digest(config.places.out / "metrics.jsonl"),
            "evaluate": None,
            "seconds": {},
            **results,
        },
    }
    value.pop("rows", None)
    record.write_json(config.places.out / "manifest.json", value)
