"""Step 1: the run manifest as written. Pure data: no file, no network, no library of the trainer.

Every model is closed (an unknown key is an error), frozen and keyword-only; sequences are tuples.
Cross-field rules live with the model that owns both fields.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

Repo = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}$")]
Revision = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,199}$")]
Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?$")]
Scalar = bool | int | float | str | None
BUILT_IN_ATTENTION = ("sdpa", "eager", "flex_attention")
WHEEL_ATTENTION = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
_KERNEL = re.compile(
    r"^(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[A-Za-z0-9][\w./-]*))?(?::(?P<member>[A-Za-z_]\w*))?$"
)


class Closed(BaseModel):
    """The base of every model: closed, frozen, strict about types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True)


class KernelReference(Closed):
    """`org/repo[@revision][:member]`, as transformers' `attn_implementation` takes it."""

    repo: str
    revision: str | None = None
    member: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Split a reference; `ValueError` says what is wrong with it."""
        match = _KERNEL.match(text)
        if match is None:
            raise ValueError(f"{text!r} is not org/repo[@revision][:name]")
        return cls(**match.groupdict())

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return self.repo + revision + (f":{self.member}" if self.member else "")


class Located(Closed):
    """A thing on the Hub (`repo`, `revision`) or on disk (`path`, relative to the recipe)."""

    repo: Repo | None = None
    path: str | None = None
    revision: Revision | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [key for key in self._sources() if getattr(self, key) is not None]
        if len(given) != 1:
            keys = " or ".join(f"`{key}`" for key in self._sources())
            raise ValueError(f"give exactly one of {keys}" + (f", not {' and '.join(given)}" if given else ""))
        if self.repo is None and self.revision is not None:
            raise ValueError("`revision` goes with `repo` only")
        return self

    @classmethod
    def _sources(cls) -> tuple[str, ...]:
        return ("repo", "path")


class Tokenizer(Located):
    """Where the tokenizer is, when it is not beside the weights."""


class Model(Located):
    """What is fine-tuned: a Hub repo, a local directory, or a configuration initialised at random from the seed."""

    config: dict[str, Any] | None = None
    tokenizer: Tokenizer | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    chat_template: str | None = None
    trust_remote_code: bool = False

    @classmethod
    def _sources(cls) -> tuple[str, ...]:
        return ("repo", "path", "config")

    @model_validator(mode="after")
    def _config_needs(self) -> Self:
        if self.config is not None and self.tokenizer is None:
            raise ValueError("`config` needs `tokenizer: {repo: …}` or `tokenizer: {path: …}`")
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError("`config` needs `model_type`, for example qwen3")
        return self


class Dataset(Located):
    """Rows of chats (`messages`), of `prompt` and `completion`, or of `text`."""

    config: str | None = None
    split: str = "train"
    weight: Annotated[float, Field(gt=0)] | None = None


class Evaluate(Closed):
    """What is measured before and after training."""

    dataset: Dataset
    metric: Literal["exact_match"] = "exact_match"
    max_new_tokens: Annotated[int, Field(ge=1, le=4096)] = 64
    examples: Annotated[int, Field(ge=1)] = 100
    batch: Annotated[int, Field(ge=1)] = 25


class Kernels(Closed):
    """Attention by name or from the Hub; layers (class name to Hub layer) from the Hub."""

    attention: str = "sdpa"
    layers: dict[str, str] = Field(default_factory=dict)

    @field_validator("attention")
    @classmethod
    def _attention(cls, value: str) -> str:
        if value in BUILT_IN_ATTENTION + WHEEL_ATTENTION:
            return value
        if "/" not in value:
            known = ", ".join(BUILT_IN_ATTENTION + WHEEL_ATTENTION)
            raise ValueError(f"{value!r} is not one of {known}, nor org/repo[@revision][:function]")
        if KernelReference.parse(value).revision is None:
            raise ValueError(f"{value} names no revision; write {value.partition(':')[0]}@v1, say")
        return value

    @field_validator("layers")
    @classmethod
    def _layers(cls, value: dict[str, str]) -> dict[str, str]:
        for layer, text in value.items():
            reference = KernelReference.parse(text)
            if reference.revision is None or reference.member is None:
                raise ValueError(f"{layer}: {text} must be org/repo@revision:LayerName")
        return value

    @property
    def attention_reference(self) -> KernelReference | None:
        """The Hub kernel that does attention, or None where attention is built in or a wheel's."""
        return KernelReference.parse(self.attention) if "/" in self.attention else None


class Liger(Closed):
    """Options of `liger_kernel_config`; what is left out is off."""

    rope: bool = False
    swiglu: bool = False
    geglu: bool = False
    rms_norm: bool = False
    layer_norm: bool = False
    cross_entropy: bool = False
    fused_linear_cross_entropy: bool = False

    @model_validator(mode="after")
    def _one_cross_entropy(self) -> Self:
        if self.cross_entropy and self.fused_linear_cross_entropy:
            raise ValueError("cross_entropy and fused_linear_cross_entropy patch the same loss; keep one")
        return self


class Image(Closed):
    """The base and what is installed on it."""

    cuda: Literal["12.9", "12.8", "cpu"]
    base: str | None = None
    packages: dict[str, str] = Field(default_factory=dict)
    gpu_archs: tuple[Annotated[str, StringConstraints(pattern=r"^[0-9]{1,2}\.[0-9][a-z]?$")], ...] = ()
    indexes: dict[str, str] = Field(default_factory=dict)
    bake: tuple[Literal["model", "dataset"], ...] = ()

    @property
    def target(self) -> str:
        """The folder under images/: cuda129, cuda128 or cpu."""
        return self.cuda if self.cuda == "cpu" else "cuda" + self.cuda.replace(".", "")


class Batch(Closed):
    """Examples an optimizer step (`global`) and per process at once (`micro`)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, populate_by_name=True)

    global_: Annotated[int, Field(ge=1, alias="global")]
    micro: Annotated[int, Field(ge=1)]


class Launch(Closed):
    """Processes and how they share the model."""

    nodes: Annotated[int, Field(ge=1, le=1024)] = 1
    processes_per_node: Annotated[int, Field(ge=1, le=64)] = 1
    threads_per_process: Annotated[int, Field(ge=1, le=512)] = 1
    strategy: Literal["ddp", "deepspeed", "fsdp"] = "ddp"
    zero_stage: Literal[1, 2, 3] | None = None

    @model_validator(mode="after")
    def _options(self) -> Self:
        if self.zero_stage is not None and self.strategy != "deepspeed":
            raise ValueError("`zero_stage` goes with `strategy: deepspeed` only")
        return self

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return self.nodes * self.processes_per_node


class Determinism(Closed):
    """`strict`, `record`, or a mapping with options."""

    mode: Literal["strict", "record"] = "strict"
    virtual_ranks: Annotated[int, Field(ge=1)] | None = None
    cpu_portable: bool = False


class Policy(Closed):
    """What is trusted beyond the default."""

    allow_publishers: tuple[str, ...] = ()
    remote_code: tuple[str, ...] = ()
    require_signatures: bool = False
    hardening: Literal["record", "require"] = "record"


class Recipe(Closed):
    """A whole recipe. `kitbuild.recipe.read` makes one from YAML."""

    kitbuild: Literal[1]
    name: Name
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    model: Model
    dataset: tuple[Dataset, ...]
    evaluate: Evaluate | None = None
    kernels: Kernels = Kernels()
    liger: Liger | None = None
    image: Image
    batch: Batch
    train: dict[str, Any] = Field(default_factory=dict)
    lora: dict[str, Any] | None = None
    launch: Launch = Launch()
    determinism: Determinism = Determinism()
    track: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = ()
    policy: Policy = Policy()

    @field_validator("dataset", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        return (value,) if isinstance(value, dict) else value

    @field_validator("determinism", mode="before")
    @classmethod
    def _mode_alone(cls, value: object) -> object:
        return {"mode": value} if isinstance(value, str) else value

    @field_validator("liger", mode="before")
    @classmethod
    def _liger_off(cls, value: object) -> object:
        return None if value is False else value

    @model_validator(mode="after")
    def _batch_divides(self) -> Self:
        at_once = self.batch.micro * self.launch.world_size
        if self.batch.global_ % at_once:
            raise ValueError(
                f"batch.global {self.batch.global_} is not a multiple of micro {self.batch.micro}"
                f" × {self.launch.world_size} processes"
            )
        return self

    @model_validator(mode="after")
    def _nothing_patched_twice(self) -> Self:
        if self.liger and self.liger.rms_norm and any("RMSNorm" in layer for layer in self.kernels.layers):
            raise ValueError("liger.rms_norm and kernels.layers RMSNorm patch the same layer; keep one")
        return self

    @property
    def accumulation(self) -> int:
        """Micro-batches per process in an optimizer step."""
        return self.batch.global_ // (self.batch.micro * self.launch.world_size)
