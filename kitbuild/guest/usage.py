"""Phase 6: what really ran. Kernels, Liger's patches and the attention path, counted in each rank where they are called.

Loaded is not used: a kernel that a library silently goes around has no calls, and another path has them.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import TYPE_CHECKING, Any

from kitbuild.errors import RunError

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator, Mapping

    from kitbuild.guest.config import Config

ATTENTION, LIGER = "attention path ", "liger "
# Module of liger_kernel → option that patches it in (liger_kernel/transformers/monkey_patch.py).
LIGER_MODULES = {
    "rope": "rope",
    "llama4_rope": "rope",
    "qwen2vl_mrope": "rope",
    "rms_norm": "rms_norm",
    "layer_norm": "layer_norm",
    "swiglu": "swiglu",
    "geglu": "geglu",
    "cross_entropy": "cross_entropy",
    "functional": "cross_entropy",
    "model": "fused_linear_cross_entropy",
}


def counted(function: Callable[..., Any], name: str, calls: Counter[str]) -> Callable[..., Any]:
    """The same function, each call counted; its signature stays (transformers reads it).

    Compiled code cannot count: a counter that changes would have it compiled again at each call. There it is counted
    once for each time that it is compiled.
    """
    import torch

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator, unused-ignore]
    def compiled() -> int:
        calls[name] += 1
        return 0

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            compiled()
        else:
            calls[name] += 1
        return function(*args, **kwargs)

    return call


def count_attention(model: Any, calls: Counter[str]) -> None:
    """Count every attention path of transformers, not only the one that is asked for."""
    from transformers.modeling_utils import AttentionInterface

    for path, function in dict(AttentionInterface()).items():
        AttentionInterface.register(path, counted(function, ATTENTION + path, calls))
    modeling = sys.modules.get(type(model).__module__)
    eager = getattr(modeling, "eager_attention_forward", None)
    if eager is not None:
        modeling.eager_attention_forward = counted(eager, f"{ATTENTION}eager", calls)  # type: ignore[union-attr]


def attention_calls(calls: Mapping[str, int]) -> dict[str, int]:
    """Path → calls, of those that were called."""
    return {
        name.removeprefix(ATTENTION): count for name, count in calls.items() if name.startswith(ATTENTION) and count
    }


def check_attention(config: Config, calls: Mapping[str, int]) -> None:
    """No other path than the locked one was taken in training; a model without attention takes none."""
    found = attention_calls(calls)
    if {*found} - {config.attention}:
        taken = ", ".join(f"{name} ({count} calls)" for name, count in sorted(found.items()))
        text = f"the attention paths in use are not the locked one: {taken}; the lock says {config.attention}"
        raise RunError(text, hint="this model does attention by itself, or a library went another way: report it")


def count_liger(model: Any, options: Mapping[str, Any], calls: Counter[str]) -> list[str]:
    """Count what Liger patched; each option that is on has to be there, and none that is off."""
    found = set()
    for module in model.modules():
        option = _liger_option(module.forward)
        if option:
            found.add(option)
            module.register_forward_pre_hook(functools.partial(_tick, name=LIGER + option, calls=calls))
    for owner, name, function in _functions(model):
        option = _liger_option(function)
        if option:
            found.add(option)
            setattr(owner, name, counted(function, LIGER + option, calls))
    wanted = {name for name, on in options.items() if on}
    wrong = [f"{name} is on and nothing of it is in the model" for name in sorted(wanted - found)]
    wrong += [f"{name} is off and in the model" for name in sorted(found - wanted)]
    if wrong:
        raise RunError(f"liger: {'; '.join(wrong)}", hint="this model has no such patch; turn the option off")
    return sorted(found)


def _tick(_module: Any, _arguments: Any, *, name: str, calls: Counter[str]) -> None:
    calls[name] += 1


def _functions(model: Any) -> Iterator[tuple[Any, str, Any]]:
    """Functions that a patch replaces where they are looked up: the model's module, and PyTorch's loss."""
    base = getattr(model, "get_base_model", lambda: model)()
    modeling = sys.modules.get(type(base).__module__)
    for name, value in list(vars(modeling).items()) if modeling else ():
        if inspect.isfunction(value):
            yield modeling, name, value
    functional = sys.modules.get("torch.nn.functional")
    if functional is not None:
        yield functional, "cross_entropy", functional.cross_entropy


def _liger_option(function: Any) -> str | None:
    """The option behind a function of Liger's, whatever is wrapped around it; None for all others."""
    inner = inspect.unwrap(getattr(function, "__func__", function))
    inner = getattr(inner, "__func__", inner)
    parts = str(getattr(inner, "__module__", "")).split(".")
    if parts[:2] != ["liger_kernel", "transformers"] or len(parts) < 3:  # noqa: PLR2004 - its third name
        return None
    return LIGER_MODULES.get(parts[2], parts[2])


def liger_calls(calls: Mapping[str, int]) -> dict[str, int]:
    """Option → calls."""
    return {name.removeprefix(LIGER): count for name, count in calls.items() if name.startswith(LIGER)}


def check_liger(options: Mapping[str, Any], calls: Mapping[str, int]) -> None:
    """Each option that is on was called in training."""
    found = liger_calls(calls)
    idle = sorted(name for name, on in options.items() if on and not found.get(name))
    if idle:
        raise RunError(f"liger: {', '.join(idle)} was called 0 times in training", hint="turn it off, or report it")
