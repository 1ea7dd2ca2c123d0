"""Phase 3: each locked kernel, forward and backward in the model's own shape, against fp32 within a stated tolerance.

Runs in a worker. Takes no random number from the global generators: training's start is the same with and without.
"""

from __future__ import annotations

import copy
import inspect
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from kitbuild.errors import RecipeError, RunError

if TYPE_CHECKING:
    from types import ModuleType

    from kitbuild.guest.config import Config, Kernel

# Largest difference over the largest reference value; about eight units in the last place of the dtype.
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}
LENGTH = 33
DOCUMENTS = (5, 16, 12)


def attention(config: Config, module: ModuleType, shape: dict[str, int]) -> None:
    """Padded and variable-length attention of the locked kernel; documents must not see each other."""
    for name, lengths in (("flash_attn_func", (LENGTH,)), ("flash_attn_varlen_func", DOCUMENTS)):
        function = getattr(module, name, None)
        if function is not None:
            _attention(config, name, function, shape, lengths)


def _attention(config: Config, name: str, function: Any, shape: dict[str, int], lengths: tuple[int, ...]) -> None:
    import torch

    dtype, device = getattr(torch, config.recipe["model"]["dtype"]), "cuda" if config.cuda else "cpu"
    generator = torch.Generator().manual_seed(0)
    batch = 2 if len(lengths) == 1 else 1

    def values(heads: int) -> Any:
        return torch.randn(batch, LENGTH, heads, shape["head_dim"], generator=generator).to(device, dtype)

    grad, *inputs = (values(shape[name]) for name in ("heads", "heads", "kv_heads", "kv_heads"))
    inputs = [item.requires_grad_() for item in inputs]
    extra = {"deterministic": True} if config.strict and _takes(function, "deterministic") else {}
    if config.strict and config.cuda and not extra:
        text = f"kernel {config.attention_kernel}: {name} offers no deterministic backward"
        raise RecipeError(text, hint="another attention kernel, or determinism: record")

    def run() -> Any:
        if len(lengths) == 1:
            return function(*inputs, causal=True, **extra)
        bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        flat = [item.flatten(0, 1) for item in inputs]
        return function(*flat, bounds, bounds, max(lengths), max(lengths), causal=True, **extra)

    named = f"{name} ({shape['heads']} heads on {shape['kv_heads']}, width {shape['head_dim']})"
    expected = _reference(inputs, grad, lengths)
    _compare(config.attention_kernel, config, named, lambda: _forward_backward(run, inputs, grad), expected)


def _takes(function: Any, name: str) -> bool:
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _forward_backward(run: Any, inputs: Any, grad: Any) -> list[Any]:
    import torch

    out = run()
    out = out[0] if isinstance(out, tuple) else out
    out = out.reshape(grad.shape)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def _reference(inputs: Any, grad: Any, lengths: tuple[int, ...]) -> list[Any]:
    """Attention by its definition, in fp32: causal, inside each document, query heads sharing key heads."""
    import torch

    wide = [item.detach().float().requires_grad_() for item in inputs]
    query, key, value = (item.transpose(1, 2) for item in wide)
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    document = torch.cat([torch.full((size,), index) for index, size in enumerate(lengths)]).to(grad.device)
    seen = torch.ones(len(document), len(document), dtype=torch.bool, device=grad.device).tril()
    seen &= document[:, None] == document[None, :]
    scores = (query @ key.transpose(-1, -2)) * query.shape[-1] ** -0.5
    out = (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value).transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, wide, grad.float())]


def layers(config: Config, replaced: list[tuple[Any, Kernel, str]]) -> None:
    """Each kind of replaced layer against the class's own forward in fp32, at the layer's own width."""
    done = set()
    for module, kernel, layer in replaced:
        weight = getattr(module, "weight", None)
        known = (type(module), None if weight is None else tuple(weight.shape), layer)
        if weight is not None and known not in done:
            done.add(known)
            _layer(config, module, kernel, layer)


def _layer(config: Config, module: Any, kernel: Kernel, layer: str) -> None:
    import torch

    weight, generator = module.weight, torch.Generator().manual_seed(1)
    size = (2, 7, weight.shape[-1])
    hidden, grad = (torch.randn(size, generator=generator).to(weight.device, weight.dtype) for _ in range(2))
    hidden.requires_grad_()
    plain = copy.copy(module)
    plain.__dict__ = {**module.__dict__, "_parameters": {"weight": torch.nn.Parameter(weight.detach().float())}}
    plain.__dict__.pop("forward")
    wide = hidden.detach().float().requires_grad_()
    out = plain(wide)
    expected = [out.detach(), *torch.autograd.grad(out, (wide, plain.weight), grad.float())]
    name = f"{layer} for {type(module).__name__} of {weight.shape[-1]}"
    _compare(kernel, config, name, lambda: _forward_backward(lambda: module(hidden), (hidden, weight), grad), expected)


def _compare(kernel: Kernel | None, config: Config, name: str, run: Any, expected: list[Any]) -> None:
    """Raise where a value or a gradient is not the reference's."""
    allowed = TOLERANCE[config.recipe["model"]["dtype"]]
    advice = "pin another version of the kernel, or another kernel, and lock again"
    try:
        found = run()
    except Exception as error:
        raise RunError(f"kernel {kernel} fails in {name}: {error}", hint=advice) from error
    for what, left, right in zip(("output", "gradient 1", "gradient 2", "gradient 3"), found, expected, strict=False):
        scale = right.abs().max().item() or 1.0
        worst = (left.float() - right).abs().max().item() / scale
        if not worst <= allowed:
            text = f"kernel {kernel} is wrong in {name}: {what} is off by {worst:.1e}, {allowed:.0e} is allowed"
            raise RunError(text, hint=advice)
