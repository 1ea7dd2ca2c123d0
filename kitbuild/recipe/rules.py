"""Step 1: the rules between keys of different sections, as one list.

A rule names the top-level sections that it looks at; it is not asked while one of them has a problem of its own.
It yields findings and never raises. `notes` are facts worth knowing that refuse nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kitbuild.recipe.findings import Finding, Findings
from kitbuild.recipe.kinds import WHEEL_ATTENTION
from kitbuild.recipe.launch_rules import LAUNCH_RULES
from kitbuild.recipe.strictness import strict
from kitbuild.recipe.trust import remote_code
from kitbuild.recipe.virtual_ranks import virtual_ranks

if TYPE_CHECKING:
    from kitbuild.recipe.models import Recipe


_ATTENTION_WHEELS = dict(zip(WHEEL_ATTENTION, ("flash-attn", "flash-attn-3", "flash-attn-4"), strict=True))
# transformers' optimizers that import a package which the tested set lacks (transformers/trainer_optimizer.py).
_OPTIMIZER_PACKAGES = (
    ("galore", "galore-torch"),
    ("apollo", "apollo-torch"),
    ("schedule_free", "schedulefree"),
    ("grokadamw", "grokadamw"),
    ("stable_adamw", "torch-optimi"),
    ("adamw_torch_4bit", "torchao"),
    ("adamw_torch_8bit", "torchao"),
    ("adamw_torch_xla", "torch-xla"),
    ("adamw_torch_npu", "torch-npu"),
    ("adamw_anyprecision", "torchdistx"),
    ("lomo", "lomo-optim"),
    ("adalomo", "lomo-optim"),
    ("paged_", "bitsandbytes"),
    ("lion", "bitsandbytes"),
    ("ademamix", "bitsandbytes"),
    ("rmsprop_bnb", "bitsandbytes"),
    ("adamw_bnb", "bitsandbytes"),
    ("adamw_8bit", "bitsandbytes"),
)


def mixture_weights(recipe: Recipe) -> Findings:
    """In a list of datasets, a weight in each or in none."""
    weighted = [dataset.weight is not None for dataset in recipe.dataset]
    if any(weighted) and len(weighted) == 1:
        yield Finding(("dataset", 0, "weight"), "a single dataset has no weight", "remove it")
    elif any(weighted) and not all(weighted):
        index = weighted.index(False)
        yield Finding(("dataset", index), "this dataset has no weight and others have", "give all a weight, or none")


def nothing_patched_twice(recipe: Recipe) -> Findings:
    """Liger and a Hub kernel never replace the same layer."""
    liger = recipe.liger
    if liger is None:
        return
    patched = {"RMSNorm": liger.rms_norm, "LayerNorm": liger.layer_norm, "MLP": liger.swiglu or liger.geglu}
    for layer in recipe.kernels.layers:
        if any(on and layer.endswith(name) for name, on in patched.items()) or (
            liger.rope and layer.startswith("rotary")
        ):
            yield Finding(("kernels", "layers", layer), "liger patches this layer too", "keep one of the two")


def liger_loss(recipe: Recipe) -> Findings:
    """TRL 1.14.2 refuses chunked_nll with Liger; dft is only in Liger's fused loss, and silently nll without it."""
    loss = recipe.train.get("loss_type")
    if recipe.liger and loss == "chunked_nll":
        yield Finding(("train", "loss_type"), "chunked_nll does not go with liger", "write nll, or liger: false")
    if recipe.liger and loss == "dft" and not recipe.liger.fused_linear_cross_entropy:
        yield Finding(
            ("train", "loss_type"),
            "with liger, dft needs fused_linear_cross_entropy; without it the loss is nll",
            "write liger.fused_linear_cross_entropy: true",
        )


def cpu_target(recipe: Recipe) -> Findings:
    """What a CPU cannot do, and what only a CPU can."""
    if recipe.image.cuda != "cpu":
        if recipe.determinism.cpu_portable:
            yield Finding(("determinism", "cpu_portable"), "cpu_portable goes with image.cuda: cpu only", "remove it")
        return
    if recipe.image.gpu_archs:
        yield Finding(("image", "gpu_archs"), "image.cuda is cpu: there is no GPU architecture", "remove it")
    if recipe.liger:
        yield Finding(("liger",), "Liger's kernels are Triton and need a GPU; image.cuda is cpu", "write liger: false")
    if recipe.launch.strategy == "fsdp":
        # accelerate's state takes FSDP with accelerator back ends only; on a CPU it is DistributedDataParallel.
        yield Finding(("launch", "strategy"), "on a CPU, fsdp silently trains as ddp", "write ddp or deepspeed")
    if recipe.kernels.attention in WHEEL_ATTENTION:
        yield Finding(
            ("kernels", "attention"), f"{recipe.kernels.attention} needs a GPU; image.cuda is cpu", "write sdpa"
        )


def attention_wheel(recipe: Recipe) -> Findings:
    """Without its wheel, transformers quietly takes a floating Hub kernel instead."""
    attention = recipe.kernels.attention
    wheel = _ATTENTION_WHEELS.get(attention)
    if wheel and recipe.image.cuda != "cpu" and not _has_package(recipe, wheel):
        pinned = "a Hub kernel such as kernels-community/flash-attn2@v2"
        yield Finding(
            ("kernels", "attention"),
            f"{attention} needs the package {wheel}",
            f"add it to image.packages, or pin {pinned}",
        )


def flash_dtype(recipe: Recipe) -> Findings:
    """Flash attention on a GPU computes in 16 bits only."""
    attention = recipe.kernels.attention
    if recipe.image.cuda != "cpu" and recipe.model.dtype == "float32" and "flash" in attention.replace("flex", ""):
        yield Finding(("model", "dtype"), f"{attention} takes bfloat16 or float16 only", "write bfloat16")


def optimizer_package(recipe: Recipe) -> Findings:
    """An optimizer whose package is not in the tested set."""
    optimizer = recipe.train.get("optim")
    if not isinstance(optimizer, str):
        return
    for prefix, package in _OPTIMIZER_PACKAGES:
        if optimizer.startswith(prefix):
            if not _has_package(recipe, package):
                yield Finding(
                    ("train", "optim"),
                    f"{optimizer} needs the package {package}",
                    "add it to image.packages with its version",
                )
            return


def packing(recipe: Recipe) -> Findings:
    """What TRL refuses only after the model is loaded."""
    train = recipe.train
    if train.get("packing") is True and "max_length" in train and train["max_length"] is None:
        yield Finding(("train", "max_length"), "packing needs a max_length", "give the length of a packed row")
    if train.get("padding_free") is True and not train.get("packing") and train.get("max_length", 1024) is not None:
        yield Finding(
            ("train", "padding_free"),
            "padding_free without packing does not enforce max_length",
            "write packing: true, or max_length: null",
        )


def duration(recipe: Recipe) -> Findings:
    """max_steps silently wins over num_train_epochs."""
    steps = recipe.train.get("max_steps", -1)
    if steps != -1 and "num_train_epochs" in recipe.train:
        yield Finding(("train", "num_train_epochs"), "max_steps is given too and would win", "keep one")


def best_checkpoint(recipe: Recipe) -> Findings:
    """Nothing is evaluated while training, so there is no best checkpoint."""
    if recipe.train.get("save_strategy") == "best":
        yield Finding(
            ("train", "save_strategy"), "best needs an evaluation during training", "write no, steps or epoch"
        )


def lora_head(recipe: Recipe) -> Findings:
    """TRL's chunked loss reads the head's weight and would drop an adapter on it."""
    targets = (recipe.lora or {}).get("target_modules")
    named = (targets,) if isinstance(targets, str) else targets if isinstance(targets, tuple) else ()
    if "lm_head" in named and not recipe.liger and recipe.train.get("loss_type") in (None, "chunked_nll"):
        yield Finding(
            ("lora", "target_modules"),
            "an adapter on lm_head does not go with the default loss chunked_nll",
            "write train.loss_type: nll, or leave lm_head out",
        )


def _has_package(recipe: Recipe, name: str) -> bool:
    """Named in the recipe, or perhaps in its pylock.toml, which is asked later."""
    return recipe.image.pylock is not None or any(
        package.lower().replace("_", "-").replace(".", "-") == name for package in recipe.image.packages
    )


Rule = tuple[tuple[str, ...], Callable[["Recipe"], Findings]]
RULES: tuple[Rule, ...] = (
    *LAUNCH_RULES,
    (("dataset",), mixture_weights),
    (("liger", "kernels"), nothing_patched_twice),
    (("liger", "train"), liger_loss),
    (("image", "liger", "launch", "kernels", "determinism"), cpu_target),
    (("image", "kernels"), attention_wheel),
    (("image", "kernels", "model"), flash_dtype),
    (("image", "train"), optimizer_package),
    (("train",), packing),
    (("train",), duration),
    (("train",), best_checkpoint),
    (("train", "lora", "liger"), lora_head),
    (("model", "policy"), remote_code),
    (("determinism", "train", "kernels", "launch"), strict),
    (("determinism", "launch", "batch", "kernels", "train"), virtual_ranks),
)


def findings(recipe: Recipe, *, without: frozenset[str] = frozenset()) -> Findings:
    """What the rules refuse; rules that look at a section in `without` are not asked."""
    for sections, rule in RULES:
        if not without.intersection(sections):
            yield from rule(recipe)


def notes(recipe: Recipe) -> Findings:
    """Facts worth knowing about a recipe that is right."""
    attention, train = recipe.kernels.attention, recipe.train
    flash = "flash" in attention
    if train.get("packing") is True and not flash:
        yield Finding(
            ("train", "packing"),
            f"packed rows with {attention} need a dense quadratic mask: right, but slow",
            "a flash kernel such as kernels-community/flash-attn2@v2 keeps documents apart at full speed",
        )
    if train.get("packing") is True and train.get("packing_strategy") == "wrapped":
        yield Finding(("train", "packing_strategy"), "wrapped packing lets documents attend to each other", "write bfd")
    if recipe.image.cuda != "cpu" and recipe.determinism.mode == "strict" and attention == "sdpa":
        yield Finding(
            ("kernels", "attention"),
            "strict turns off sdpa's fastest path (cuDNN has no deterministic backward)",
            "a flash kernel keeps its speed",
        )
    if recipe.image.cuda != "cpu" and not recipe.image.gpu_archs and (recipe.kernels.layers or "/" in attention):
        yield Finding(
            ("image", "cuda"),
            "without image.gpu_archs nobody checks that the kernels are built for your GPU",
            'write its compute capability, for example gpu_archs: ["9.0"]',
        )
    if recipe.evaluate and recipe.evaluate.dataset in recipe.dataset:
        yield Finding(("evaluate", "dataset"), "the rows of training: the score says nothing about new ones", None)
