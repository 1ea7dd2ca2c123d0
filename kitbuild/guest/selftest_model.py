"""Phase 3, layers: in one layer of the model's own kind, each replaced layer, and the attention path as a whole.

The layer is made anew from the model's configuration with a small vocabulary, so that it costs little memory and the
model that is trained is not touched.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import transformers

from kitbuild.errors import RunError
from kitbuild.guest.selftest import ADVICE, TOLERANCE
from kitbuild.guest.selftest_attention import LENGTHS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kitbuild.guest.config import Kernel
    from kitbuild.guest.selftest import Selftest

VOCABULARY = 64


@contextmanager
def own_random_numbers(*, cuda: bool) -> Iterator[None]:
    """What is drawn inside leaves the generators as they were."""
    devices = [torch.cuda.current_device()] if cuda else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)
        yield


def one_layer(test: Selftest, settings: Any) -> Any:
    """A model of the same kind and width with one layer, on the device."""
    small = copy.deepcopy(settings)
    text = small.get_text_config()
    text.num_hidden_layers, text.vocab_size = 1, VOCABULARY
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:1]
    for held in {id(small): small, id(text): text}.values():
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            setattr(held, name, None)
    with torch.device(test.device):
        model = transformers.AutoModelForCausalLM.from_config(
            small, attn_implementation=test.config.attention, dtype=test.dtype
        )
    return model.to(test.device).train()


def layers(test: Selftest, model: Any, replaced: list[tuple[Any, Kernel, str]]) -> None:
    """Each kind of replaced layer against its class's own forward in fp32, on what the model really passes to it."""
    wanted = {type(module) for module, _, _ in replaced}
    examples = _examples(model, wanted, test)
    done = set()
    for module, kernel, layer in replaced:
        known = (type(module), tuple(tuple(item.shape) for item in module.parameters()), layer)
        if known in done:
            continue
        done.add(known)
        example = examples.get(known[:2])
        if example is None:
            text = f"kernel {kernel}: {layer} for {type(module).__name__} is never called by a layer of the model"
            raise RunError(text, hint="remove it from kernels.layers")
        _layer(test, module, kernel, layer, example)


def _examples(model: Any, wanted: set[type], test: Selftest) -> dict[Any, tuple[Any, Any]]:
    """Type and parameter shapes → arguments of the first call in a forward of the one-layer model."""
    found: dict[Any, tuple[Any, Any]] = {}

    def note(module: Any, args: Any, kwargs: Any) -> None:
        key = (type(module), tuple(tuple(item.shape) for item in module.parameters()))
        found.setdefault(key, (args, kwargs))

    hooks = [item.register_forward_pre_hook(note, with_kwargs=True) for item in model.modules() if type(item) in wanted]
    tokens = torch.arange(14, device=test.device).reshape(2, 7) % VOCABULARY
    with torch.no_grad():
        model(input_ids=tokens, use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def _layer(test: Selftest, module: Any, kernel: Kernel, layer: str, example: tuple[Any, Any]) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in module.parameters():  # Norms begin as ones, with which a kernel could do nothing and be right.
            weight.copy_(torch.randn(weight.shape, generator=generator))

    def drawn(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            made = torch.randn(value.shape, generator=generator).to(value.device, value.dtype)
            return made.requires_grad_()
        return value

    args = tuple(drawn(item) for item in example[0])
    kwargs = {name: drawn(item) for name, item in example[1].items()}
    plain = _plain(module)
    weights = list(module.parameters())
    inputs = [item for item in (*args, *kwargs.values()) if isinstance(item, torch.Tensor) and item.requires_grad]
    wide_args, wide_kwargs = tuple(map(_wide, args)), {name: _wide(item) for name, item in kwargs.items()}
    wide = [
        item for item in (*wide_args, *wide_kwargs.values()) if isinstance(item, torch.Tensor) and item.requires_grad
    ]
    outs = _tensors(plain(*wide_args, **wide_kwargs))
    grads = [torch.randn(item.shape, generator=generator).to(item.device) for item in outs]
    sources = [*wide, *plain.parameters()]
    expected = [*(item.detach() for item in outs), *_gradients(outs, sources, grads)]

    def run() -> list[Any]:
        made = _tensors(module(*args, **kwargs))
        given = [grad.to(item.dtype) for item, grad in zip(made, grads, strict=True)]
        return [*(item.detach() for item in made), *_gradients(made, [*inputs, *weights], given)]

    names = [f"output {index + 1}" for index in range(len(outs))] if len(outs) > 1 else ["output"]
    names += [f"gradient {index + 1}" for index in range(len(sources))]
    width = "×".join(map(str, weights[0].shape)) if weights else "no weights"
    test.compare(kernel, f"{layer} for {type(module).__name__} of {width}", run, expected, names)


def _plain(module: Any) -> Any:
    """The same layer in fp32 with the forward of its class."""
    counted = module.__dict__.pop("forward")
    try:
        return copy.deepcopy(module).float()
    finally:
        module.__dict__["forward"] = counted


def _wide(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().float().requires_grad_()
    return value


def _tensors(value: Any) -> list[Any]:
    found = value if isinstance(value, (tuple, list)) else [value]
    return [item for item in found if isinstance(item, torch.Tensor)]


def _gradients(outs: list[Any], sources: list[Any], grads: list[Any]) -> list[Any]:
    made = torch.autograd.grad(outs, sources, grads, allow_unused=True)
    return [torch.zeros_like(source) if grad is None else grad for grad, source in zip(made, sources, strict=True)]


def attention_path(test: Selftest, model: Any) -> None:
    """Rows as the trainer passes them, whatever does attention: each document as if it were alone."""
    train = test.config.train
    packed = bool(train.get("packing") or train.get("padding_free"))
    if packed and train.get("packing_strategy") == "wrapped":
        return  # The recipe wants documents to see each other.
    lengths = LENGTHS[test.device]["packed" if packed else "padded"]
    text = model.config.get_text_config()
    generator = torch.Generator().manual_seed(2)
    documents = [torch.randn(1, size, text.hidden_size, generator=generator) for size in lengths]
    documents = [item.to(test.device, test.dtype).requires_grad_() for item in documents]
    trained = model.training
    model.eval()  # A document with other dropout is another document.
    try:
        _apart(test, model, documents, packed=packed)
    finally:
        model.train(trained)


def _apart(test: Selftest, model: Any, documents: list[Any], *, packed: bool) -> None:
    rows = _packed if packed else _padded
    name = f"attention {test.config.attention} in a layer of the model ({'packed' if packed else 'padded'} rows)"
    allowed = TOLERANCE[test.config.recipe["model"]["dtype"]]
    worst = 0.0
    for index, document in enumerate(documents):
        # Anew for each: a compiled backward runs once, and its graph cannot be kept.
        out = rows(model, documents)[index]
        alone = _packed(model, [document])[0]
        worst = max(worst, (out - alone).float().abs().max().item() / alone.float().abs().max().item())
        if not worst <= allowed:
            text_ = f"{name} is wrong: document {index + 1} is off by {worst:.1e} from itself alone, {allowed:.0e} is allowed"
            raise RunError(text_, hint=ADVICE)
        others = [item for place, item in enumerate(documents) if place != index]
        grads = torch.autograd.grad(out.float().sum(), others, allow_unused=True)
        if any(grad is not None and torch.count_nonzero(grad) for grad in grads):
            raise RunError(f"{name} is wrong: document {index + 1} sends gradients into the others", hint=ADVICE)
    kernel: Any = test.config.attention_kernel or test.config.attention
    test.passed(kernel, name, error={"output": worst}, allowed=allowed, documents=len(documents))


def _packed(model: Any, documents: list[Any]) -> list[Any]:
    lengths = [item.shape[1] for item in documents]
    positions = torch.cat([torch.arange(size, device=documents[0].device) for size in lengths])[None]
    out = model.base_model(inputs_embeds=torch.cat(documents, 1), position_ids=positions, use_cache=False)
    return list(out.last_hidden_state.split(lengths, 1))


def _padded(model: Any, documents: list[Any]) -> list[Any]:
    longest = max(item.shape[1] for item in documents)
    rows = [torch.nn.functional.pad(item, (0, 0, 0, longest - item.shape[1])) for item in documents]
    sizes = torch.tensor([item.shape[1] for item in documents], device=rows[0].device)
    mask = (torch.arange(longest, device=rows[0].device)[None] < sizes[:, None]).long()
    out = model.base_model(inputs_embeds=torch.cat(rows), attention_mask=mask, use_cache=False).last_hidden_state
    return [out[index : index + 1, : item.shape[1]] for index, item in enumerate(documents)]
