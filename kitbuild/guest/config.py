"""What the guest reads before anything else: the lock, where things are, what the host says. Standard library only."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kitbuild.errors import LockError, UsageError, VerificationError
from kitbuild.guest.identity import content_sha256
from kitbuild.guest.listing import check_lock

if TYPE_CHECKING:
    from collections.abc import Mapping

LOCK_VERSION = 1
CHECKPOINT_SECONDS = 1800.0


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where the guest finds and puts things; `/`, `/out` and `/cache` in a container."""

    root: Path
    out: Path
    cache: Path

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Places:
        """From KIT_ROOT, KIT_OUT and KIT_CACHE."""
        root = Path(environ.get("KIT_ROOT", "/")).resolve()
        out = Path(environ.get("KIT_OUT", "/out")).resolve()
        return cls(root=root, out=out, cache=Path(environ.get("KIT_CACHE", "/cache")).resolve())

    @property
    def kit(self) -> Path:
        """The lock and the kernels."""
        return self.root / "kit"

    @property
    def kernels(self) -> Path:
        """The Hub kernels, as a Hugging Face cache."""
        return self.kit / "kernels"

    @property
    def inputs(self) -> Path:
        """Model, tokenizer and data."""
        return self.root / "inputs"

    @property
    def scratch(self) -> Path:
        """What the guest's own processes tell each other."""
        return self.cache / "kit"

    @property
    def checkpoints(self) -> Path:
        """Where a stopped run continues from."""
        return self.out / "checkpoints"

    def shown(self, path: Path) -> str:
        """The path as it is in the image."""
        return "/" + path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else str(path)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One locked Hub kernel: exactly one variant of one commit."""

    role: str
    repo: str
    commit: str
    member: str | None
    layers: Mapping[str, str]
    variant: str

    @property
    def folder(self) -> str:
        """Its variant below the kernel cache."""
        return f"{self.snapshot}/build/{self.variant}"

    @property
    def snapshot(self) -> str:
        """Its commit below the kernel cache."""
        return f"kernels--{self.repo.replace('/', '--')}/snapshots/{self.commit}"

    def __str__(self) -> str:
        return f"{self.repo} @ {self.commit[:7]}, variant {self.variant}"


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """One locked dataset, mounted under `folder`."""

    folder: str
    format: str
    data_files: tuple[str, ...]
    weight: float | None


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Processes, threads, and how they share the model."""

    nodes: int
    processes_per_node: int
    threads_per_process: int
    strategy: str
    zero_stage: int | None

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return self.nodes * self.processes_per_node

    @property
    def stage(self) -> int:
        """ZeRO's stage in force; 0 without DeepSpeed."""
        return (self.zero_stage or 2) if self.strategy == "deepspeed" else 0


@dataclass(frozen=True, kw_only=True)
class Config:
    """A typed, read-only view of lock.json and of what the host passed by environment."""

    places: Places
    raw: Mapping[str, Any]
    lock_sha256: str
    locked: bool
    engine: str
    resume: bool
    resume_only: bool
    measure: bool
    checkpoint_seconds: float | None
    image: Mapping[str, Any]
    hardening: Mapping[str, Any]

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Config:
        """Read the lock below KIT_ROOT; refuse a version that this guest does not know and a content that was edited."""
        places = Places.read(environ)
        path = places.kit / "lock.json"
        try:
            data = path.read_bytes()
            check_lock(places.kit / "content.json", data)
            raw = json.loads(data)
        except (OSError, ValueError) as error:
            raise LockError(f"{places.shown(path)} cannot be read: {error}") from error
        if not isinstance(raw, dict):
            raise LockError(f"{places.shown(path)} cannot be read: it is no lock")
        if raw.get("version") != LOCK_VERSION:
            raise LockError(f"the lock has version {raw.get('version')}; this guest reads version {LOCK_VERSION}")
        if raw.get("content_sha256") != content_sha256(raw):
            raise VerificationError(f"{places.shown(path)} was edited: content_sha256 is not that of its content")
        return cls(
            places=places,
            raw=raw,
            lock_sha256=hashlib.sha256(data).hexdigest(),
            locked=environ.get("KIT_LOCKED", "1") != "0",
            engine=environ.get("KIT_ENGINE", "docker"),
            # `auto` is for schedulers, which start the same job again: from a checkpoint where there is one.
            resume=environ.get("KIT_RESUME") in {"1", "auto"},
            resume_only=environ.get("KIT_RESUME") == "1",
            measure=environ.get("KIT_MEASURE") == "1",
            checkpoint_seconds=checkpoint_seconds(environ.get("KIT_CHECKPOINT_SECONDS")),
            image=json.loads(environ.get("KIT_IMAGE") or "{}"),
            hardening=json.loads(environ.get("KIT_HARDENING") or "{}"),
        )

    @property
    def portable(self) -> bool:
        """Whether the bits are promised on any x86-64 processor."""
        given = self.recipe.get("determinism")
        return self.strict and not self.cuda and bool(isinstance(given, dict) and given.get("cpu_portable"))

    @property
    def recipe(self) -> Mapping[str, Any]:
        """The recipe as parsed."""
        return self.raw["recipe"]  # type: ignore[no-any-return]

    @property
    def name(self) -> str:
        """The run's name."""
        return str(self.raw["name"])

    @property
    def seed(self) -> int:
        """Everything random follows from it."""
        return int(self.recipe["seed"])

    @property
    def cuda(self) -> bool:
        """Whether the target is a GPU."""
        return bool(self.raw["target"] != "cpu")

    @property
    def strict(self) -> bool:
        """Whether the bits are promised."""
        given = self.recipe.get("determinism") or "strict"
        return bool((given if isinstance(given, str) else given.get("mode", "strict")) == "strict")

    @property
    def virtual_ranks(self) -> int | None:
        """Micro-batches of a global batch that are merged by one tree, on any number of processes up to it."""
        given = self.recipe.get("determinism") or "strict"
        return None if isinstance(given, str) else given.get("virtual_ranks")

    @property
    def train(self) -> Mapping[str, Any]:
        """SFTConfig fields that the recipe sets."""
        return self.recipe.get("train") or {}

    @property
    def micro(self) -> int:
        """Examples that a process handles at once."""
        return int(self.recipe["batch"]["micro"])

    @property
    def accumulation(self) -> int:
        """Micro-batches per process in an optimizer step."""
        batch = self.recipe["batch"]
        total = batch["global"] if "global" in batch else batch["global_"]
        return int(total) // (self.micro * self.launch.world_size)

    @cached_property
    def launch(self) -> Launch:
        """How many processes and threads."""
        given = self.recipe.get("launch") or {}
        return Launch(
            nodes=given.get("nodes", 1),
            processes_per_node=given.get("processes_per_node", 1),
            threads_per_process=given.get("threads_per_process", 1),
            strategy=given.get("strategy", "ddp"),
            zero_stage=given.get("zero_stage"),
        )

    @cached_property
    def kernels(self) -> tuple[Kernel, ...]:
        """Every locked Hub kernel."""
        fields = ("role", "repo", "commit", "member", "layers", "variant")
        return tuple(Kernel(**{name: item[name] for name in fields}) for item in self.raw["kernels"])

    @property
    def attention_kernel(self) -> Kernel | None:
        """The kernel that does attention, where it is not built in."""
        return next((kernel for kernel in self.kernels if kernel.role == "attention"), None)

    @property
    def attention(self) -> str:
        """`attn_implementation` as transformers takes it, a Hub kernel by its commit."""
        kernel = self.attention_kernel
        if kernel is None:
            return str((self.recipe.get("kernels") or {}).get("attention", "sdpa"))
        return f"{kernel.repo}@{kernel.commit}" + (f":{kernel.member}" if kernel.member else "")

    @property
    def datasets(self) -> tuple[Dataset, ...]:
        """The training data, in the recipe's order."""
        return tuple(_dataset(item, f"data/{index}") for index, item in enumerate(self.raw["datasets"]))

    @property
    def evaluate(self) -> Dataset | None:
        """The held-out split."""
        return _dataset(self.raw["evaluate"], "evaluate") if self.raw.get("evaluate") else None

    @property
    def has_weights(self) -> bool:
        """Whether a checkpoint is fine-tuned (else the weights are random, from the seed)."""
        return self.raw["model"]["weights"] is not None

    @property
    def tokenizer_folder(self) -> Path:
        """Beside the weights, unless the lock has it apart."""
        return self.places.inputs / ("tokenizer" if self.raw["model"]["tokenizer"] else "model")


def checkpoint_seconds(text: str | None) -> float | None:
    """From KIT_CHECKPOINT_SECONDS; None: never."""
    try:
        seconds = float(text or CHECKPOINT_SECONDS)
    except ValueError as error:
        raise UsageError(f"KIT_CHECKPOINT_SECONDS is {text!r}", hint="a number of seconds; 0 for never") from error
    return seconds if seconds > 0 else None


def _dataset(item: Mapping[str, Any], folder: str) -> Dataset:
    files = item["data_files"] or tuple(file["path"] for file in item["tree"]["files"])
    return Dataset(folder=folder, format=item["format"], data_files=tuple(files), weight=item.get("weight"))


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0))
