"""The table behind phase 4: every environment variable that decides bits, and what strict refuses. Pure data.

`docs/determinism.md` shows it; `determinism` applies it and asserts it again in each worker.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

ALWAYS, STRICT, CUDA, STRICT_CUDA, TRACKED = "always", "strict", "cuda", "strict cuda", "tracked"
PORTABLE = "portable"
TORCH_NOTES = "https://docs.pytorch.org/docs/stable/notes/randomness.html"
TORCH_VARIABLES = "https://docs.pytorch.org/docs/stable/cuda_environment_variables.html"
ONEDNN_NOTES = "https://uxlfoundation.github.io/oneDNN/dev_guide_attributes_fpmath_mode.html"
ONEDNN_ISA_NOTES = "https://uxlfoundation.github.io/oneDNN/dev_guide_cpu_dispatcher_control.html"
MKL_NOTES = (
    "https://www.intel.com/content/www/us/en/docs/onemkl/developer-guide-linux/2025-0/reproducibility-conditions.html"
)
NCCL_NOTES = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"


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
    _set(
        "TRITON_INTERPRET",
        None,
        STRICT_CUDA,
        "interpreted kernels round otherwise than compiled ones",
        "https://triton-lang.org/main/programming-guide/chapter-3/debugging.html",
    ),
    *(
        _set(name, None, STRICT_CUDA, "how a reduction is cut decides the order of its sums", NCCL_NOTES)
        for name in (
            "NCCL_MIN_NCHANNELS",
            "NCCL_MAX_NCHANNELS",
            "NCCL_MIN_CTAS",
            "NCCL_MAX_CTAS",
            "NCCL_NTHREADS",
            "NCCL_BUFFSIZE",
            "NCCL_COLLNET_ENABLE",
            "NCCL_GRAPH_FILE",
            "NCCL_TUNER_PLUGIN",
            "NCCL_TUNER_CONFIG_PATH",
            "NCCL_CONF_FILE",
        )
    ),
    _set(
        "ATEN_CPU_CAPABILITY",
        "avx2",
        PORTABLE,
        "ATen's kernels for AVX2 and FMA: the same instructions on every vendor's processors since 2017",
        "https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/DispatchStub.cpp",
    ),
    _set("MKL_CBWR", "COMPATIBLE", PORTABLE, "oneMKL's only branch that is the same on all vendors", MKL_NOTES),
    _set("ONEDNN_MAX_CPU_ISA", "AVX2", PORTABLE, "as far as oneDNN is still asked", ONEDNN_ISA_NOTES),
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """Variables of one library, by prefix: strict drops what is set of them and not in the table."""

    prefix: str
    reason: str
    source: str


def _family(prefix: str, reason: str, source: str) -> Family:
    return Family(prefix=prefix, reason=reason, source=source)


FAMILIES: tuple[Family, ...] = (
    _family("ATEN_", "the vector instructions of ATen", TORCH_NOTES),
    _family("MKL_", "the instructions, branches and stripes of oneMKL", MKL_NOTES),
    _family("ONEDNN_", "the instructions and precision of oneDNN", ONEDNN_ISA_NOTES),
    _family("DNNL_", "likewise, by its old name", ONEDNN_ISA_NOTES),
    _family(
        "OPENBLAS_",
        "the kernels of OpenBLAS",
        "https://github.com/OpenMathLib/OpenBLAS#setting-the-number-of-threads-using-environment-variables",
    ),
    _family("NPY_", "the kernels of NumPy", "https://numpy.org/doc/stable/reference/simd/build-options.html"),
    _family("OMP_", "how loops are shared out", "https://www.openmp.org/spec-html/5.0/openmpch6.html"),
    _family("KMP_", "likewise, in the LLVM and Intel runtimes", "https://openmp.llvm.org/design/Runtimes.html"),
    _family("CUBLAS", "algorithms and workspaces of cuBLAS", "https://docs.nvidia.com/cuda/cublas/index.html"),
    _family("CUDNN_", "algorithms of cuDNN", "https://docs.nvidia.com/deeplearning/cudnn/latest/"),
    _family("TORCH_BLAS_", "which BLAS PyTorch calls", TORCH_VARIABLES),
    _family("TORCH_CUDNN_", "how PyTorch calls cuDNN", TORCH_VARIABLES),
    _family("TORCH_LINALG_", "which linear algebra PyTorch calls", TORCH_VARIABLES),
    _family("DISABLE_ADDMM_", "how PyTorch multiplies", TORCH_VARIABLES),
    _family(
        "TORCHINDUCTOR_",
        "choices of the compiler",
        "https://github.com/pytorch/pytorch/blob/main/torch/_inductor/config.py",
    ),
    _family("TORCHDYNAMO_", "what is compiled", "https://github.com/pytorch/pytorch/blob/main/torch/_dynamo/config.py"),
    _family("TRITON_", "how Triton compiles", "https://github.com/triton-lang/triton#tips-for-hacking"),
    _family("FLASH_ATTENTION_", "choices of flash attention", "https://github.com/Dao-AILab/flash-attention"),
    _family("LIGER_", "choices of Liger", "https://github.com/linkedin/Liger-Kernel"),
    _family(
        "ACCELERATE_",
        "what a user's launcher would say",
        "https://huggingface.co/docs/accelerate/package_reference/cli",
    ),
    _family("FSDP_", "likewise, about sharding", "https://huggingface.co/docs/accelerate/usage_guides/fsdp"),
    _family("TRANSFORMERS_", "choices of Transformers", "https://huggingface.co/docs/transformers/installation"),
    _family(
        "DISABLE_KERNEL_MAPPING", "whether the locked layer kernels are taken", "https://github.com/huggingface/kernels"
    ),
    _family("USE_HUB_KERNELS", "whether Hub kernels are taken", "https://github.com/huggingface/kernels"),
)
# Read on a CPU only by who interprets Triton's kernels there on purpose.
PASSED_ON_CPU = frozenset({"TRITON_INTERPRET"})

# bitsandbytes and torchao: https://github.com/huggingface/transformers/blob/main/src/transformers/trainer_optimizer.py
QUANTISED = re.compile(r"bnb|[48]bit|32bit|^paged_|^lion|^ademamix")
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
        lambda value: bool(QUANTISED.search(str(value))),
        "its states are quantised or its kernels have no deterministic mode",
        "use adamw_torch_fused",
    ),
)
