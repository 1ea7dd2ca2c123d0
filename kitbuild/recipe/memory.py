"""Step 1: how much memory of a GPU a recipe needs, from the model's shape and the batch. Pure arithmetic.

The sum is what PyTorch's allocator holds at its peak, with every row at `train.max_length`. The terms are counted from
what autograd keeps of a decoder layer; `docs/memory.md` derives them and holds them against measured peaks.
The driver's own context and fragmentation, 1 to 3 GiB, come on top.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kitbuild.recipe.models import Recipe

GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Optimizer state, in copies of the trained parameters; bytes per parameter where it has a type of its own.
STATES = {
    "adamw_torch": 2.0, "adamw_torch_fused": 2.0, "adamw_anyprecision": 3.0, "stable_adamw": 2.0, "lion_32bit": 1.0,
    "rmsprop": 1.0, "sgd": 0.0, "adagrad": 1.0, "adafactor": 0.01,
}  # fmt: skip
# Of a score matrix in eager attention: scores, mask sum, fp32 softmax, its cast; in the backward their gradients too.
SCORE_KEPT, SCORE_PEAK = 8, 14
CHUNK = 256  # rows of logits at once, TRL's chunked_nll
LOGIT = 14  # bytes a logit takes: its value, fp32 copy, log-softmax and gradient
NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
MAX_LENGTH = 1024  # SFTConfig's own default


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one GPU at the peak, by what holds them. `peak` is less than their sum: not all are there at once."""

    parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    peak: int

    def as_json(self) -> dict[str, int]:
        """Bytes by name."""
        return {
            "parameters": self.parameters, "weights": self.weights, "gradients": self.gradients,
            "optimizer": self.optimizer, "activations": self.activations, "logits": self.logits, "peak": self.peak,
        }  # fmt: skip

    def text(self, *, of: str) -> str:
        """One line; `of` is what holds it, a GPU or a process."""
        held = [(name, size) for name, size in self.as_json().items() if name not in ("parameters", "peak")]
        parts = ", ".join(f"{name} {_size(size)}" for name, size in held if size >= self.peak / 100)
        return f"about {_size(self.peak)} of {of} at the peak ({parts})"


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A dense decoder, as its config.json has it. Widths in elements."""

    vocab: int
    hidden: int
    feed_forward: int
    layers: int
    heads: int
    queries: int
    keys: int
    tied: bool

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Shape | None:
        """None for what is no dense decoder (experts, encoders, several towers): its terms would be guesses."""
        numbers = [config.get(name) for name in NEEDED]
        if any("expert" in name for name in config) or not all(isinstance(item, int) and item > 0 for item in numbers):
            return None
        vocab, hidden, feed_forward, layers, heads = (int(item or 0) for item in numbers)
        width = config.get("head_dim") or hidden // heads
        return cls(
            vocab=vocab, hidden=hidden, feed_forward=feed_forward, layers=layers, heads=heads, queries=heads * width,
            keys=(config.get("num_key_value_heads") or heads) * width, tied=bool(config.get("tie_word_embeddings")),
        )  # fmt: skip

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of a layer's projections, by the name that LoRA targets."""
        return {
            "q_proj": (self.hidden, self.queries), "k_proj": (self.hidden, self.keys),
            "v_proj": (self.hidden, self.keys), "o_proj": (self.queries, self.hidden),
            "gate_proj": (self.hidden, self.feed_forward), "up_proj": (self.hidden, self.feed_forward),
            "down_proj": (self.feed_forward, self.hidden),
        }  # fmt: skip

    @property
    def layer_parameters(self) -> int:
        """Projections and the two norms of one layer."""
        return sum(before * after for before, after in self.linears.values()) + 2 * self.hidden

    @property
    def parameters(self) -> int:
        """All of them; tied embeddings once."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * self.layer_parameters + self.hidden


def estimate(recipe: Recipe, config: Mapping[str, Any]) -> Memory | None:
    """The recipe's peak on one GPU, or None where the model is of a kind that is not counted."""
    shape = Shape.read(config)
    if shape is None:
        return None
    size = BYTES[recipe.model.dtype]
    trained, trained_size = _trained(recipe, shape, size)
    weights = shape.parameters * size + (trained * trained_size if recipe.lora is not None else 0)
    gradients = trained * trained_size
    optimizer = int(gradients * STATES.get(str(recipe.train.get("optim", "adamw_torch_fused")), 2.0))
    weights, gradients, optimizer, transient = _shared(recipe, shape, size, (weights, gradients, optimizer))
    length = int(recipe.train.get("max_length") or MAX_LENGTH)
    tokens = recipe.batch.micro * length
    kept, layer = _layer(recipe, shape, size, tokens, length)
    # SFTConfig checkpoints unless it is told not to: of a layer only its input is kept.
    recomputed = recipe.train.get("gradient_checkpointing", True)
    activations = shape.layers * (tokens * shape.hidden * size if recomputed else kept)
    logits = _logits(recipe, shape, size, tokens)
    head = activations + logits + (layer if recomputed else layer - kept)
    held = weights + optimizer + transient
    # Without accumulation gradients come as activations go: whichever end of the backward pass is higher.
    work = gradients + head if recipe.accumulation > 1 else max(head, gradients + layer)
    return Memory(
        parameters=shape.parameters, weights=weights, gradients=gradients, optimizer=optimizer,
        activations=activations + (layer if recomputed else 0), logits=logits, peak=held + work,
    )  # fmt: skip


def _trained(recipe: Recipe, shape: Shape, size: int) -> tuple[int, int]:
    """How many parameters are trained, and bytes of each; adapters are fp32 (PEFT's autocast_adapter_dtype)."""
    if recipe.lora is None:
        return shape.parameters, size
    rank, wanted = int(recipe.lora.get("r", 8)), recipe.lora.get("target_modules") or ("q_proj", "v_proj")
    names = shape.linears if wanted == "all-linear" else [wanted] if isinstance(wanted, str) else wanted
    chosen = [shape.linears[name] for name in names if name in shape.linears]
    return shape.layers * rank * sum(before + after for before, after in chosen), 4


def _shared(recipe: Recipe, shape: Shape, size: int, held: tuple[int, int, int]) -> tuple[int, int, int, int]:
    """Weights, gradients and optimizer on one of several processes, and what is gathered or exchanged for a while."""
    weights, gradients, optimizer = held
    world, stage = recipe.launch.world_size, recipe.launch.zero_stage or 2
    merged = recipe.determinism.virtual_ranks
    if merged:
        # Partial sums of the tree: one copy for each level inside a process.
        return weights, gradients, optimizer, gradients * max(0, int(log2(max(1, merged // world))))
    if world == 1:
        return weights, gradients, optimizer, 0
    if recipe.launch.strategy == "ddp":
        return weights, gradients, optimizer, gradients  # its buckets
    layer = 2 * shape.layer_parameters * size
    if recipe.launch.strategy == "fsdp" or stage == 3:  # noqa: PLR2004 - ZeRO's own name
        return weights // world, gradients // world, optimizer // world, layer
    return weights, gradients if stage == 1 else gradients // world, optimizer // world, layer


def _layer(recipe: Recipe, shape: Shape, size: int, tokens: int, length: int) -> tuple[int, int]:
    """Bytes that autograd keeps of one layer, and the most while its backward runs."""
    liger = recipe.liger
    # The residual stream twice and its two norms' results; queries and keys projected, normalised, rotated; values;
    # attention's result; gate, up, and their product.
    elements = 4 * shape.hidden + 3 * (shape.queries + shape.keys) + shape.keys + shape.queries + 3 * shape.feed_forward
    kept = elements * size
    if liger is None or not liger.rms_norm:
        # transformers' norm keeps an fp32 copy and the normalised input.
        kept += (2 * shape.hidden + shape.queries + shape.keys) * (4 + size)
    if liger is None or not (liger.swiglu or liger.geglu):
        kept += shape.feed_forward * size  # the activation before it meets `up`
    peak = kept
    if recipe.kernels.attention == "eager":
        kept += shape.heads * length * SCORE_KEPT
        peak += shape.heads * length * SCORE_PEAK
    return kept * tokens, peak * tokens


def _logits(recipe: Recipe, shape: Shape, size: int, tokens: int) -> int:
    """The output projection and the loss."""
    liger = recipe.liger
    if liger is not None and liger.fused_linear_cross_entropy:
        return 2 * tokens * shape.hidden * size
    whole = liger is not None or recipe.train.get("loss_type") not in (None, "chunked_nll")
    return (tokens if whole else min(tokens, CHUNK)) * shape.vocab * LOGIT
