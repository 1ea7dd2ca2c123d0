"""A lock of tiny wheels on a tiny base, made by hand."""

from __future__ import annotations

import base64
import hashlib
import io
import sys
import tarfile
import zipfile
from typing import TYPE_CHECKING, Any

from kitbuild.base import bases
from kitbuild.base.models import LockedBase
from kitbuild.base.oci import config_bytes, digest_of, manifest_bytes
from kitbuild.lock.files import maker
from kitbuild.lock.models import (
    Defaults,
    Lock,
    LockedDataset,
    LockedFile,
    LockedKernel,
    LockedModel,
    LockedTree,
    LockedWheel,
    PackageSet,
)
from kitbuild.store import Store

if TYPE_CHECKING:
    from pathlib import Path

    import docker

RECIPE = b"name: tiny\n"
COMMIT = "c" * 40
PYTHON = ".".join(str(part) for part in sys.version_info[:3])
SITE = f"/opt/kit/lib/python{PYTHON.rpartition('.')[0]}/site-packages"


def record_row(name: str, content: bytes) -> str:
    value = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
    return f"{name},sha256={value},{len(content)}\n"


def make_wheel(
    name: str,
    files: dict[str, bytes],
    *,
    version: str = "1.0",
    entry_points: str = "",
    purelib: bool = True,
    record: str | None = None,
    executable: tuple[str, ...] = (),
) -> tuple[str, bytes]:
    """File name and bytes of a wheel; members in the given order, with the time of the zip format's start."""
    info = f"{name}-{version}.dist-info"
    members = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: {str(purelib).lower()}\nTag: py3-none-any\n".encode(),
    }
    if entry_points:
        members[f"{info}/entry_points.txt"] = entry_points.encode()
    rows = "".join(record_row(path, content) for path, content in members.items()) + f"{info}/RECORD,,\n"
    members[f"{info}/RECORD"] = (rows if record is None else record).encode()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in members.items():
            item = zipfile.ZipInfo(path)
            item.external_attr = (0o100755 if path in executable else 0o100644) << 16
            archive.writestr(item, content)
    return f"{name}-{version}-py3-none-any.whl", out.getvalue()


def locked_wheel(store: Store, file: str, data: bytes) -> LockedWheel:
    name, version = file.split("-")[:2]
    sha256 = store.add_bytes(data)
    return LockedWheel(name=name, version=version, file=file, size=len(data), sha256=sha256, index="pypi")


def locked_file(store: Store, path: str, data: bytes) -> LockedFile:
    return LockedFile(path=path, size=len(data), sha256=store.add_bytes(data))


def make_base(store: Store) -> LockedBase:
    """One layer with one file, and a configuration such as a CUDA base has."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in (("etc/os-release", b"ID=tiny\n"), ("usr/bin/python3", b"#!none\n")):
            item = tarfile.TarInfo(name)
            item.size = len(data)
            archive.addfile(item, io.BytesIO(data))
    layer = out.getvalue()
    run = {"Env": ["PATH=/usr/bin:/bin", "NVIDIA_VISIBLE_DEVICES=all"], "Labels": {"base": "tiny"}}
    config = config_bytes(architecture="amd64", diff_ids=[digest_of(layer)], config=run, history=[{}])
    store.add_bytes(layer)
    store.add_bytes(config)
    base = LockedBase(
        name="tiny",
        manifest_digest=digest_of(manifest_bytes(config, [(digest_of(layer), len(layer))])),
        config_digest=digest_of(config),
        diff_ids=(digest_of(layer),),
        dockerfile_sha256=None,
        upstream=None,
        python=PYTHON,
        interpreter="/usr/bin/python3",
        glibc="2.36",
        architecture="amd64",
        cuda=None,
        packages=(),
    )
    bases.record(store, base)
    return base


def make_kernel(store: Store, *, source: bytes = b"def answer():\n    return 42\n") -> LockedKernel:
    variant = "torch-universal"
    files = {
        f"build/{variant}/__init__.py": source,
        f"build/{variant}/metadata.json": b'{"name": "tiny", "id": "tiny", "version": 1, "license": "Apache-2.0",'
        b' "backend": {"type": "cpu"}, "python-depends": []}',
    }
    return LockedKernel(
        role="attention",
        repo="org/tiny",
        revision="v1",
        commit=COMMIT,
        member=None,
        layers={},
        variant=variant,
        rejected=(),
        kernel_version=1,
        files=tuple(locked_file(store, path, data) for path, data in sorted(files.items())),
        metadata_sha256=hashlib.sha256(files[f"build/{variant}/metadata.json"]).hexdigest(),
        metadata_digest=None,
        dependencies=(),
        publisher="org",
        trusted=True,
        signature="absent",
    )


def make_lock(
    store: Store,
    wheels: tuple[LockedWheel, ...] | None = None,
    kernels: tuple[LockedKernel, ...] | None = None,
    *,
    bake: tuple[str, ...] = (),
    **changes: Any,
) -> Lock:
    """A whole lock; what it names is in the store."""
    if wheels is None:
        wheels = (
            locked_wheel(store, *make_wheel("torch", {"torch/__init__.py": b"version = {'b', 'a'}\n"})),
            locked_wheel(
                store,
                *make_wheel(
                    "tool",
                    {"tool/__init__.py": b"import torch\n", "tool/broken.py": b"print 'two'\n"},
                    entry_points="[console_scripts]\ntool = tool:main.run\n",
                ),
            ),
        )
    fields: dict[str, Any] = {
        "version": 1,
        "name": "tiny",
        "recipe_sha256": hashlib.sha256(RECIPE).hexdigest(),
        "kitbuild": maker(),
        "target": "cpu",
        "package_set": PackageSet(target="cpu", sha256="0" * 64),
        "base": make_base(store),
        "wheels": wheels,
        "model": LockedModel(
            weights=LockedTree(path="model", files=(locked_file(store, "config.json", b"{}"),)),
            config=None,
            tokenizer=None,
            chat_template=None,
        ),
        "datasets": (
            LockedDataset(
                tree=LockedTree(path="data.jsonl", files=(locked_file(store, "data.jsonl", b'{"text": "a"}\n'),)),
                format="json",
                config=None,
                split="train",
                data_files=("data.jsonl",),
            ),
        ),
        "evaluate": None,
        "kernels": (make_kernel(store),) if kernels is None else kernels,
        "defaults": Defaults(declared={}, arguments={}, device_dependent=()),
        "launch": {},
        "recipe": {"image": {"bake": list(bake)}},
        "advisories": (),
    }
    return Lock(**(fields | changes))


def new_store(root: Path) -> Store:
    return Store.open({"KITBUILD_HOME": str(root)})


def layer_members(path: Path) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(path) as archive:
        return {member.name: member for member in archive}


def remove_images(client: docker.DockerClient, *ids: str) -> None:
    for engine_id in ids:
        client.images.remove(engine_id, force=True)
