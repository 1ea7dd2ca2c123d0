"""Phase 4: every setting that decides bits. Environment before a worker starts, flags after torch is there.

What is set here is asserted again in each worker: a library that changes it is found out, not believed. The
variables, with reasons and sources, are the table of `settings`.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kitbuild.errors import Problem, RecipeError, RunError
from kitbuild.guest.settings import (
    ALWAYS,
    CUDA,
    FAMILIES,
    PASSED_ON_CPU,
    PORTABLE,
    REFUSED,
    STRICT,
    STRICT_CUDA,
    TABLE,
    THREADS,
    TRACKED,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, MutableMapping

    from kitbuild.guest.config import Config

    Flag = tuple[Callable[[], Any], Callable[[Any], Any], Any]

LAUNCHER = ("ACCELERATE_", "FSDP_")
MKL_BRANCH_ALL = -1
# https://www.intel.com/content/www/us/en/docs/onemkl/developer-reference-c/2025-0/mkl-cbwr-get.html (mkl_types.h)
MKL_BRANCHES = {
    1: "off",
    2: "auto",
    3: "compatible",
    4: "sse2",
    6: "ssse3",
    7: "sse4.1",
    8: "sse4.2",
    9: "avx",
    10: "avx2",
}


def environment(config: Config) -> dict[str, str | None]:
    """Every variable in force for this lock; None is one that must not be set."""
    modes = {ALWAYS} | ({STRICT} if config.strict else set()) | ({CUDA} if config.cuda else set())
    if config.strict and config.cuda:
        modes.add(STRICT_CUDA)
    if config.portable:
        modes.add(PORTABLE)
    if config.recipe.get("track"):
        modes.add(TRACKED)
    threads = str(config.launch.threads_per_process)
    chosen = {setting.name: setting.value for setting in TABLE if setting.when in modes}
    chosen = {name: threads if value == THREADS else value for name, value in chosen.items()}
    places = config.places
    # Emptied when a run begins: what an earlier run or a mounted HF_HOME left is not looked at.
    fresh = {"HF_HOME": "hf", "XDG_CACHE_HOME": "xdg", "MPLCONFIGDIR": "mpl"}
    kept = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TORCH_EXTENSIONS_DIR": "extensions"}
    return {
        **chosen,
        **{name: str(places.scratch / folder) for name, folder in fresh.items()},
        **{name: str(places.cache / folder) for name, folder in kept.items()},
        "KERNELS_CACHE": str(places.kernels),
        "TENSORBOARD_LOGGING_DIR": str(places.out / "track" / "tensorboard"),
        "WANDB_DIR": str(places.out / "track"),
        "TRACKIO_DIR": str(places.out / "track" / "trackio"),
    }


def dropped(config: Config, environ: Mapping[str, str]) -> list[str]:
    """Variables of the families that strict does not pass on, as they are set here."""
    if not config.strict:
        return []
    wanted = environment(config)
    prefixes = tuple(family.prefix for family in FAMILIES)
    passed = frozenset() if config.cuda else PASSED_ON_CPU
    return sorted(name for name in environ if name.startswith(prefixes) and name not in wanted and name not in passed)


def overridden(config: Config, environ: Mapping[str, str]) -> dict[str, str]:
    """What was set here otherwise than this lock wants it, and so has no effect: for the archive."""
    wanted = environment(config)
    decided = {setting.name for setting in TABLE} | {"HF_HOME"}
    found = {name: environ[name] for name in decided & wanted.keys() if environ.get(name) not in {None, wanted[name]}}
    if Path(found.get("HF_HOME", "")).is_relative_to(config.places.cache):
        del found["HF_HOME"]  # The image's own default.
    return dict(sorted((found | {name: environ[name] for name in dropped(config, environ)}).items()))


def apply(config: Config, environ: MutableMapping[str, str], *, launched: bool = False) -> None:
    """Set the environment of this process, before torch is imported; `launched` by somebody's Accelerate."""
    for name in dropped(config, environ):
        if not (launched and name.startswith(LAUNCHER)):
            del environ[name]
    for name, value in environment(config).items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value


def refusals(config: Config) -> Iterator[Problem]:
    """What a strict run cannot promise, by name."""
    if not config.strict:
        return
    for field, bad, why, advice in REFUSED:
        if field in config.train and bad(config.train[field]):
            text = f"{config.train[field]!r} is refused under determinism: strict: {why}"
            yield Problem(message=text, key=f"train.{field}", hint=advice)
    deepspeed = config.raw["defaults"]["arguments"].get("deepspeed", {}).get("value") or {}
    if deepspeed.get("zero_optimization", {}).get("overlap_comm"):
        text = "overlap_comm is refused under determinism: strict: gradients would be added up as they arrive"
        yield Problem(message=text, key="launch.strategy", hint="lock again with this kitbuild, which turns it off")


def refuse(config: Config) -> None:
    """Raise one error with every refusal (exit 2)."""
    problems = tuple(refusals(config))
    if problems:
        raise RecipeError(
            "determinism: strict cannot be kept", hint="change the recipe or use determinism: record", problems=problems
        )


def flags(config: Config) -> dict[str, Flag]:
    """Library flags: name → (read, write, value)."""
    import torch
    from torch.utils import deterministic

    cuda = torch.backends.cuda
    threads = config.launch.threads_per_process
    table: dict[str, Flag] = {
        "torch.num_threads": (torch.get_num_threads, torch.set_num_threads, threads),
        "torch.float32_matmul_precision": (
            torch.get_float32_matmul_precision,
            torch.set_float32_matmul_precision,
            "highest",
        ),
    }
    if not config.strict:
        return table
    table["torch.deterministic_algorithms"] = (
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True,
    )  # fmt: skip
    # Filling each new tensor costs 2 % on 8B and changes no bit that is read (measured on one H200).
    table["torch.fill_uninitialized_memory"] = _attribute(deterministic, "fill_uninitialized_memory", value=False)
    table["cudnn.benchmark"] = _attribute(torch.backends.cudnn, "benchmark", value=False)
    table["cudnn.deterministic"] = _attribute(torch.backends.cudnn, "deterministic", value=True)
    if config.cuda:
        for name in ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"):
            table[f"cuda.matmul.{name}"] = _attribute(cuda.matmul, name, value=False)
        # cuDNN's attention has no deterministic backward.
        table["cuda.cudnn_sdp"] = (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp, False)
    if config.portable:
        table |= _portable_flags()
    return table


def _portable_flags() -> dict[str, Flag]:
    """Work is cut by the size of the caches in oneDNN and NNPACK: both are off. The rest is only asserted."""
    import torch

    table: dict[str, Flag] = {}
    table["torch.mkldnn"] = _attribute(torch.backends.mkldnn, "enabled", value=False)
    table["torch.nnpack"] = (torch._C._get_nnpack_enabled, torch.backends.nnpack.set_flags, False)  # noqa: SLF001 - no other getter
    table["torch.cpu_capability"] = (torch.backends.cpu.get_cpu_capability, _leave, "AVX2")
    table["mkl.cbwr"] = (mkl_branch, _leave, "compatible")
    return table


def _leave(_: object) -> None:
    """Decided by the environment; only asserted."""


def mkl_branch() -> str | None:
    """The reproducibility branch that oneMKL took, as it says itself; None where torch has no oneMKL."""
    import torch

    try:
        library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
        found = library.mkl_serv_cbwr_get(MKL_BRANCH_ALL)
    except (OSError, AttributeError):
        return None
    return MKL_BRANCHES.get(found, str(found))


def _attribute(owner: Any, name: str, *, value: bool) -> Flag:
    return (lambda: getattr(owner, name)), (lambda given: setattr(owner, name, given)), value


def apply_flags(config: Config) -> None:
    """Set the flags in a worker, before any tensor is made."""
    for _, write, value in flags(config).values():
        write(value)


def _in_force(read: Callable[[], Any]) -> Any:
    found = read()
    # cuBLAS reports the pair (allowed, allow split-K) since torch 2.9.
    return found[0] if isinstance(found, tuple) else found


def check(config: Config, *, when: str) -> None:
    """Assert environment and flags in a worker: a library may have changed them."""
    wanted = environment(config)
    wrong = [
        f"{name} is {os.environ.get(name)!r}, not {value!r}"
        for name, value in wanted.items()
        if os.environ.get(name) != value
    ]
    for name, (read, _, value) in flags(config).items():
        found = _in_force(read)
        if found != value:
            wrong.append(f"{name} is {found!r}, not {value!r}")
    if wrong:
        # A processor without AVX2, or a torch without oneMKL, cannot give the portable bits.
        hint = (
            "cpu_portable needs an x86-64 processor with AVX2"
            if config.portable
            else "report this: a library changed them"
        )
        raise RunError(f"settings that decide bits were changed {when}: {'; '.join(wrong)}", hint=hint)


def check_workers(config: Config, loader: Any) -> None:
    """Strict: processes that load data start from seeds of their own, and hand over batches in order."""
    if not config.strict or not getattr(loader, "num_workers", 0):
        return
    if loader.worker_init_fn is None or not getattr(loader, "in_order", True):
        raise RecipeError(
            "determinism: strict cannot be kept: the data loader's workers have no seed or no order",
            hint="set train.dataloader_num_workers: 0",
        )


def state(config: Config) -> dict[str, Any]:
    """In a worker, after training: what was in force, as the libraries say it, for the archive."""
    import torch

    found = {name: _in_force(read) for name, (read, _, _) in flags(config).items()}
    found |= {"torch.cpu_capability": torch.backends.cpu.get_cpu_capability(), "mkl.cbwr": mkl_branch()}
    if config.cuda:
        cuda = torch.backends.cuda
        found["sdpa"] = [
            name
            for name, on in (
                ("flash", cuda.flash_sdp_enabled()),
                ("efficient", cuda.mem_efficient_sdp_enabled()),
                ("math", cuda.math_sdp_enabled()),
                ("cudnn", cuda.cudnn_sdp_enabled()),
            )
            if on
        ]
    return found


def not_guaranteed(config: Config) -> list[dict[str, str]]:
    """What this run does not promise, and why, for the archive; a strict run in a locked environment: nothing."""
    found = []
    if not config.locked:
        found.append(_because("environment", "the packages were found here, not locked"))
    if config.strict:
        return found
    found.append(
        _because("losses, gradient norms, weights", "determinism: record asks for no deterministic algorithms")
    )
    modes = {STRICT, STRICT_CUDA} if config.cuda else {STRICT}
    found += [_because(item.name, f"not set: {item.reason}") for item in TABLE if item.when in modes and item.value]
    found += [_because(f"{item.prefix}*", f"passed on: {item.reason}") for item in FAMILIES]
    for field, bad, why, _ in REFUSED:
        if field in config.train and bad(config.train[field]):
            found.append(_because(f"train.{field}", why))
    return found


def _because(what: str, why: str) -> dict[str, str]:
    return {"what": what, "why": why.replace("likewise, ", "").replace("likewise", "as above")}
