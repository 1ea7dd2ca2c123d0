"""Phase 3: each locked kernel, forward and backward in the model's own shape, against fp32 within a stated tolerance.

Runs in a worker. Takes no random number from the global generators: training's start is the same with and without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kitbuild.errors import RunError

if TYPE_CHECKING:
    from types import ModuleType

    from kitbuild.guest.config import Config, Kernel

# Largest difference over the largest reference value; about eight units in the last place of the dtype.
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}
LENGTH = 33
DOCUMENTS = (5, 16, 12)


def attention(config: Config, module: ModuleType, shape: dict[str, int]) -> None:
    """Padded and variable-length attention of the locked kernel; documents must not see each other."""
    import torch

    kernel = config.attention_kernel
    assert kernel is not None
    dtype, device = getattr(torch, config.recipe["model"]["dtype"]), "cuda" if config.cuda else "cpu"
    generator = torch.Generator().manual_seed(0)

    def values(batch: int, heads: int) -> Any:
        return torch.randn(batch, LENGTH, heads, shape["head_dim"], generator=generator).to(device, dtype).requires_grad_()

    for name, batch, bounds in (("flash_attn_func", 2, None), ("flash_attn_varlen_func", 1, _bounds(torch, device))):
        function = getattr(module, name, None)
        if function is None:
            continue
        inputs = (values(batch, shape["heads"]), values(batch, shape["kv_heads"]), values(batch, shape["kv_heads"]))
        grad = torch.randn(inputs[0].shape, generator=generator).to(device, dtype)
        extra = {"deterministic": True} if config.strict and "deterministic" in _parameters(function) else {}

        def run(function: Any = function, inputs: Any = inputs, bounds: Any = bounds, extra: Any = extra) -> Any:
            if bounds is None:
                return function(*inputs, causal=True, **extra)
            flat = [item.flatten(0, 1) for item in inputs]
            return function(*flat, bounds, bounds, max(DOCUMENTS), max(DOCUMENTS), causal=True, **extra)

        expected = _reference(inputs, grad, DOCUMENTS if bounds is not None else (LENGTH,))
        _compare(kernel, config, f"{name} ({_named(shape)})", lambda: _forward_backward(run, inputs, grad), expected)


def _bounds(torch: Any, device: str) -> Any:
    sums = [sum(DOCUMENTS[:index]) for index in range(len(DOCUMENTS) + 1)]
    return torch.tensor(sums, dtype=torch.int32, device=device)


def _named(shape: dict[str, int]) -> str:
    return f"{shape['heads']} heads on {shape['kv_heads']}, width {shape['head_dim']}"


def _parameters(function: Any) -> set[str]:
    import inspect

    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return set()


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
    import copy

    import torch

    done = set()
    for module, kernel, layer in replaced:
        weight = getattr(module, "weight", None)
        known = (type(module), None if weight is None else tuple(weight.shape), layer)
        if weight is None or known in done:
            continue
        done.add(known)
        generator = torch.Generator().manual_seed(1)
        hidden = torch.randn(2, 7, weight.shape[-1], generator=generator).to(weight.device, weight.dtype).requires_grad_()
        grad = torch.randn(hidden.shape, generator=generator).to(weight.device, weight.dtype)
        plain = copy.copy(module)
        plain.__dict__ = {**module.__dict__, "_parameters": {"weight": torch.nn.Parameter(weight.detach().float())}}
        plain.__dict__.pop("forward", None)
        wide = hidden.detach().float().requires_grad_()
        out = plain(wide)
        expected = [out.detach(), *torch.autograd.grad(out, (wide, plain.weight), grad.float())]
        name = f"{layer} for {type(module).__name__} of {weight.shape[-1]}"
        _compare(kernel, config, name, lambda: _forward_backward(lambda: module(hidden), (hidden, module.weight), grad), expected)  # noqa: B023 - called at once


def _compare(kernel: Kernel, config: Config, name: str, run: Any, expected: list[Any]) -> None:
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
