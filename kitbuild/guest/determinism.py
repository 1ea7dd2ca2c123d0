"""Phase 4: one table of every setting that decides bits. Environment before a worker starts, flags after torch is there.

What is set here is asserted again in each worker: a library that changes it is found out, not believed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kitbuild.errors import Problem, RecipeError, RunError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, MutableMapping

    from kitbuild.guest.config import Config

ALWAYS, STRICT, CUDA, STRICT_CUDA, TRACKED = "always", "strict", "cuda", "strict cuda", "tracked"
TORCH_NOTES = "https://docs.pytorch.org/docs/stable/notes/randomness.html"
TORCH_VARIABLES = "https://docs.pytorch.org/docs/stable/cuda_environment_variables.html"
ONEDNN_NOTES = "https://uxlfoundation.github.io/oneDNN/dev_guide_attributes_fpmath_mode.html"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One environment variable: when it is set, why, and who says so. `None` removes it."""

    name: str
    value: str | None
    when: str
    reason: str
    source: str


def _set(name: str, value: str | None, when: str, reason: str, source: str) -> Setting:
    return Setting(name=name, value=value, when=when, reason=reason, source=source)


THREADS = "{threads}"
TABLE: tuple[Setting, ...] = (
    _set("OMP_NUM_THREADS", THREADS, ALWAYS, "how sums are split over threads decides their bits", TORCH_NOTES),
    _set(
        "MKL_NUM_THREADS",
        THREADS,
        ALWAYS,
        "likewise, inside oneMKL",
        "https://www.intel.com/content/www/us/en/docs/onemkl/developer-guide-linux/2025-0/mkl-domain-num-threads.html",
    ),
    _set(
        "OPENBLAS_NUM_THREADS",
        THREADS,
        ALWAYS,
        "likewise, inside NumPy",
        "https://github.com/OpenMathLib/OpenBLAS#setting-the-number-of-threads-using-environment-variables",
    ),
    _set(
        "OMP_DYNAMIC",
        "FALSE",
        ALWAYS,
        "the runtime may otherwise use fewer threads under load",
        "https://www.openmp.org/spec-html/5.0/openmpse53.html",
    ),
    _set(
        "MKL_DYNAMIC",
        "FALSE",
        ALWAYS,
        "likewise, inside oneMKL",
        "https://www.intel.com/content/www/us/en/docs/onemkl/developer-guide-linux/2025-0/mkl-dynamic.html",
    ),
    _set(
        "TOKENIZERS_PARALLELISM",
        "false",
        ALWAYS,
        "its threads do not survive the fork of a worker",
        "https://github.com/huggingface/tokenizers/issues/187",
    ),
    _set(
        "PYTHONHASHSEED",
        "0",
        ALWAYS,
        "the order of sets",
        "https://docs.python.org/3/using/cmdline.html#envvar-PYTHONHASHSEED",
    ),
    _set(
        "HF_HUB_OFFLINE",
        "1",
        ALWAYS,
        "nothing is fetched while training",
        "https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables",
    ),
    _set(
        "TRANSFORMERS_OFFLINE",
        "1",
        ALWAYS,
        "likewise",
        "https://huggingface.co/docs/transformers/installation#offline-mode",
    ),
    _set("HF_DATASETS_OFFLINE", "1", ALWAYS, "likewise", "https://huggingface.co/docs/datasets/loading#offline"),
    _set(
        "HF_HUB_DISABLE_TELEMETRY",
        None,
        ALWAYS,
        "its user agent is an illegal header for kernels",
        "https://github.com/huggingface/kernels",
    ),
    _set("LOCAL_KERNELS", None, ALWAYS, "silently replaces pinned kernels", "https://github.com/huggingface/kernels"),
    _set("ONEDNN_DEFAULT_FPMATH_MODE", None, ALWAYS, "float32 products stay float32", ONEDNN_NOTES),
    _set("DNNL_DEFAULT_FPMATH_MODE", None, ALWAYS, "likewise, by its old name", ONEDNN_NOTES),
    _set(
        "WANDB_MODE",
        "offline",
        TRACKED,
        "trackers write files only",
        "https://docs.wandb.ai/guides/track/environment-variables",
    ),
    _set(
        "PYTORCH_NVML_BASED_CUDA_CHECK",
        "1",
        ALWAYS,
        "looking for a GPU before the fork must not start CUDA",
        "https://docs.pytorch.org/docs/stable/notes/cuda.html#torch-cuda-is-available",
    ),
    _set(
        "CUDA_DEVICE_ORDER",
        "PCI_BUS_ID",
        CUDA,
        "device numbers do not follow speed",
        "https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#env-vars",
    ),
    _set(
        "CUDA_MODULE_LOADING",
        "LAZY",
        CUDA,
        "kernels are loaded when first used: a faster start",
        "https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#lazy-loading",
    ),
    _set(
        "NVIDIA_TF32_OVERRIDE",
        "0",
        CUDA,
        "no library switches TF32 on by itself",
        "https://docs.nvidia.com/deeplearning/frameworks/tensorflow-user-guide/index.html#tf_32",
    ),
    _set("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", None, CUDA, "likewise in cuBLAS, whatever the code says", TORCH_VARIABLES),
    _set(
        "CUBLAS_WORKSPACE_CONFIG",
        ":4096:8",
        STRICT_CUDA,
        "cuBLAS repeats its bits only with a fixed workspace",
        "https://docs.nvidia.com/cuda/cublas/index.html#results-reproducibility",
    ),
    _set(
        "FLASH_ATTENTION_DETERMINISTIC",
        "1",
        STRICT_CUDA,
        "flash attention's backward without atomics",
        "https://github.com/huggingface/transformers/blob/main/src/transformers/modeling_flash_attention_utils.py",
    ),
    _set(
        "NCCL_ALGO",
        "Ring",
        STRICT_CUDA,
        "the order of a reduction follows the algorithm",
        "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-algo",
    ),
    _set(
        "NCCL_PROTO",
        "Simple",
        STRICT_CUDA,
        "likewise the protocol",
        "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-proto",
    ),
    _set(
        "NCCL_NVLS_ENABLE",
        "0",
        STRICT_CUDA,
        "in-switch reductions order their sums freely",
        "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-nvls-enable",
    ),
    _set(
        "TORCHINDUCTOR_DETERMINISTIC",
        "1",
        STRICT_CUDA,
        "no choice by timing in compiled code",
        "https://github.com/pytorch/pytorch/blob/main/torch/_inductor/config.py",
    ),
)

# What strict cannot promise: `train` field, refused values, why, what to do.
REFUSED: tuple[tuple[str, Callable[[Any], bool], str, str], ...] = (
    ("auto_find_batch_size", bool, "the batch size would follow free memory", "remove it and set batch.micro"),
    ("dataloader_in_order", lambda value: value is False, "batches would come in any order", "remove it"),
    (
        "torch_compile_mode",
        lambda value: "max-autotune" in str(value),
        "compiled code would be chosen by timing",
        "use mode default",
    ),
    ("tf32", lambda value: value is True, "TF32 is a choice of the device", "remove it, or use determinism: record"),
    (
        "optim",
        lambda value: "bnb" in str(value) or "8bit" in str(value),
        "bitsandbytes has no deterministic mode",
        "use adamw_torch_fused",
    ),
)


def environment(config: Config) -> dict[str, str | None]:
    """Every variable in force for this lock; None is one that must not be set."""
    modes = {ALWAYS} | ({STRICT} if config.strict else set()) | ({CUDA} if config.cuda else set())
    if config.strict and config.cuda:
        modes.add(STRICT_CUDA)
    if config.recipe.get("track"):
        modes.add(TRACKED)
    threads = str(config.launch.threads_per_process)
    chosen = {setting.name: setting.value for setting in TABLE if setting.when in modes}
    chosen = {name: threads if value == THREADS else value for name, value in chosen.items()}
    places = config.places
    cache = {
        "HF_HOME": "hf", "XDG_CACHE_HOME": "xdg", "TRITON_CACHE_DIR": "triton",
        "TORCHINDUCTOR_CACHE_DIR": "inductor", "MPLCONFIGDIR": "mpl", "TORCH_EXTENSIONS_DIR": "extensions",
    }  # fmt: skip
    return {
        **chosen,
        **{name: str(places.cache / folder) for name, folder in cache.items()},
        "KERNELS_CACHE": str(places.kernels),
        "TENSORBOARD_LOGGING_DIR": str(places.out / "track" / "tensorboard"),
        "WANDB_DIR": str(places.out / "track"),
        "TRACKIO_DIR": str(places.out / "track" / "trackio"),
    }


def apply(wanted: Mapping[str, str | None], environ: MutableMapping[str, str]) -> None:
    """Set the environment of this process, before torch is imported."""
    for name, value in wanted.items():
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


def refuse(config: Config) -> None:
    """Raise one error with every refusal (exit 2)."""
    problems = tuple(refusals(config))
    if problems:
        raise RecipeError(
            "determinism: strict cannot be kept", hint="change the recipe or use determinism: record", problems=problems
        )


def flags(config: Config) -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Any]]:
    """Library flags: name → (read, write, value)."""
    import torch
    from torch.utils import deterministic

    cuda = torch.backends.cuda
    threads = config.launch.threads_per_process
    table: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Any]] = {
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
    return table


def _attribute(owner: Any, name: str, *, value: bool) -> tuple[Callable[[], Any], Callable[[Any], Any], Any]:
    return (lambda: getattr(owner, name)), (lambda given: setattr(owner, name, given)), value


def apply_flags(config: Config) -> None:
    """Set the flags in a worker, before any tensor is made."""
    for _, write, value in flags(config).values():
        write(value)


def check(config: Config, *, when: str) -> None:
    """Assert environment and flags in a worker: a library may have changed them."""
    wanted = environment(config)
    wrong = [
        f"{name} is {os.environ.get(name)!r}, not {value!r}"
        for name, value in wanted.items()
        if os.environ.get(name) != value
    ]
    for name, (read, _, value) in flags(config).items():
        found = read()
        # cuBLAS reports the pair (allowed, allow split-K) since torch 2.9.
        found = found[0] if isinstance(found, tuple) else found
        if found != value:
            wrong.append(f"{name} is {found!r}, not {value!r}")
    if wrong:
        raise RunError(
            f"settings that decide bits were changed {when}: {'; '.join(wrong)}",
            hint="report this: a library changed them",
        )
