"""Step 3: reach a container engine, and say in one sentence why that did not work."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import docker
import docker.errors
import requests.exceptions

from kitbuild.errors import ImageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from docker import DockerClient

# An engine unpacks for minutes between two words of a load.
TIMEOUT_SECONDS = 900


def connect(environ: Mapping[str, str]) -> DockerClient:
    """The engine that DOCKER_HOST names, else Docker's socket, else podman's; exit 5 with what to do."""
    try:
        return _client(environ)
    except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
        for place in () if environ.get("DOCKER_HOST") else podman_sockets(environ):
            if place.is_socket():
                with contextlib.suppress(docker.errors.DockerException, requests.exceptions.RequestException):
                    return _client({**environ, "DOCKER_HOST": f"unix://{place}"})
        raise _unreachable(error, environ.get("DOCKER_HOST") or "the default socket") from error


def _client(environ: Mapping[str, str]) -> DockerClient:
    # The ssh program, as the docker command does: its configuration, agent and known hosts are the user's.
    client = docker.from_env(environment=dict(environ), timeout=TIMEOUT_SECONDS, use_ssh_client=True)
    client.ping()
    return client


def podman_sockets(environ: Mapping[str, str]) -> Iterator[Path]:
    """Where podman serves Docker's API: the user's own, then the machine's.

    https://docs.podman.io/en/latest/markdown/podman-system-service.1.html
    """
    if environ.get("XDG_RUNTIME_DIR"):
        yield Path(environ["XDG_RUNTIME_DIR"]) / "podman/podman.sock"
    yield Path("/run/podman/podman.sock")


def engine_url(host: str) -> str:
    """What DOCKER_HOST is for `--host`: `user@machine` is reached by SSH."""
    return host if "://" in host else f"ssh://{host}"


def _unreachable(error: Exception, host: str) -> ImageError:
    text = str(error)
    if "Install paramiko" in text:
        return ImageError(
            f"the engine at {host} is reached by SSH, and what the Docker SDK needs for that is not installed",
            hint="pip install 'kitbuild[ssh]'",
        )
    if host.startswith("ssh://"):
        return ImageError(
            f"no container engine answers at {host}",
            hint=f"`docker -H {host} version` must work: SSH without a password, and the docker command there",
        )
    if "PermissionError" in text or "Permission denied" in text:
        return ImageError(
            f"no permission to use the container engine at {host}",
            hint="add yourself to its group (`sudo usermod -aG docker $USER`, then log in again), or use rootless mode",
        )
    return ImageError(
        f"no container engine answers at {host}",
        hint="start one (`sudo systemctl start docker`, `systemctl --user start podman.socket`, or Docker Desktop),"
        " set DOCKER_HOST,"
        " or run without one: `kitbuild run --engine local`",
    )


@contextlib.contextmanager
def engine_errors(doing: str) -> Iterator[None]:
    """Errors of the SDK and of the connection, as exit 5 with what was being done."""
    try:
        yield
    except docker.errors.DockerException as error:
        text = getattr(error, "explanation", None) or str(error)
        raise engine_error(doing, str(text)) from error
    except requests.exceptions.RequestException as error:
        raise engine_error(doing, str(error)) from error


def engine_error(doing: str, text: str) -> ImageError:
    """The one error of an engine that refused."""
    if "no space left on device" in text.lower():
        return ImageError(
            f"the engine could not {doing}: its disk is full",
            hint="free some space there (`docker system df`, `docker image prune`)",
        )
    return ImageError(f"the engine could not {doing}: {text}")
