"""What any scheduler must know of a job, from the lock alone: processes, devices, inputs, what the guest is told."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import kitbuild
from kitbuild.guest_files import GUEST_UID
from kitbuild.run.container import SHARED_MEMORY_BYTES, input_places

if TYPE_CHECKING:
    from pathlib import PurePosixPath

    from kitbuild.lock.models import Lock
    from kitbuild.render.reference import ImageReference

GRACE_SECONDS = 600
"""From SIGTERM to SIGKILL: the step that runs, a checkpoint, and the record must fit in."""
RENDEZVOUS_PORT = 29500
LABEL_CHARACTERS = 40
"""A pod of a TrainJob is called <label>-node-0-<index>-<5 random>, in at most 63 characters."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training job, before anything of a scheduler."""

    name: str
    recipe: str
    lock_sha256: str
    nodes: int
    processes: int
    threads: int
    cuda: bool
    inputs: tuple[PurePosixPath, ...]

    @classmethod
    def of(cls, lock: Lock, *, recipe: str) -> Self:
        """From the lock; `recipe` is the path as the user wrote it."""
        launch = lock.recipe.get("launch") or {}
        return cls(
            name=lock.name,
            recipe=recipe,
            lock_sha256=lock.sha256,
            nodes=int(launch.get("nodes", 1)),
            processes=int(launch.get("processes_per_node", 1)),
            threads=int(launch.get("threads_per_process", 1)),
            cuda=lock.target != "cpu",
            inputs=tuple(place for place, _ in input_places(lock, baked=frozenset(lock.recipe["image"]["bake"]))),
        )

    @property
    def label(self) -> str:
        """The name as a DNS label that starts with a letter (RFC 1035), short enough for what is added to it."""
        text = re.sub(r"[^a-z0-9-]+", "-", self.name.lower()).strip("-")
        text = text if text[:1].isalpha() else f"kit-{text}".rstrip("-")
        if len(text) <= LABEL_CHARACTERS:
            return text
        return f"{text[: LABEL_CHARACTERS - 7].rstrip('-')}-{hashlib.sha256(self.name.encode()).hexdigest()[:6]}"

    @property
    def cores(self) -> int:
        """Processor cores of a node that training uses; a GPU's process has its data loading beside it."""
        return self.processes * max(self.threads, 4 if self.cuda else 1)

    @property
    def shared_memory_bytes(self) -> int:
        """Shared memory of a node: what one process is given by `kitbuild run`, for each."""
        return self.processes * SHARED_MEMORY_BYTES

    @property
    def title(self) -> str:
        """One line for a comment: nothing that a name holds can end it."""
        devices = "GPU" if self.cuda else "CPU"
        shape = f"{_count(self.nodes, 'node')} × {_count(self.processes, f'{devices} process', 'es')}"
        return f"{one_line(self.name)}: {shape}; lock {self.lock_sha256[:12]}, kitbuild {kitbuild.__version__}"

    def environment(self, engine: str, *, image: ImageReference | str, hardening: dict[str, object]) -> dict[str, str]:
        """What the guest is told, less what only a node knows of itself (NODE_RANK)."""
        told = {
            "KIT_ENGINE": engine,
            "KIT_HARDENING": json.dumps(hardening, sort_keys=True),
            "KIT_LOCKED": "1",
            "KIT_RESUME": "auto",
        }
        if not isinstance(image, str):
            told["KIT_IMAGE"] = json.dumps(image.identity, sort_keys=True)
        return told


def hardened(network: str) -> dict[str, object]:
    """As the guest records it, where all of it is in force."""
    return {"cap_drop": "all", "network": network, "new_privileges": False, "read_only_root": True}


def one_line(text: str) -> str:
    """Text for a comment."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}" + (plural if number != 1 else "")


USER = f"{GUEST_UID}:{GUEST_UID}"
