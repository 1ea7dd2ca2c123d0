"""Step 3: the image's OCI config and manifest, pure functions of the base's config and the lock."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import kitbuild
from kitbuild.base.oci import config_bytes, manifest_bytes
from kitbuild.guest_files import GUEST_UID

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kitbuild.image.models import Base, Layer
    from kitbuild.lock.models import Lock

USER = f"{GUEST_UID}:{GUEST_UID}"
ENTRYPOINT = "/opt/kit/bin/kit"
CONTENT_LABEL = "org.kitbuild.content"
LOCK_LABEL = "org.kitbuild.lock"
VERSION_LABEL = "org.kitbuild.version"
EPOCH = "1970-01-01T00:00:00Z"
_OCI = "org.opencontainers.image."
_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENVIRONMENT = {
    "HF_DATASETS_OFFLINE": "1",
    "HF_HOME": "/cache/hf",
    "HF_HUB_OFFLINE": "1",
    "HOME": "/tmp",  # noqa: S108 - a tmpfs of the container's own
    "KERNELS_CACHE": "/kit/kernels",
    "LANG": "C.UTF-8",
    "MPLCONFIGDIR": "/cache/matplotlib",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONNOUSERSITE": "1",
    "TORCHINDUCTOR_CACHE_DIR": "/cache/inductor",
    "TORCH_EXTENSIONS_DIR": "/cache/torch_extensions",
    "TRANSFORMERS_OFFLINE": "1",
    "TRITON_CACHE_DIR": "/cache/triton",
    "USER": "kit",
    "XDG_CACHE_HOME": "/cache/xdg",
}


def image_config(lock: Lock, base: Base, own: Sequence[Layer], *, content_sha256: str) -> bytes:
    """The config: no time, no host, no name of who built it."""
    facts: dict[str, Any] = json.loads(base.config)
    below: dict[str, Any] = facts.get("config") or {}
    return config_bytes(
        architecture=lock.base.architecture,
        diff_ids=[*lock.base.diff_ids, *(layer.digest for layer in own)],
        history=[
            *(_step(f"kitbuild base {lock.base.name}") for _ in lock.base.diff_ids),
            *(_step(f"kitbuild layer {layer.name}") for layer in own),
        ],
        config={
            "Entrypoint": [ENTRYPOINT],
            "Env": _environment(below.get("Env") or []),
            "Labels": {
                **_inherited(below.get("Labels") or {}),
                **oci_annotations(lock),
                CONTENT_LABEL: content_sha256,
                LOCK_LABEL: lock.sha256,
                VERSION_LABEL: kitbuild.__version__,
            },
            "StopSignal": "SIGTERM",
            "User": USER,
            "WorkingDir": "/out",
        },
    )


def _step(created_by: str) -> dict[str, str]:
    """A line of the history. podman 4.3 takes one without a time for a nil pointer and fails."""
    return {"created": EPOCH, "created_by": created_by}


def image_manifest(config: bytes, layers: Sequence[Layer], *, annotations: Mapping[str, str] | None = None) -> bytes:
    """The manifest over uncompressed layers."""
    return manifest_bytes(config, [(layer.digest, layer.size) for layer in layers], annotations=annotations)


def oci_annotations(lock: Lock) -> dict[str, str]:
    """OCI's own names for what the image is: labels for who has it, annotations of the manifest for who has not.

    https://github.com/opencontainers/image-spec/blob/main/annotations.md
    """
    return {
        f"{_OCI}base.digest": lock.base.manifest_digest,
        f"{_OCI}base.name": lock.base.name,
        f"{_OCI}created": EPOCH,
        f"{_OCI}description": f"Training image of the recipe {lock.name}, made by kitbuild from its lock",
        f"{_OCI}title": lock.name,
        f"{_OCI}version": lock.sha256[:12],
    }


def _inherited(labels: Mapping[str, str]) -> dict[str, str]:
    """The base's labels; what OCI's names say of the base is not true of this image."""
    return {key: value for key, value in labels.items() if not key.startswith(_OCI)}


def _environment(below: Sequence[str]) -> list[str]:
    """The base's variables (NVIDIA's among them) under ours, sorted."""
    values = dict(pair.split("=", 1) for pair in below if "=" in pair)
    path = values.get("PATH") or _DEFAULT_PATH
    merged = {**values, **ENVIRONMENT, "PATH": f"/opt/kit/bin:{path}"}
    return [f"{key}={merged[key]}" for key in sorted(merged)]
