"""The memory estimate against peaks that were measured on one H200 (Qwen3-8B shape, bf16, AdamW)."""

from __future__ import annotations

from typing import Any

import pytest

from kitbuild.recipe.memory import GIB, Shape, estimate
from kitbuild.recipe.models import Recipe

QWEN3_8B = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "tie_word_embeddings": False,
}  # fmt: skip
LIGER = {"rope": True, "rms_norm": True, "swiglu": True, "fused_linear_cross_entropy": True}
CHECKPOINTED = {"gradient_checkpointing": True}
ALL_KEPT = {"gradient_checkpointing": False}


def recipe(length: int, *, batch: tuple[int, int] = (8, 8), **changed: Any) -> Recipe:
    train = {"max_length": length, "optim": "adamw_torch_fused", **changed.pop("train", {})}
    return Recipe.model_validate({
        "kitbuild": 1, "name": "x", "model": {"config": QWEN3_8B, "tokenizer": {"repo": "a/b"}},
        "dataset": {"repo": "a/b"}, "image": {"cuda": "12.8"}, "batch": {"global": batch[0], "micro": batch[1]},
        "train": train, **changed,
    })  # fmt: skip


def peak(made: Recipe) -> float:
    found = estimate(made, QWEN3_8B)
    assert found is not None
    return found.peak / GIB


@pytest.mark.parametrize(
    ("measured", "made"),
    [
        (64.7, recipe(1024, train=CHECKPOINTED, kernels={"attention": "eager"})),
        (77.5, recipe(2048, train=CHECKPOINTED, kernels={"attention": "eager"})),
        (127.3, recipe(4096, train=CHECKPOINTED, kernels={"attention": "eager"})),
        (61.8, recipe(1024, train=CHECKPOINTED)),
        (64.0, recipe(2048, train=CHECKPOINTED)),
        (68.2, recipe(4096, train=CHECKPOINTED)),
        (61.3, recipe(1024, train=CHECKPOINTED, liger=LIGER)),
        (62.3, recipe(2048, train=CHECKPOINTED, liger=LIGER)),
        (64.9, recipe(4096, train=CHECKPOINTED, liger=LIGER)),
        (75.0, recipe(8192, train=CHECKPOINTED, liger=LIGER)),
        (87.7, recipe(1024, train=ALL_KEPT, liger=LIGER)),
        (102.9, recipe(4096, batch=(8, 2), train=ALL_KEPT, liger=LIGER)),
        (83.9, recipe(4096, batch=(8, 1), train=ALL_KEPT, liger=LIGER)),
        (124.4, recipe(4096, batch=(8, 2), train=ALL_KEPT)),
    ],
)
def test_measured_peaks(measured: float, made: Recipe) -> None:
    """Within a tenth of every peak that was measured."""
    assert peak(made) == pytest.approx(measured, rel=0.1)


def test_parameters() -> None:
    """Qwen3-8B has 8.19 billion parameters; tied embeddings count once."""
    shape = Shape.read(QWEN3_8B)
    assert shape is not None
    assert shape.parameters == pytest.approx(8_190_735_360, rel=1e-4)
    tied = Shape.read({**QWEN3_8B, "tie_word_embeddings": True})
    assert tied is not None
    assert shape.parameters - tied.parameters == 151936 * 4096


def test_sharing() -> None:
    """Each stage of ZeRO takes its part off; DDP adds its buckets; LoRA leaves gradients and states of adapters only."""
    alone = estimate(recipe(1024, train=CHECKPOINTED), QWEN3_8B)
    kinds: list[dict[str, Any]] = [
        {},
        *({"strategy": "deepspeed", "zero_stage": stage} for stage in (1, 2, 3)),
        {"strategy": "fsdp"},
    ]
    shared = [
        estimate(recipe(1024, train=CHECKPOINTED, launch={"processes_per_node": 8, **given}, batch=(64, 8)), QWEN3_8B)
        for given in kinds
    ]
    assert alone is not None
    assert all(item is not None for item in shared)
    ddp, first, second, third, fsdp = (item for item in shared if item is not None)
    assert ddp.peak == alone.peak + alone.gradients
    assert first.optimizer == alone.optimizer // 8
    assert second.gradients == alone.gradients // 8
    assert third.weights == fsdp.weights == alone.weights // 8
    assert ddp.peak > first.peak > second.peak > third.peak == fsdp.peak
    lora = estimate(recipe(1024, train=CHECKPOINTED, lora={"r": 16, "target_modules": "all-linear"}), QWEN3_8B)
    assert lora is not None
    assert lora.gradients == 43_646_976 * 4
    assert lora.peak < 0.5 * alone.peak


@pytest.mark.parametrize("changed", [{"num_experts": 8}, {"hidden_size": None}, {"num_hidden_layers": "36"}])
def test_what_is_not_counted(changed: dict[str, Any]) -> None:
    """A model with experts, or without a decoder's numbers, gets no estimate rather than a wrong one."""
    assert estimate(recipe(1024), {**QWEN3_8B, **changed}) is None


def test_more_needs_more() -> None:
    """Longer rows, more rows, whole logits, fp32 and no checkpointing each need more."""
    least = peak(recipe(2048, batch=(8, 4), train=CHECKPOINTED, liger=LIGER))
    for made in (
        recipe(4096, batch=(8, 4), train=CHECKPOINTED, liger=LIGER),
        recipe(2048, batch=(16, 8), train=CHECKPOINTED, liger=LIGER),
        recipe(2048, batch=(8, 4), train=CHECKPOINTED, liger={**LIGER, "fused_linear_cross_entropy": False}),
        recipe(2048, batch=(8, 4), train=ALL_KEPT, liger=LIGER),
    ):
        assert peak(made) > least
