"""For a benchmark: what the training took of the device, and how fast the device multiplies right after it."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

from kitbuild.guest.trainer import peak_memory_bytes

if TYPE_CHECKING:
    from kitbuild.guest.config import Config

SIZES = {"cuda": 8192, "cpu": 1024}
REPEATS, WARM = 12, 3


def measured(config: Config, model: Any) -> dict[str, Any]:
    """Peak bytes, the rate of a large matrix product in the weights' dtype, and the model's own shape."""
    import torch

    reserved = int(torch.cuda.max_memory_reserved()) if config.cuda else None
    told = {"peak_allocated_bytes": peak_memory_bytes(), "peak_reserved_bytes": reserved}
    return {**told, "matmul_flops_per_second": _rate(config), "config": model.config.to_dict()}


def _rate(config: Config) -> float:
    """Floating-point operations a second of a square product of random numbers: the ceiling that MFU is a share of."""
    import torch

    device = "cuda" if config.cuda else "cpu"
    size, dtype = SIZES[device], getattr(torch, config.recipe["model"]["dtype"])
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, generator=generator, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(REPEATS):
        clock = time.perf_counter()
        left @ right
        if config.cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - clock)
    return 2 * size**3 / statistics.median(seconds[WARM:])
