"""Step 1: processes, and how they share the model. Imported by `models`; rules between sections are in `rules`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from kitbuild.recipe.kinds import Closed, RefusedError, Text

Elements = Annotated[int, Field(ge=1, le=1 << 40)]


class DeepSpeed(Closed):
    """What ZeRO may be told beyond its stage. Clipping follows `train.max_grad_norm`."""

    offload_optimizer: Annotated[bool, Field(description="optimizer states and its step in host memory")] = False
    offload_parameters: Annotated[bool, Field(description="parameters in host memory; stage 3 only")] = False
    reduce_bucket_size: Annotated[Elements, Field(description="gradient elements reduced at once")] = 500_000_000
    allgather_bucket_size: Annotated[Elements, Field(description="parameter elements gathered at once")] = 500_000_000
    prefetch_bucket_size: Annotated[Elements, Field(description="stage 3: elements fetched ahead")] = 50_000_000
    persistence_threshold: Annotated[
        int, Field(ge=0, description="stage 3: parameters with fewer elements are not sharded")
    ] = 100_000
    overlap_comm: Annotated[
        bool, Field(description="reduce gradients while the backward pass runs; refused under strict")
    ] = False


class Fsdp(Closed):
    """What FSDP2 (`fully_shard`) may be told."""

    reshard_after_forward: Annotated[
        bool, Field(description="free gathered parameters after the forward pass: less memory, more communication")
    ] = True
    layers: Annotated[
        tuple[Text, ...], Field(description="layer classes that are sharded as one; default: the model's own list")
    ] = ()
    offload: Annotated[bool, Field(description="parameters, gradients and optimizer states in host memory")] = False
    activation_checkpointing: Annotated[
        bool, Field(description="recompute activations; instead of train.gradient_checkpointing")
    ] = False


class Launch(Closed):
    """Processes and how they share the model."""

    nodes: Annotated[int, Field(ge=1, le=1024, description="machines")] = 1
    processes_per_node: Annotated[int, Field(ge=1, le=64, description="processes, so GPUs, on each machine")] = 1
    threads_per_process: Annotated[
        int, Field(ge=1, le=512, description="CPU threads of a process; on a CPU they change the bits")
    ] = 1
    strategy: Annotated[Literal["ddp", "deepspeed", "fsdp"], Field(description="how processes share the model")] = "ddp"
    zero_stage: Annotated[Literal[1, 2, 3] | None, Field(description="ZeRO stage, with deepspeed only (default 2)")] = (
        None
    )
    deepspeed: Annotated[DeepSpeed | None, Field(description="options of deepspeed")] = None
    fsdp: Annotated[Fsdp | None, Field(description="options of fsdp")] = None

    @model_validator(mode="after")
    def _options(self) -> Self:
        if self.zero_stage is not None and self.strategy != "deepspeed":
            raise RefusedError("`zero_stage` goes with `strategy: deepspeed` only")
        for name in ("deepspeed", "fsdp"):
            if getattr(self, name) is not None and self.strategy != name:
                raise RefusedError(f"`{name}` goes with `strategy: {name}` only")
        if self.deepspeed and self.deepspeed.offload_parameters and self.stage != 3:  # noqa: PLR2004 - ZeRO's own name
            raise RefusedError("`offload_parameters` goes with `zero_stage: 3` only")
        return self

    @property
    def stage(self) -> int:
        """ZeRO's stage in force; 0 without deepspeed."""
        return (self.zero_stage or 2) if self.strategy == "deepspeed" else 0

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return self.nodes * self.processes_per_node
