"""Step 4: what a training container is given. Pure: from a lock and an image to the arguments of the engine.

The same description is printed as the equal `docker run` line, so that anyone can start it without kitbuild.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from kitbuild.lock.models import LockedFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kitbuild.lock.models import Lock, LockedTree
    from kitbuild.store import Store

STOP_SECONDS = 600
"""What `docker stop` waits before it kills: a step and a checkpoint have to fit in. Docker's own 10 s are too few."""
SHARED_MEMORY_BYTES = 1 << 30
TMPFS = {"/tmp": "rw,nosuid,nodev,mode=1777", "/cache": "rw,nosuid,nodev,exec,mode=1777"}  # noqa: S108 - in the container


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A host path inside the container."""

    host: Path
    container: PurePosixPath
    read_only: bool = True


@dataclass(frozen=True, kw_only=True)
class ContainerSpec:
    """One training container, hardened: no network, no capability, read-only root, an ordinary user."""

    image: str
    name: str
    user: str
    mounts: tuple[Mount, ...]
    volumes: tuple[str, ...] = ()
    """Places that are the container's own, for an engine that has none of our paths."""
    environment: Mapping[str, str] = field(default_factory=dict)
    gpus: bool = False
    command: tuple[str, ...] = ("train",)

    def engine_arguments(self) -> dict[str, Any]:
        """What docker-py's `create_container` and `create_host_config` are given."""
        from docker.types import DeviceRequest  # noqa: PLC0415 - a third of a second
        from docker.types import Mount as EngineMount  # noqa: PLC0415

        return {
            "image": self.image,
            "command": list(self.command),
            "name": self.name,
            "user": self.user,
            "environment": dict(self.environment),
            "mounts": [
                EngineMount(str(mount.container), str(mount.host), type="bind", read_only=mount.read_only)
                for mount in self.mounts
            ]
            + [EngineMount(place, None, type="volume") for place in self.volumes],
            "tmpfs": dict(TMPFS),
            "read_only": True,
            "network_mode": "none",
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges"],
            "shm_size": SHARED_MEMORY_BYTES,
            "device_requests": [DeviceRequest(count=-1, capabilities=[["gpu"]])] if self.gpus else None,
            "detach": True,
            "stop_timeout": STOP_SECONDS,
        }

    def command_line(self) -> str:
        """The equal `docker run` line, for a shell."""
        return shlex.join(self.command_line_words())

    def command_line_words(self) -> list[str]:
        """The equal `docker run`, word by word."""
        words = [
            "docker",
            "run",
            "--rm",
            "--stop-timeout",
            str(STOP_SECONDS),
            "--network",
            "none",
            "--read-only",
            "--cap-drop",
            "ALL",
        ]
        words += ["--security-opt", "no-new-privileges", "--user", self.user, "--shm-size", str(SHARED_MEMORY_BYTES)]
        for place, options in TMPFS.items():
            words += ["--tmpfs", f"{place}:{options}"]
        if self.gpus:
            words += ["--gpus", "all"]
        for mount in self.mounts:
            readonly = ",readonly" if mount.read_only else ""
            source = f"source={mount.host}"
            if {",", '"'} & set(source):  # the value of --mount is one line of CSV
                source = '"' + source.replace('"', '""') + '"'
            words += ["--mount", f"type=bind,{source},target={mount.container}{readonly}"]
        for key, value in sorted(self.environment.items()):
            words += ["-e", f"{key}={value}"]
        return [*words, self.image, *self.command]


def input_places(lock: Lock, *, baked: frozenset[str]) -> Iterator[tuple[PurePosixPath, LockedTree | LockedFile]]:
    """Each input that is not `baked`: where the guest looks for it, and what it is."""
    inputs = PurePosixPath("/inputs")
    if "model" not in baked:
        if lock.model.weights is not None:
            yield inputs / "model", lock.model.weights
        if lock.model.tokenizer is not None:
            yield inputs / "tokenizer", lock.model.tokenizer
        if lock.model.chat_template is not None:
            yield inputs / "chat_template.jinja", lock.model.chat_template
    if "dataset" not in baked:
        for index, data in enumerate(lock.datasets):
            yield inputs / "data" / str(index), data.tree
        if lock.evaluate is not None:
            yield inputs / "evaluate", lock.evaluate.tree


def input_mounts(lock: Lock, store: Store, *, baked: frozenset[str]) -> tuple[tuple[Path, PurePosixPath], ...]:
    """Where each input that is not `baked` lies on the host, and where the guest looks for it."""
    return tuple((_stored(found, place.name, store), place) for place, found in input_places(lock, baked=baked))


def _stored(found: LockedTree | LockedFile, name: str, store: Store) -> Path:
    if isinstance(found, LockedFile):
        return store.tree([(name, found.sha256)]) / name
    return store.tree([(file.path, file.sha256) for file in found.files])


def guest_environment(
    *, engine: str, locked: bool, image: Mapping[str, Any] | None, resume: bool, measure: bool = False
) -> dict[str, str]:
    """All that the host tells the guest."""
    told = {"KIT_ENGINE": engine, "KIT_LOCKED": "1" if locked else "0"}
    if image is not None:
        told["KIT_IMAGE"] = json.dumps(dict(image), sort_keys=True)
    if resume:
        told["KIT_RESUME"] = "1"
    if measure:
        told["KIT_MEASURE"] = "1"
    if engine == "docker":
        told["KIT_HARDENING"] = json.dumps(
            {"cap_drop": "all", "network": "none", "new_privileges": False, "read_only_root": True}, sort_keys=True
        )
    return told
