"""Step 4, with a container engine: start the locked image and follow it. Docker SDK; podman speaks the same API."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import docker
import docker.errors
import requests.exceptions

from kitbuild.errors import RunError
from kitbuild.guest_files import GUEST_UID
from kitbuild.run.container import ContainerSpec, Mount, guest_environment, input_mounts
from kitbuild.run.follow import Stop, follow, followed, keep_printed, raise_for

if TYPE_CHECKING:
    from collections.abc import Mapping

    from docker.models.containers import Container

    from kitbuild.lock.models import Lock
    from kitbuild.progress import Progress
    from kitbuild.store import Store

RUN_LABEL = "org.kitbuild.run"
HOST_CONFIG = (
    "mounts", "tmpfs", "read_only", "network_mode", "cap_drop", "security_opt", "shm_size", "device_requests",
)  # fmt: skip
ENDED = ("created", "exited", "dead")


class ContainerProcess:
    """A started container as `follow` sees it."""

    def __init__(self, container: Container) -> None:
        self._container = container

    def exit_code(self) -> int | None:
        """None while it runs."""
        try:
            self._container.reload()
        except docker.errors.NotFound as error:
            raise RunError("the container was removed while it ran") from error
        except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
            raise RunError(
                f"the engine stopped answering during the run: {error}",
                hint="start it again, then go on with `kitbuild run RECIPE --resume RUN`",
            ) from error
        state = self._container.attrs["State"]
        return None if state["Status"] in {"created", "running", "paused", "restarting"} else int(state["ExitCode"])

    def stop(self) -> None:
        """SIGTERM: the guest saves a checkpoint and ends with exit code 10."""
        with contextlib.suppress(docker.errors.APIError):
            self._container.kill(signal="SIGTERM")

    def kill(self) -> None:
        """SIGKILL."""
        with contextlib.suppress(docker.errors.APIError):
            self._container.kill()

    def out_of_memory(self) -> bool:
        """Whether the kernel's OOM killer took it."""
        return bool(self._container.attrs["State"].get("OOMKilled"))


def container_spec(
    lock: Lock, *, image: Mapping[str, Any], run_dir: Path, store: Store, resume: bool, measure: bool = False
) -> ContainerSpec:
    """The container for a run; gives `run_dir` to the guest's user when we are root."""
    root = os.geteuid() == 0
    if root:
        for path in (run_dir, *run_dir.rglob("*")):
            os.chown(path, GUEST_UID, GUEST_UID, follow_symlinks=False)
    mounts = [
        Mount(host=host, container=place)
        for host, place in input_mounts(lock, store, baked=frozenset(lock.recipe["image"]["bake"]))
    ]
    return ContainerSpec(
        image=str(image["engine_id"]),
        name=run_dir.name,
        user=f"{GUEST_UID}:{GUEST_UID}" if root else f"{os.geteuid()}:{os.getegid()}",
        mounts=(*mounts, Mount(host=run_dir, container=PurePosixPath("/out"), read_only=False)),
        environment=guest_environment(engine="docker", locked=True, image=image, resume=resume, measure=measure),
        gpus=lock.target != "cpu",
    )


def run_container(
    spec: ContainerSpec, run_dir: Path, *, client: docker.DockerClient, progress: Progress, stop: Stop
) -> None:
    """Start, follow to the end, remove. Raises what the guest says went wrong."""
    with followed(run_dir):
        remove_abandoned(client)
        _make_room(spec.name, client)
        container = create(spec, {RUN_LABEL: str(run_dir)}, client)
        process = ContainerProcess(container)
        try:
            start(container)
            code = follow(process, run_dir, progress=progress, stop=stop)
            keep_log(container, run_dir)
            raise_for(code, process, run_dir, stop=stop)
        finally:
            with contextlib.suppress(docker.errors.APIError, requests.exceptions.RequestException):
                container.remove(force=True)


def _is_followed(run_dir: Path) -> bool:
    try:
        with followed(run_dir):
            return False
    except RunError:
        return True
    except OSError:
        return False


def remove_abandoned(client: docker.DockerClient) -> None:
    """Remove ended containers whose kitbuild was killed. One that still trains is left alone: its archive counts."""
    with contextlib.suppress(docker.errors.APIError, requests.exceptions.RequestException):
        wanted: dict[str, str | list[str] | bool] = {"label": RUN_LABEL, "status": list(ENDED)}
        for container in client.containers.list(all=True, ignore_removed=True, filters=wanted):
            if not _is_followed(Path(container.labels[RUN_LABEL])):
                container.remove()


def _make_room(name: str, client: docker.DockerClient) -> None:
    """A run that is resumed may have left a container of its name."""
    try:
        old = client.containers.get(name)
        if old.status not in ENDED:
            raise RunError(
                f"the container {name} still trains in this run directory",
                hint=f"wait for its end (docker wait {name}), or have it save and stop: docker stop {name}",
            )
        old.remove()
    except docker.errors.NotFound:
        return
    except docker.errors.APIError as error:
        raise RunError(f"the engine cannot remove the old container {name}: {error.explanation or error}") from error


def create(spec: ContainerSpec, labels: dict[str, str], client: docker.DockerClient) -> Container:
    """A container that is not started; or what the engine said."""
    try:
        # docker-py's `containers.create` takes no stop_timeout; what it calls does.
        given = spec.engine_arguments()
        host = client.api.create_host_config(**{name: given.pop(name) for name in HOST_CONFIG})
        made = client.api.create_container(**given, host_config=host, labels=labels)
        return client.containers.get(made["Id"])
    except docker.errors.ImageNotFound as error:
        raise RunError(f"the engine has no image {spec.image[:19]}", hint="build it: kitbuild image RECIPE") from error
    except docker.errors.APIError as error:
        raise RunError(f"the engine refused the container: {error.explanation or error}") from error


def start(container: Container) -> None:
    """Start it; or what the engine said."""
    try:
        container.start()
    except docker.errors.APIError as error:
        text = str(error.explanation or error)
        if "could not select device driver" in text:
            raise RunError(
                "the engine cannot give a GPU to a container",
                hint="install the NVIDIA Container Toolkit, or run with --engine local",
            ) from error
        raise RunError(f"the engine could not start the container: {text}") from error


def keep_log(container: Container, run_dir: Path) -> None:
    """What it printed before it could open its own log."""
    with contextlib.suppress(docker.errors.APIError):
        keep_printed(container.logs(), run_dir)
