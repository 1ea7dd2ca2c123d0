"""How ranks share the model: set up in each worker, and proven there before the first step."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from kitbuild.errors import RunError
from kitbuild.guest.model import attention_of

if TYPE_CHECKING:
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


def enter(config: Config) -> None:
    """Before the first tensor: this rank's device; a single process runs as without a launcher."""
    if config.launch.world_size == 1:
        # No process group, no DistributedDataParallel around the model.
        for name in DISTRIBUTED:
            os.environ.pop(name, None)
    elif config.cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def proven(config: Config, trainer: Any, *, rank: int) -> dict[str, Any]:
    """What the rank really runs as; asked for and silently not done is an error."""
    accelerator = trainer.accelerator
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    wanted = STRATEGY_TYPES.get(config.launch.strategy)
    if (wanted and kind != wanted) or accelerator.num_processes != config.launch.world_size:
        asked = f"{config.launch.strategy} on {config.launch.world_size} processes"
        raise RunError(
            f"{asked} was asked for, {kind} on {accelerator.num_processes} was set up",
            hint="use launch.strategy: ddp",
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
