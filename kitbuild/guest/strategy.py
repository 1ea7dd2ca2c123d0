"""How ranks share the model: set up in each worker, and proven there before the first step.

Asked for is not running: Accelerate leaves DeepSpeed out where ACCELERATE_USE_CPU is set, makes DDP of FSDP on a CPU,
and runs DeepSpeed on a CPU as if each process were the only one; none of it says so.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import distributed

from kitbuild.errors import RunError
from kitbuild.guest.model import attention_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kitbuild.guest.config import Config

DISTRIBUTED = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "GROUP_WORLD_SIZE",
)
STRATEGY_TYPES = {"deepspeed": "DEEPSPEED", "fsdp": "FSDP"}
WRAPPERS = {
    "ddp": "torch.nn.parallel.distributed.DistributedDataParallel",
    "deepspeed": "deepspeed.runtime.engine.DeepSpeedEngine",
}
TIMEOUT_SECONDS = 1800
"""transformers' own `ddp_timeout`: how long a rank waits for the others in one exchange."""


def enter(config: Config) -> None:
    """Before the first tensor: this rank's device, and the process group where the libraries would get it wrong."""
    launch = config.launch
    if launch.world_size == 1 and launch.strategy == "ddp":
        # No process group, no DistributedDataParallel around the model.
        for name in DISTRIBUTED:
            os.environ.pop(name, None)
        return
    if config.cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if launch.strategy == "deepspeed":
        _enter_deepspeed(config)


def _enter_deepspeed(config: Config) -> None:
    import deepspeed.ops

    # Its ops would be compiled now. Training needs none of them (the optimizer is torch's, communication is gloo's or
    # NCCL's); shm_comm, which is built by default on a CPU, is for inference only.
    builders = __import__("deepspeed.ops.op_builder.all_ops", fromlist=["ALL_OPS"]).ALL_OPS
    vars(deepspeed.ops)["__compatible_ops__"] = dict.fromkeys(builders, False)
    if config.cuda:
        return
    from accelerate import PartialState

    seconds = config.train.get("ddp_timeout", TIMEOUT_SECONDS)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    try:
        PartialState(cpu=False, backend="gloo", timeout=timedelta(seconds=seconds))
    finally:
        del os.environ["ACCELERATE_USE_DEEPSPEED"]


def proven(config: Config, trainer: Any, *, rank: int) -> dict[str, Any]:
    """What the rank really runs as; asked for and silently not done is an error."""
    accelerator = trainer.accelerator
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    launch = config.launch
    wanted = STRATEGY_TYPES.get(launch.strategy)
    if wanted is None:
        wanted = "NO" if launch.world_size == 1 else "MULTI_GPU" if config.cuda else "MULTI_CPU"
    found = (kind, accelerator.num_processes, accelerator.process_index)
    if found != (wanted, launch.world_size, rank):
        raise RunError(
            f"{launch.strategy} on {launch.world_size} processes was asked for;"
            f" rank {rank} found {kind} on {found[1]}, itself as {found[2]}",
            hint="report it with the package list; launch.strategy: ddp is the plainest",
        )
    used = attention_of(trainer.model)
    if used != config.attention:
        raise RunError(
            f"attention is {used}, the lock says {config.attention}", hint="lock again; report it if it stays"
        )
    return {
        "rank": rank,
        "distributed_type": kind,
        "device": str(accelerator.device),
        "threads": torch.get_num_threads(),
    }


def uneven(config: Config, rows: int) -> str | None:
    """What is done at the end of an epoch that has too few rows: by us with virtual ranks, else by Accelerate, silently."""
    if config.train.get("dataloader_drop_last"):
        return None
    if config.virtual_ranks:
        whole = config.micro * config.virtual_ranks
        text = f"the last batch of an epoch has {rows % whole} of {whole} rows: it is filled up from the epoch's first ones"
        return f"{text} (train.dataloader_drop_last: true leaves it out instead)" if rows % whole else None
    world = config.launch.world_size
    short = -(-rows // config.micro) % world
    text = f"the last micro-batches of an epoch are {short} for {world} processes: rows of its beginning are trained"
    rest = "once more to fill up (train.dataloader_drop_last: true leaves the last ones out instead)"
    return f"{text} {rest}" if short else None


class Proof(transformers.TrainerCallback):  # type: ignore[misc]
    """When training begins the model is wrapped: each rank looks at what it holds of it, and at the other ranks."""

    def __init__(self, config: Config, trainer: Any, told: dict[str, Any]) -> None:
        self._config, self._trainer, self._told = config, trainer, told

    def on_train_begin(self, *_arguments: Any, **_named: Any) -> None:
        """Refuse to train under another strategy than the one asked for (exit 6)."""
        if self._config.launch.strategy == "ddp" and self._config.launch.world_size == 1:
            return
        held = sharing(self._config, self._trainer.model_wrapped, self._trainer.optimizer)
        held["rank"], held["world_size"] = distributed.get_rank(), distributed.get_world_size()
        everyone: list[dict[str, Any]] = [{} for _ in range(held["world_size"])]
        distributed.all_gather_object(everyone, held)
        problem = refusal(self._config, everyone)
        if problem:
            raise RunError(f"{self._config.launch.strategy} was asked for and is not what runs: {problem}")
        self._told["sharing"] = held


def sharing(config: Config, wrapped: Any, optimizer: Any) -> dict[str, Any]:
    """What wraps the model, and how many values of it this rank holds: `whole` and `here`, of what is shared."""
    kind = f"{type(wrapped).__module__}.{type(wrapped).__qualname__}"
    stage = wrapped.zero_optimization_stage() if hasattr(wrapped, "zero_optimization_stage") else None
    whole, here = _counts(config, wrapped, optimizer, stage)
    return {"wrapper": kind, "zero_stage": stage, "whole": whole, "here": here}


def _counts(config: Config, wrapped: Any, optimizer: Any, stage: int | None) -> tuple[int, int]:
    parameters = list(wrapped.parameters())
    if stage == 3:  # noqa: PLR2004 - ZeRO's own name
        if not all(hasattr(item, "ds_tensor") for item in parameters):
            return 1, 1
        return sum(item.ds_numel for item in parameters), sum(item.ds_tensor.ds_numel for item in parameters)
    trained = [item for item in parameters if item.requires_grad]
    if stage in (1, 2):
        return sum(item.numel() for item in trained), sum(item.numel() for item in _partitions(optimizer))
    if config.launch.strategy == "fsdp":
        shards = [item.to_local() if hasattr(item, "to_local") else item for item in parameters]
        return sum(item.numel() for item in parameters), sum(item.numel() for item in shards)
    return sum(item.numel() for item in parameters), sum(item.numel() for item in parameters)


def _partitions(optimizer: Any) -> Iterable[Any]:
    """A rank's part of the master weights, under either of DeepSpeed's optimizers for stages 1 and 2."""
    inner = optimizer
    while inner is not None:
        for name in ("single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
            if hasattr(inner, name):
                return list(getattr(inner, name))
        inner = getattr(inner, "optimizer", None)
    return []


def refusal(config: Config, everyone: list[dict[str, Any]]) -> str | None:
    """What is not as it was asked for, from what every rank told. Pure."""
    launch = config.launch
    if [item["rank"] for item in everyone] != list(range(launch.world_size)):
        return f"ranks {[item['rank'] for item in everyone]}, not 0 to {launch.world_size - 1}"
    wrapper = WRAPPERS.get(launch.strategy)
    if config.virtual_ranks:
        wrapper = None  # Its own trainer merges gradients, and refuses a wrapper.
    for item in everyone:
        who = f"rank {item['rank']}"
        if wrapper and item["wrapper"] != wrapper:
            return f"{who} trains a {item['wrapper']}"
        if (item["zero_stage"] or 0) != launch.stage:
            return f"{who} runs ZeRO stage {item['zero_stage']}, not {launch.stage}"
        if item["world_size"] != launch.world_size:
            return f"{who} sees {item['world_size']} processes, not {launch.world_size}"
        whole = everyone[0]["whole"]
        if item["whole"] != whole:
            return f"{who} has a model of {item['whole']} values, rank 0 of {whole}"
    return _unshared(config, everyone)


def _unshared(config: Config, everyone: list[dict[str, Any]]) -> str | None:
    launch, whole = config.launch, everyone[0]["whole"]
    here = [item["here"] for item in everyone]
    if launch.strategy == "ddp":
        return None if all(part == whole for part in here) else f"ranks hold {here} of {whole} values"
    if sum(here) < whole:
        return f"the ranks hold {sum(here)} of {whole} values"
    if launch.world_size > 1 and max(here) >= whole:
        return f"rank {here.index(max(here))} holds all {whole} values: nothing is sharded"
    return None
