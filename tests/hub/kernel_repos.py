"""Kernel repositories in the Hub's real layout: `build/<variant>/` with metadata and the digest that kernels computes.

The sources in `kernels_src` run inside the image, never here. Arch variants hold made-up shared objects, each with
bytes of its own, so that a test sees which one was picked.
"""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

SOURCES = Path(__file__).parent / "kernels_src"
CUDA_ARCHS = ("8.0", "9.0", "10.0")
ATTENTION_VARIANTS = (
    "torch28-cxx11-cu126-x86_64-linux",
    "torch28-cxx11-cu128-x86_64-linux",
    "torch28-cxx11-cu129-x86_64-linux",
    "torch28-cxx11-cu129-aarch64-linux",
    "torch210-cxx11-cu126-x86_64-linux",
    "torch210-cxx11-cu128-x86_64-linux",
    "torch210-cxx11-cu130-x86_64-linux",
    "torch210-cxx11-cu128-aarch64-linux",
)
STABLE_VARIANTS = (
    "torch-stable-abi29-cu126-x86_64-linux",
    "torch-stable-abi29-cu128-x86_64-linux",
    "torch-stable-abi210-cu128-x86_64-linux",
    "torch-stable-abi210-cu130-x86_64-linux",
)


def source(name: str) -> bytes:
    """One of the kernel sources."""
    return (SOURCES / name).read_bytes()


def backend_of(variant: str) -> dict[str, Any]:
    """The `backend` of metadata.json for a variant's name."""
    if variant.endswith(("-cpu", "-universal")) or "-cpu-" in variant:
        return {"type": "cpu"}
    return {"type": "cuda", **({} if variant == "torch-cuda" else {"archs": list(CUDA_ARCHS)})}


def variant_files(
    name: str,
    variant: str,
    files: Mapping[str, bytes],
    *,
    version: int = 1,
    license_name: str = "Apache-2.0",
    kernel_depends: tuple[Mapping[str, object], ...] = (),
    python_depends: tuple[str, ...] = (),
) -> dict[str, bytes]:
    """`build/<variant>/…` of one variant, metadata.json with its digest included."""
    digests = {path: base64.b64encode(hashlib.sha256(data).digest()).decode() for path, data in sorted(files.items())}
    identity = hashlib.sha256(json.dumps([name, variant, version, digests]).encode()).hexdigest()[:12]
    backend = backend_of(variant)
    metadata = {
        "id": f"_{name.replace('-', '_')}_{backend['type']}_{identity}",
        "name": name,
        "version": version,
        "license": license_name,
        "kernels-minver": "0.17.0",
        "python-depends": list(python_depends),
        "kernel-depends": list(kernel_depends),
        "backend": backend,
        "digest": {"algorithm": "sha256", "files": digests},
    }
    held = {**files, "metadata.json": json.dumps(metadata, indent=2, sort_keys=True).encode() + b"\n"}
    return {f"build/{variant}/{path}": data for path, data in held.items()}


def binary_variant(name: str, variant: str, *, version: int = 1) -> dict[str, bytes]:
    """An arch variant: Python that loads a shared object, and a shared object that no machine can run."""
    seed = f"{name} {variant} {version}".encode()
    stem = hashlib.sha256(seed).hexdigest()[:10]
    python = name.replace("-", "_")
    shared = b"\x7fELF" + b"".join(hashlib.sha256(seed + bytes([block])).digest() for block in range(128))
    ops = f'import torch\n\nfrom . import _{python}_{stem}\n\nops = torch.ops._{python}_{stem}\nVARIANT = "{variant}"\n'
    init = "from ._ops import VARIANT, ops\n\nflash_attn_func = ops.fwd\nflash_attn_varlen_func = ops.varlen_fwd\n"
    files = {"__init__.py": init.encode(), "_ops.py": ops.encode(), f"_{python}_{stem}.abi3.so": shared}
    return variant_files(name, variant, files, version=version)


def module(*names: str, **sources: bytes) -> dict[str, bytes]:
    """A package that re-exports flash-attn's two functions from `names[0]`, with all `sources` beside it."""
    wanted = ", ".join(names[1:])
    init = f"from .{names[0]} import {wanted}\n\n__all__ = [{', '.join(repr(name) for name in names[1:])}]\n"
    return {"__init__.py": init.replace("'", '"').encode(), **{f"{name}.py": data for name, data in sources.items()}}


def attention(main: str = "flash_attn", *functions: str) -> dict[str, bytes]:
    """The attention package whose functions come from the source `main`."""
    functions = functions or ("flash_attn_func", "flash_attn_varlen_func")
    sources = {name: source(f"{name}.py") for name in {"flash_attn", main}}
    return module(main, *functions, **sources)


def flash_attn2(version: int) -> dict[str, bytes]:
    """One version branch of kernels-community/flash-attn2; version 3 has the broken backward."""
    main = "broken_backward" if version == 3 else "flash_attn"
    files = variant_files("flash-attn2", "torch-cpu", attention(main), version=version, license_name="BSD-3-Clause")
    for variant in ATTENTION_VARIANTS + (STABLE_VARIANTS if version >= 3 else ()):
        files |= binary_variant("flash-attn2", variant, version=version)
    card = f"---\nlicense: bsd-3-clause\ntags: [kernels]\n---\n# flash-attn2, version {version}\n"
    return {"README.md": card.encode(), **files}


def liger_kernels(version: int, main: str = "liger_layers") -> dict[str, bytes]:
    """Layers in plain PyTorch, for a CPU and for any CUDA device; `main` is the source of them."""
    init = b'from . import layers\n\n__all__ = ["layers"]\n'
    files = {"README.md": f"---\nlicense: bsd-2-clause\ntags: [kernels]\n---\n# liger-kernels {version}\n".encode()}
    for variant in ("torch-cpu", "torch-cuda"):
        layers = source(f"{main}.py") + f'\nVARIANT = "{variant}"\n'.encode()
        package = {"__init__.py": init, "layers.py": layers}
        files |= variant_files("liger-kernels", variant, package, version=version)
    return files
