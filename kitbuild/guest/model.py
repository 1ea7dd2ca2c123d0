"""The model of one rank: loaded on locked kernels, each tested in the model's own shape; saved in the standard layout."""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
import transformers

from kitbuild.errors import RunError
from kitbuild.guest import kernels, launch, record, selftest_attention, selftest_model, usage
from kitbuild.guest.selftest import KEPT, Selftest

if TYPE_CHECKING:
    from types import ModuleType

    from kitbuild.guest.config import Config


def load(config: Config, calls: Counter[str]) -> tuple[Any, Any, Any]:
    """Tokenizer and model on locked kernels, each kernel tested in the model's own shape."""
    places = config.places
    local = {"local_files_only": True, "trust_remote_code": bool(config.recipe["model"].get("trust_remote_code"))}
    tokenizer = transformers.AutoTokenizer.from_pretrained(config.tokenizer_folder, **local)
    template = places.inputs / "chat_template.jinja"
    if template.exists():
        tokenizer.chat_template = template.read_text()
    module = kernels.load_attention(config, calls)
    folder = places.inputs / "model"
    if config.has_weights:
        settings = transformers.AutoConfig.from_pretrained(folder, **local)
    else:
        given = dict(config.raw["model"]["config"])
        settings = transformers.AutoConfig.for_model(given.pop("model_type"), **given)
    test = Selftest(config, shape(settings))
    if not test.recall():
        selftest(test, settings, module)
    tested = test.result()
    if os.environ.get("RANK", "0") == "0":
        record.write_json(places.out / KEPT, tested)
    dtype = getattr(torch, config.recipe["model"]["dtype"])
    chosen = {"attn_implementation": config.attention, "dtype": dtype}
    if config.has_weights:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **local, **chosen)
    else:
        # On the CPU whatever trains: the same first weights on every device.
        model = transformers.AutoModelForCausalLM.from_config(settings, **chosen)
    if config.cuda and _resident(config):
        model = model.to("cuda")
    usage.count_attention(model, calls)
    model.train()
    return tokenizer, model, kernels.kernelize_layers(model, config, calls)


def selftest(test: Selftest, settings: Any, module: ModuleType | None) -> None:
    """Each kernel by itself, then in one layer of the model's kind."""
    kernel = test.config.attention_kernel
    if module is not None and kernel is not None:
        selftest_attention.attention(test, kernel, module)
    with selftest_model.own_random_numbers(cuda=test.config.cuda):
        try:
            model, plain = (selftest_model.one_layer(test, settings) for _ in range(2))
        except RunError:
            raise
        except Exception as error:
            if any(item.layers for item in test.config.kernels):
                text = f"a {settings.model_type} of one layer cannot be made to test kernels.layers: {error}"
                raise RunError(text, hint="remove kernels.layers") from error
            return
        selftest_model.layers(test, plain, kernels.kernelize_layers(model, test.config, Counter()))
        selftest_model.attention_path(test, model)


def _resident(config: Config) -> bool:
    """Whether the whole model goes to each GPU now; one that will be sharded need not fit there."""
    return not launch.sharded(config) or config.evaluate is not None or any(item.layers for item in config.kernels)


def save(config: Config, trainer: Any, tokenizer: Any, *, first: bool) -> None:
    """Full weights as safetensors, the same layout under each strategy; an adapter is kept beside the merged model."""
    folder = config.places.out / "model"
    sharded = launch.sharded(config)
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped) if sharded else None  # each rank takes part
    if not first:
        return
    model = trainer.accelerator.unwrap_model(trainer.model)
    if state is not None:
        model = _whole(model, state)
    if config.recipe.get("lora"):
        model.save_pretrained(str(config.places.out / "adapter"))
        model = model.merge_and_unload()
    # The kernel is named in the archive; a model folder must load where the kernel is not.
    model.config._attn_implementation_internal = None  # noqa: SLF001
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))


def _whole(sharded: Any, state: dict[str, Any]) -> Any:
    """A model of its own with the gathered weights; training is over."""
    from transformers.integrations import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()  # Else this one would be sharded too.
    adapted = getattr(sharded, "peft_config", None)
    inner = sharded.get_base_model() if adapted else sharded
    config, dtype = inner.config, next(iter(state.values())).dtype
    config._attn_implementation_internal = "eager"  # noqa: SLF001 - it is not run
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    if adapted:
        from peft import get_peft_model

        model = get_peft_model(model, next(iter(adapted.values())), autocast_adapter_dtype=False)
    model.load_state_dict(state)
    model.tie_weights()
    return model


def attention_of(model: Any) -> str:
    """The attention implementation in force."""
    return str(model.config._attn_implementation)  # noqa: SLF001 - there is no public name


def shape(settings: Any) -> dict[str, int]:
    """Heads and width of the model's attention."""
    text = settings.get_text_config()
    heads = text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    return {"heads": heads, "kv_heads": getattr(text, "num_key_value_heads", None) or heads, "head_dim": width}
