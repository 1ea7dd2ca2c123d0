"""A Compose file: one service for a node. Several nodes on one host are for trying out what several hosts will do."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from kitbuild.render.job import GRACE_SECONDS, RENDEZVOUS_PORT, USER, Job, hardened, one_line
from kitbuild.render.yaml import Noted, documents
from kitbuild.run.container import TMPFS

if TYPE_CHECKING:
    from kitbuild.render.reference import ImageReference


def render_compose(job: Job, *, image: ImageReference, inputs: str, out: str) -> str:
    """The file. `image` may be in this machine's engine only."""
    services = {_service_name(job, rank): _service(job, rank, image, inputs, out) for rank in range(job.nodes)}
    value: dict[str, Any] = {"services": services}  # no `name`: Compose 1 refuses it
    if job.nodes > 1:
        value["networks"] = {"job": Noted({"internal": True}, "The job's own, with no way out.")}
    shared = [f"{out}/checkpoints"] if job.nodes > 1 else []
    folders = shlex.join([*(_out(job, rank, out) for rank in range(job.nodes)), *shared])
    fetch = f"  kitbuild fetch {shlex.join([one_line(job.recipe), '--inputs', inputs])}\n" if job.inputs else ""
    return documents(
        _dollars(value),
        head=f"""\
{job.title}
With Docker Compose, or podman-compose; made by `kitbuild render compose`.

{fetch}  mkdir -p {folders}
  chown {USER} {folders}   # as root; or as yourself, see below
  docker compose -p {job.label} -f FILE up        # again after a stop: goes on where the last checkpoint is
  docker compose -p {job.label} -f FILE stop      # a checkpoint is saved, exit code 10

KIT_USER=$(id -u):$(id -g) in front of `docker compose`: as yourself, no chown.""",
    )


def _service_name(job: Job, rank: int) -> str:
    return "train" if job.nodes == 1 else f"node-{rank}"


def _out(job: Job, rank: int, out: str) -> str:
    return out if job.nodes == 1 else f"{out}/node-{rank}"


class _Interpolated(str):
    """Compose's own variables: the one place where a `$` stays one."""

    __slots__ = ()


def _dollars(value: Any) -> Any:
    """Every `$` doubled: https://docs.docker.com/reference/compose-file/interpolation/."""
    if isinstance(value, Noted):
        return Noted(_dollars(value.value), value.note)
    if isinstance(value, dict):
        return {key: _dollars(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_dollars(item) for item in value]
    return value.replace("$", "$$") if isinstance(value, str) and not isinstance(value, _Interpolated) else value


def _service(job: Job, rank: int, image: ImageReference, inputs: str, out: str) -> dict[str, Any]:
    network = "none" if job.nodes == 1 else "job"
    told = job.environment("docker", image=image, hardening=hardened(network))
    environment: dict[str, Any] = dict(told)
    if job.nodes > 1:
        environment |= {"MASTER_ADDR": "node-0", "MASTER_PORT": str(RENDEZVOUS_PORT), "NODE_RANK": str(rank)}
    mounts = [_bind(f"{inputs}/{place.relative_to('/inputs')}", str(place), read_only=True) for place in job.inputs]
    mounts.append(_bind(_out(job, rank, out), "/out", read_only=False))
    if job.nodes > 1:  # one folder for all nodes
        mounts.append(_bind(f"{out}/checkpoints", "/out/checkpoints", read_only=False))
    note = "By digest." if image.path else "This machine's own image, by digest: it was never pushed."
    found: dict[str, Any] = {
        "image": Noted(str(image), note),
        "command": ["train"],
        "user": _Interpolated("${KIT_USER:-" + USER + "}"),
        "environment": environment,
        "read_only": Noted(value=True, note="Nothing is written but /out and two file systems in memory."),
        "tmpfs": [f"{place}:{options}" for place, options in TMPFS.items()],
        "shm_size": Noted(job.shared_memory_bytes, "Shared memory, for data loaders and NCCL."),
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "volumes": Noted(
            mounts, f"Inputs as `kitbuild fetch {job.recipe} --inputs DIR` lays them out; each byte is verified."
        )
        if job.inputs
        else mounts,
        "restart": "no",
        "stop_signal": "SIGTERM",
        "stop_grace_period": Noted(f"{GRACE_SECONDS}s", "A step and a checkpoint must fit in."),
    }
    if job.nodes == 1:
        found["network_mode"] = "none"
    else:
        found |= {"hostname": _service_name(job, rank), "networks": ["job"]}
    if job.cuda:
        devices = [str(rank * job.processes + index) for index in range(job.processes)]
        found["deploy"] = {
            "resources": {
                "reservations": {"devices": [{"driver": "nvidia", "device_ids": devices, "capabilities": ["gpu"]}]}
            }
        }
    return found


def _bind(source: str, target: str, *, read_only: bool) -> dict[str, Any]:
    place = source if source.startswith(("/", "./", "../")) else f"./{source}"
    return {"type": "bind", "source": place, "target": target, "read_only": read_only}
