"""Step 3: the image's OCI config and manifest, pure functions of the base's config and the lock."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import kitbuild
from kitbuild.base.oci import config_bytes, manifest_bytes
from kitbuild.guest_files import GUEST_UID

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kitbuild.image.models import Base, Layer
    from kitbuild.lock.models import Lock

USER = f"{GUEST_UID}:{GUEST_UID}"
ENTRYPOINT = "/opt/kit/bin/kit"
CONTENT_LABEL = "org.kitbuild.content"
LOCK_LABEL = "org.kitbuild.lock"
VERSION_LABEL = "org.kitbuild.version"
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
            *({"created_by": f"kitbuild base {lock.base.name}"} for _ in lock.base.diff_ids),
            *({"created_by": f"kitbuild layer {layer.name}"} for layer in own),
        ],
        config={
            "Entrypoint": [ENTRYPOINT],
            "Env": _environment(below.get("Env") or []),
            "Labels": {
                **(below.get("Labels") or {}),
                CONTENT_LABEL: content_sha256,
                LOCK_LABEL: lock.sha256,
                VERSION_LABEL: kitbuild.__version__,
            },
            "StopSignal": "SIGTERM",
            "User": USER,
            "WorkingDir": "/out",
        },
    )


def image_manifest(config: bytes, layers: Sequence[Layer]) -> bytes:
    """The manifest over uncompressed layers."""
    return manifest_bytes(config, [(layer.digest, layer.size) for layer in layers])


def _environment(below: Sequence[str]) -> list[str]:
    """The base's variables (NVIDIA's among them) under ours, sorted."""
    values = dict(pair.split("=", 1) for pair in below if "=" in pair)
    path = values.get("PATH") or _DEFAULT_PATH
    merged = {**values, **ENVIRONMENT, "PATH": f"/opt/kit/bin:{path}"}
    return [f"{key}={merged[key]}" for key in sorted(merged)]
