"""The locked Hub kernels in a worker: loaded by commit, offline, counted. What runs is compared with the lock."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kitbuild.errors import RunError
from kitbuild.guest.usage import counted

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterable, Mapping
    from types import ModuleType

    from kitbuild.guest.config import Config, Kernel

ATTENTION_FUNCTIONS = (
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "sparse_atten_func",
    "flash_attn_forward",
)


def key(kernel: Kernel, member: str | None = None) -> str:
    """How a kernel is named in counters and in the archive."""
    return f"{kernel.repo}@{kernel.commit}" + (f":{member}" if member else "")


def load(kernel: Kernel, config: Config) -> ModuleType:
    """Import one kernel at its commit, and see that it is the locked variant."""
    import kernels

    try:
        module: ModuleType = kernels.get_kernel(kernel.repo, revision=kernel.commit)
    except Exception as error:
        raise RunError(
            f"kernel {kernel} does not load: {error}", hint="lock again for this target, or choose another kernel"
        ) from error
    folder = config.places.kernels / kernel.folder
    found = Path(str(module.__file__)).resolve()
    if not found.is_relative_to(folder.resolve()):
        raise RunError(
            f"kernel {kernel}: {found} was loaded instead of the locked variant", hint="lock again for this target"
        )
    return module


def load_attention(config: Config, calls: Counter[str]) -> ModuleType | None:
    """Load and count the attention kernel before transformers binds its functions."""
    kernel = config.attention_kernel
    if kernel is None:
        return None
    module = load(kernel, config)
    for name in {*ATTENTION_FUNCTIONS, kernel.member or ATTENTION_FUNCTIONS[0]}:
        function = getattr(module, name, None)
        if callable(function):
            setattr(module, name, counted(function, key(kernel), calls))
    return module


def kernelize_layers(model: Any, config: Config, calls: Counter[str]) -> list[tuple[Any, Kernel, str]]:
    """Replace layer forwards for training. Returns (module, kernel, layer) of each one replaced.

    transformers' own KernelConfig maps inference only: in training such a kernel silently never runs.
    """
    wanted = [(kernel, name, layer) for kernel in config.kernels for name, layer in kernel.layers.items()]
    if not wanted:
        return []
    from kernels import LayerRepository, Mode, kernelize, use_kernel_mapping
    from kernels.layer import KernelizeFallback

    device = "cuda" if config.cuda else "cpu"
    mapping: dict[str, dict[str, Any]] = {}
    for kernel, name, layer in wanted:
        load(kernel, config)
        mapping[name] = {device: LayerRepository(kernel.repo, layer_name=layer, revision=kernel.commit)}
    with use_kernel_mapping(mapping, inherit_mapping=False):
        kernelize(model, mode=Mode.TRAINING, device=device, use_fallback=KernelizeFallback.NO_LAYER)
    replaced = []
    for kernel, name, layer in wanted:
        modules = [item for item in model.modules() if getattr(type(item), "kernel_layer_name", None) == name]
        if not modules:
            raise RunError(
                f"{type(model).__name__} has no layer {name} for {kernel}:{layer}",
                hint=f"remove {name} from kernels.layers",
            )
        for module in modules:
            module.forward = counted(module.forward, key(kernel, layer), calls)
            replaced.append((module, kernel, layer))
    return replaced


def loaded_files() -> dict[Path, str]:
    """Folder of every Hub kernel that this process imported → its file."""
    kernels = sys.modules.get("kernels")
    if kernels is None:
        return {}
    files = [Path(str(item.module.__file__)).resolve() for item in kernels.get_loaded_kernels()]
    return {path.parent: str(path) for path in files}


def compare(config: Config, calls: Mapping[str, int] | None) -> None:
    """Loaded against locked, both ways; after training, used against locked as well."""
    locked = {(config.places.kernels / kernel.folder).resolve(): kernel for kernel in config.kernels}
    found = loaded_files()
    wrong = [
        f"{path} is loaded and not in the lock" for path in found if not any(path.is_relative_to(top) for top in locked)
    ]
    wrong += [
        f"{kernel} is locked and not loaded"
        for top, kernel in locked.items()
        if not any(path.is_relative_to(top) for path in found)
    ]
    if calls is not None:
        wrong += [f"{name} was called 0 times in training" for name in names(config) if not calls.get(name)]
    if wrong:
        raise RunError(
            f"kernels in use are not those of the lock: {'; '.join(wrong)}", hint="lock again; report it if it stays"
        )


def names(config: Config) -> list[str]:
    """Every kernel that must be called, by its name in the counters."""
    found = [key(config.attention_kernel)] if config.attention_kernel else []
    return found + [key(kernel, layer) for kernel in config.kernels for layer in kernel.layers.values()]


def described(
    config: Config, calls: Mapping[int, Mapping[str, int]], loaded: Mapping[int, Iterable[str]]
) -> list[dict[str, Any]]:
    """The archive's `kernels`: identity, the file that was loaded, and how often it was called, in each rank."""
    rows = []
    for kernel in config.kernels:
        folder = (config.places.kernels / kernel.folder).resolve()
        files = {str(rank): _file(config, folder, paths) for rank, paths in sorted(loaded.items())}
        members = list[str | None](kernel.layers.values()) or [kernel.member]
        for member in members:
            name = key(kernel, member if kernel.layers else None)
            count = {str(rank): held.get(name, 0) for rank, held in sorted(calls.items())}
            identity = {"role": kernel.role, "repo": kernel.repo, "commit": kernel.commit, "variant": kernel.variant}
            rows.append({**identity, "member": member, "file": files.get("0"), "files": files, "calls": count})
    return rows


def _file(config: Config, folder: Path, paths: Iterable[str]) -> str | None:
    """The module of a kernel that a rank loaded, below the kernel cache."""
    found = next((Path(path) for path in paths if Path(path).is_relative_to(folder)), None)
    return found.relative_to(config.places.kernels.resolve()).as_posix() if found else None
