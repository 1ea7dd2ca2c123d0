"""Small archives that verify, made from the real models, to be changed by a test in one place."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kitbuild.archive.checks import data_fingerprint
from kitbuild.guest import seal
from kitbuild.lock.models import Lock

if TYPE_CHECKING:
    from pathlib import Path

RECIPE = b"kitbuild: 1\nname: tiny\n"
DATA = b'{"messages": []}\n'
CONFIG = b'{"base": "config"}'
LAYER = b"a base layer"
WHEEL = b"a wheel built here"
KERNEL = "test-org/attention"
EMPTY = hashlib.sha256(b"").hexdigest()


def sha256(data: bytes | str) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def file(path: str, data: bytes) -> dict[str, Any]:
    return {"path": path, "size": len(data), "sha256": sha256(data)}


def wheel(name: str, version: str, data: bytes | None = None, *, built: bool = False) -> dict[str, Any]:
    content = data if data is not None else f"{name} {version}".encode()
    source = {"sdist_sha256": EMPTY, "python": "3.11", "requires": [], "env": {}}
    return {
        "name": name,
        "version": version,
        "file": f"{name}-{version}-py3-none-any.whl",
        "size": len(content),
        "sha256": sha256(content),
        "index": "pypi",
        "built": source if built else None,
    }


def kernel(commit: str = "a" * 40, role: str = "attention") -> dict[str, Any]:
    return {
        "role": role,
        "repo": KERNEL,
        "revision": "v1",
        "commit": commit,
        "member": None,
        "layers": {},
        "variant": "torch-universal",
        "rejected": [],
        "kernel_version": 1,
        "files": [file("build/torch-universal/__init__.py", commit.encode())],
        "metadata_sha256": EMPTY,
        "metadata_digest": None,
        "dependencies": [],
        "publisher": "test-org",
        "trusted": True,
        "signature": "absent",
    }


def lock_body(**changes: Any) -> dict[str, Any]:
    """A lock as a table; `changes` replace top-level fields."""
    body: dict[str, Any] = {
        "version": 1,
        "name": "tiny",
        "recipe_sha256": sha256(RECIPE),
        "kitbuild": {"version": "0.1.0", "guest_sha256": EMPTY, "layout": 1},
        "target": "cpu",
        "package_set": {"target": "cpu", "sha256": EMPTY},
        "base": {
            "name": "kitbuild-base-cpu",
            "manifest_digest": "sha256:" + sha256("manifest"),
            "config_digest": "sha256:" + sha256(CONFIG),
            "diff_ids": ["sha256:" + sha256(LAYER)],
            "dockerfile_sha256": None,
            "upstream": None,
            "python": "3.11.2",
            "interpreter": "/usr/bin/python3.11",
            "glibc": "2.36",
            "architecture": "amd64",
            "cuda": None,
            "packages": [{"name": "libc6", "version": "2.36-9", "architecture": "amd64", "sha256": None}],
        },
        "wheels": [wheel("torch", "2.13.0"), wheel("trl", "1.14.2")],
        "model": {
            "weights": None,
            "config": {"model_type": "qwen3", "hidden_size": 64},
            "tokenizer": {"path": "tokenizer", "files": [file("tokenizer.json", b"{}")]},
            "chat_template": None,
        },
        "datasets": [
            {
                "tree": {"path": "data", "files": [file("chats.jsonl", DATA)]},
                "format": "json",
                "config": None,
                "split": "train",
                "data_files": ["chats.jsonl"],
                "weight": None,
            }
        ],
        "evaluate": None,
        "kernels": [kernel()],
        "defaults": {
            "declared": {"trl.SFTConfig": {"max_grad_norm": 1.0}},
            "arguments": {"learning_rate": {"value": 1e-5, "origin": "recipe"}},
            "device_dependent": [],
        },
        "launch": {"nodes": 1, "processes_per_node": 1, "threads_per_process": 1, "strategy": "ddp"},
        "recipe": {"seed": 42, "train": {"learning_rate": 1e-5}, "determinism": {"mode": "strict"}},
        "advisories": [],
    }
    return body | changes


def metrics_line(step: int, **changes: Any) -> dict[str, Any]:
    line = {
        "step": step,
        "loss": (3.0 - step / 8).hex(),
        "grad_norm": (1.0 + step / 4).hex(),
        "learning_rate": (1e-5).hex(),
        "tokens": 128,
        "batch_sha256": sha256(f"batch {step}"),
        "seconds": (0.5).hex(),
        "peak_memory_bytes": 1 << 20,
    }
    return line | changes


def safetensors(tensors: dict[str, tuple[str, list[int], bytes]]) -> bytes:
    """A file of raw tensors: name to dtype, shape, bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def default_weights() -> dict[str, tuple[str, list[int], bytes]]:
    return {"embed.weight": ("F32", [2, 2], b"\1" * 16), "norm.weight": ("BF16", [4], b"\2" * 8)}


@dataclass(kw_only=True)
class Run:
    """A run to write; `manifest` replaces top-level fields of the manifest after all else is derived."""

    lock: dict[str, Any] = field(default_factory=lock_body)
    steps: list[dict[str, Any]] = field(default_factory=lambda: [metrics_line(step) for step in range(1, 6)])
    weights: dict[str, tuple[str, list[int], bytes]] = field(default_factory=default_weights)
    exit: dict[str, Any] | None = field(
        default_factory=lambda: {"schema": "kitbuild.exit/1", "exit_code": 0, "code": "ok", "phase": "done"}
    )
    device: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=lambda: {"0": 20})
    manifest: dict[str, Any] = field(default_factory=dict)

    def change_step(self, step: int, **changes: Any) -> None:
        self.steps[step - 1] |= changes

    def attention(self) -> dict[str, Any]:
        kernel = next((item for item in self.lock["kernels"] if item["role"] == "attention"), None)
        if kernel is None:
            return {"requested": "sdpa", "used": "sdpa"}
        return {"requested": f"{kernel['repo']}@{kernel['revision']}", "used": f"{kernel['repo']}@{kernel['commit']}"}

    def body(self) -> dict[str, Any]:
        """The manifest."""
        lock = Lock.model_validate(self.lock)
        steps = self.steps
        return {
            "format": 1,
            "name": "tiny",
            "lock": json.loads(lock.to_bytes()),
            "lock_sha256": lock.sha256,
            "content_sha256": lock.content_sha256,
            "image": {
                "config_digest": "sha256:" + lock.sha256,
                "manifest_digest": "sha256:" + sha256(lock.sha256),
                "engine_id": "sha256:" + lock.sha256,
                "content_sha256": lock.sha256,
            },
            "engine": "docker",
            "environment": {
                "locked": True,
                "python": "3.11.2",
                "packages": {entry["name"]: entry["version"] for entry in self.lock["wheels"]},
                "variables": {"OMP_NUM_THREADS": "1"},
                "hardening": {},
            }
            | self.environment,
            "device": {
                "kind": "cpu",
                "name": "cpu",
                "count": 1,
                "compute_capability": None,
                "sm_count": None,
                "mig": None,
                "memory_bytes": None,
                "cpu": {"vendor": "AuthenticAMD", "family": 25, "model_name": "EPYC", "isa": "AVX512", "cores": 2},
                "threads": 1,
            }
            | self.device,
            "driver": None,
            "build": {"torch": "2.13.0+cpu", "cuda": None, "cudnn": None, "config": "PyTorch built with: GCC"},
            "launch": {"nodes": 1, "processes_per_node": 1, "world_size": 1, "strategy": "ddp", "proven": []},
            "arguments": {"learning_rate": 1e-5, "output_dir": "/out"},
            "attention": self.attention(),
            "kernels": [
                {
                    "role": entry["role"],
                    "repo": entry["repo"],
                    "commit": entry["commit"],
                    "variant": entry["variant"],
                    "member": member,
                    "file": "__init__.py",
                    "calls": self.calls,
                }
                for entry in self.lock["kernels"]
                for member in entry["layers"].values() or [entry["member"]]
            ],
            "liger": {"options": {}, "patched": []},
            "data": {
                "fingerprint": data_fingerprint(line["batch_sha256"] for line in steps),
                "rows": 10,
                "steps": len(steps),
            },
            "results": {
                "steps": len(steps),
                "loss_first": steps[0]["loss"] if steps else None,
                "loss_last": steps[-1]["loss"] if steps else None,
                "evaluate": {
                    "metric": "exact_match",
                    "before": {"loss": (2.0).hex(), "exact_match": 0.0, "examples": 4},
                    "after": {"loss": (1.0).hex(), "exact_match": 0.75, "examples": 4},
                },
                "seconds": {"train": 2.5},
                "tokens": 640,
            },
            "weights": {
                name: {"dtype": dtype, "shape": shape, "sha256": sha256(content)}
                for name, (dtype, shape, content) in self.weights.items()
            },
            "seed": self.lock["recipe"]["seed"],
            "started": "2026-01-01T00:00:00Z",
            "finished": "2026-01-01T00:01:00Z",
            "complete": True,
        } | self.manifest

    def write(self, path: Path, *, sealed: bool = False) -> Path:
        """Write the run directory; `sealed` as this guest does it, else as an older one did."""
        if sealed:
            self.manifest = {**self.manifest, "files": "archive.json"}
        (path / "model").mkdir(parents=True)
        (path / "logs").mkdir()
        (path / "manifest.json").write_text(json.dumps(self.body()))
        (path / "lock.json").write_bytes(Lock.model_validate(self.lock).to_bytes())
        (path / "recipe.yaml").write_bytes(RECIPE)
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in self.steps))
        if self.exit is not None:
            (path / "exit.json").write_text(json.dumps(self.exit))
        (path / "logs" / "guest.log").write_text("kit: done\n")
        (path / "model" / "model.safetensors").write_bytes(safetensors(self.weights))
        (path / "model" / "config.json").write_text("{}")
        if sealed:
            (path / "model" / "tokenizer.json").write_text('{"model": {}}')
            seal.write(path)
        return path
