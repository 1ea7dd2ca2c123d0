"""Step 1: the run manifest as written. Pure data: no file, no network, no library of the trainer.

Every model is closed (an unknown key is an error), frozen and keyword-only; sequences are tuples.
A rule between fields of one model lives here with it; rules between models are listed in `rules.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, field_validator, model_validator

from kitbuild.recipe.kinds import (
    Closed,
    ExactVersion,
    GpuArch,
    KernelReference,
    LayerName,
    Name,
    PackageName,
    RefusedError,
    Repo,
    Revision,
    Text,
    attention_kernel,
    layer_kernel,
    power_of_two,
    without_password,
)
from kitbuild.recipe.launch import DeepSpeed, Fsdp, Launch

__all__ = [
    "Batch",
    "Dataset",
    "DeepSpeed",
    "Determinism",
    "Evaluate",
    "Fsdp",
    "Image",
    "KernelReference",
    "Kernels",
    "Launch",
    "Liger",
    "Located",
    "Model",
    "Policy",
    "Recipe",
    "Tokenizer",
]


class Located(Closed):
    """A thing on the Hub (`repo`, `revision`) or on disk (`path`, relative to the recipe)."""

    repo: Annotated[Repo | None, Field(description="repo on the Hub, org/name")] = None
    path: Annotated[Text | None, Field(description="file or directory, relative to the recipe; hashed")] = None
    revision: Annotated[
        Revision | None, Field(description="branch, tag or commit of `repo` (default main); the lock holds the commit")
    ] = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [key for key in self._sources() if getattr(self, key) is not None]
        if len(given) != 1:
            keys = " or ".join(f"`{key}`" for key in self._sources())
            raise RefusedError(f"give exactly one of {keys}" + (f", not {' and '.join(given)}" if given else ""))
        if self.repo is None and self.revision is not None:
            raise RefusedError("`revision` goes with `repo` only")
        return self

    @classmethod
    def _sources(cls) -> tuple[str, ...]:
        return ("repo", "path")


class Tokenizer(Located):
    """Where the tokenizer is, when it is not beside the weights."""


class Model(Located):
    """What is fine-tuned: a Hub repo, a local directory, or a configuration initialised at random from the seed."""

    config: Annotated[
        dict[str, Any] | None, Field(description="config.json as a mapping; weights are drawn at random from the seed")
    ] = None
    tokenizer: Annotated[Tokenizer | None, Field(description="where the tokenizer is, if not with the model")] = None
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], Field(description="type of the weights and of the computation")
    ] = "bfloat16"
    chat_template: Annotated[
        Text | None, Field(description="Jinja file, relative to the recipe, that replaces the tokenizer's template")
    ] = None
    trust_remote_code: Annotated[
        bool, Field(description="run the repo's own Python; it must stand in policy.remote_code, at a commit")
    ] = False

    @classmethod
    def _sources(cls) -> tuple[str, ...]:
        return ("repo", "path", "config")

    @model_validator(mode="after")
    def _config_needs(self) -> Self:
        if self.config is not None and self.tokenizer is None:
            raise RefusedError("`config` needs `tokenizer: {repo: …}` or `tokenizer: {path: …}`")
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise RefusedError("`config` needs `model_type`, for example qwen3")
        return self


class Dataset(Located):
    """Rows of chats (`messages`), of `prompt` and `completion`, or of `text`."""

    config: Annotated[Text | None, Field(description="configuration (subset) of a Hub dataset")] = None
    split: Annotated[Text, Field(description="split of a Hub dataset")] = "train"
    weight: Annotated[
        float | None, Field(gt=0, description="share of this dataset in a mixture; in all of a list or in none")
    ] = None


class Evaluate(Closed):
    """What is measured before and after training."""

    dataset: Annotated[Dataset, Field(description="held-out rows")]
    metric: Annotated[
        Literal["exact_match"], Field(description="share of answers, decoded greedily, equal to the reference")
    ] = "exact_match"
    max_new_tokens: Annotated[int, Field(ge=1, le=4096, description="longest answer")] = 64
    examples: Annotated[int, Field(ge=1, description="rows used, from the first")] = 100
    batch: Annotated[int, Field(ge=1, description="rows at once")] = 25


class Kernels(Closed):
    """Attention by name or from the Hub; layers (name to Hub layer) from the Hub."""

    attention: Annotated[
        str,
        AfterValidator(attention_kernel),
        Field(description="sdpa, eager, flex_attention, flash_attention_2/3/4 with its wheel, or org/repo@rev[:fn]"),
    ] = "sdpa"
    layers: Annotated[
        dict[LayerName, Annotated[str, AfterValidator(layer_kernel)]],
        Field(description="layer name, as the model's code registers it, to org/repo@revision:LayerName"),
    ] = Field(default_factory=dict)

    @property
    def attention_reference(self) -> KernelReference | None:
        """The Hub kernel that does attention, or None where attention is built in or a wheel's."""
        return KernelReference.parse(self.attention) if "/" in self.attention else None


class Liger(Closed):
    """Options of `liger_kernel_config`; what is left out is off."""

    rope: Annotated[bool, Field(description="rotary embedding")] = False
    swiglu: Annotated[bool, Field(description="SwiGLU feed-forward")] = False
    geglu: Annotated[bool, Field(description="GeGLU feed-forward")] = False
    rms_norm: Annotated[bool, Field(description="RMS norm")] = False
    layer_norm: Annotated[bool, Field(description="layer norm")] = False
    cross_entropy: Annotated[bool, Field(description="cross-entropy")] = False
    fused_linear_cross_entropy: Annotated[
        bool, Field(description="output projection and cross-entropy in one, without the logits in memory")
    ] = False

    @model_validator(mode="after")
    def _something_once(self) -> Self:
        if self.cross_entropy and self.fused_linear_cross_entropy:
            raise RefusedError("cross_entropy and fused_linear_cross_entropy patch the same loss", "keep one")
        if not any(self.model_dump().values()):
            raise RefusedError("every option is off", "write liger: false")
        return self


class Image(Closed):
    """The base and what is installed on it."""

    cuda: Annotated[Literal["12.9", "12.8", "cpu"], Field(description='CUDA of the base, in quotes; or "cpu"')]
    base: Annotated[Text | None, Field(description="a finished base, by reference; default from images/")] = None
    packages: Annotated[
        dict[PackageName, ExactVersion], Field(description="exact versions over the tested set of images/")
    ] = Field(default_factory=dict)
    gpu_archs: Annotated[
        tuple[GpuArch, ...], Field(description="compute capabilities where it will run; kernels are checked for them")
    ] = ()
    indexes: Annotated[
        dict[PackageName, Annotated[Text, AfterValidator(without_password)]],
        Field(description="package indexes by name; the lock keeps the name only"),
    ] = Field(default_factory=dict)
    pylock: Annotated[
        Text | None, Field(description="pylock.toml, relative to the recipe: these wheels, no others")
    ] = None
    bake: Annotated[
        tuple[Literal["model", "dataset"], ...], Field(description="what goes into the image too; kernels always do")
    ] = ()

    @property
    def target(self) -> str:
        """The folder under images/: cuda129, cuda128 or cpu."""
        return self.cuda if self.cuda == "cpu" else "cuda" + self.cuda.replace(".", "")


class Batch(Closed):
    """Examples an optimizer step (`global`) and per process at once (`micro`)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, populate_by_name=True)

    global_: Annotated[int, Field(ge=1, alias="global", description="examples an optimizer step, over all processes")]
    micro: Annotated[int, Field(ge=1, description="examples per process at once; accumulation follows")]


class Determinism(Closed):
    """`strict`, `record`, or a mapping with options."""

    mode: Annotated[
        Literal["strict", "record"],
        Field(description="strict: the same bits, refuse what cannot give them; record: only say what ran"),
    ] = "strict"
    virtual_ranks: Annotated[
        int | None,
        Field(ge=1, description="the same bits on 1, 2, 4 … this many processes: batch.global / micro, a power of two"),
        AfterValidator(lambda value: None if value is None else power_of_two(value)),
    ] = None
    cpu_portable: Annotated[
        bool, Field(description="the same bits on CPUs of several makers; matrix products are 2.5 times slower")
    ] = False


class Policy(Closed):
    """What is trusted beyond the default."""

    allow_publishers: Annotated[
        tuple[Text, ...], Field(description="Hub organisations whose kernels are accepted though not marked trusted")
    ] = ()
    remote_code: Annotated[tuple[Repo, ...], Field(description="model repos whose own Python may run")] = ()
    require_signatures: Annotated[bool, Field(description="refuse kernels without a valid signature")] = False
    hardening: Annotated[
        Literal["record", "require"], Field(description="record how hardened the container ran, or refuse less")
    ] = "record"


class Recipe(Closed):
    """A whole recipe. `kitbuild.recipe.read` makes one from YAML."""

    kitbuild: Annotated[Literal[1], Field(description="format of this file")]
    name: Annotated[Name, Field(description="name of the image and of the runs")]
    seed: Annotated[int, Field(ge=0, lt=2**32, description="for weights, shuffling and dropout")] = 42
    model: Annotated[Model, Field(description="what is fine-tuned")]
    dataset: Annotated[tuple[Dataset, ...], Field(min_length=1, description="what it learns from; one or a list")]
    evaluate: Annotated[Evaluate | None, Field(description="what is measured before and after training")] = None
    kernels: Annotated[Kernels, Field(description="attention and layers")] = Kernels()
    liger: Annotated[Liger | None, Field(description="Liger's patches, or false")] = None
    image: Annotated[Image, Field(description="base and packages")]
    batch: Annotated[Batch, Field(description="sizes of batches")]
    train: Annotated[dict[str, Any], Field(description="SFTConfig fields of TRL")] = Field(default_factory=dict)
    lora: Annotated[dict[str, Any] | None, Field(description="LoraConfig fields of PEFT; null trains all")] = None
    launch: Annotated[Launch, Field(description="processes")] = Launch()
    determinism: Annotated[Determinism, Field(description="strict, record, or a mapping")] = Determinism()
    track: Annotated[
        tuple[Literal["tensorboard", "trackio", "wandb"], ...], Field(description="trackers, all offline")
    ] = ()
    policy: Annotated[Policy, Field(description="what is trusted")] = Policy()

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

    @property
    def accumulation(self) -> int:
        """Micro-batches per process in an optimizer step."""
        return self.batch.global_ // (self.batch.micro * self.launch.world_size)

    @property
    def keeps_buckets(self) -> bool:
        """Whether DDP must not make its buckets of gradients anew after the first step, as a resumed run would again.

        Two summands have one order. DDP leaves its buckets where it looks for unused parameters
        (`should_rebuild_buckets` in https://github.com/pytorch/pytorch/blob/main/torch/csrc/distributed/c10d/reducer.hpp).
        """
        strict = self.determinism.mode == "strict" and self.determinism.virtual_ranks is None
        return strict and self.launch.strategy == "ddp" and self.launch.world_size > 2  # noqa: PLR2004
