"""Step 2: what Accelerate, DeepSpeed and FSDP are told. Pure, from the recipe alone, with nothing left to "auto".

`kitbuild check --launch` shows it, the lock and so the archive hold it, and the guest takes it from there: no default
file of a user and no question at start.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from kitbuild.recipe.launch import DeepSpeed, Fsdp

if TYPE_CHECKING:
    from kitbuild.recipe.models import Recipe

SHARDED_STAGE = 3
MAX_GRAD_NORM = 1.0
"""transformers' own default of `max_grad_norm`; DeepSpeed clips by its own configuration, so both are told the same."""
ONE_BILLION = 1_000_000_000


def launch(recipe: Recipe) -> dict[str, Any]:
    """The launcher's configuration, nothing left to be decided when it starts."""
    cpu = recipe.image.target == "cpu"
    return {
        **recipe.launch.model_dump(mode="json"),
        "world_size": recipe.launch.world_size,
        "accumulation": recipe.accumulation,
        "batch": {"global": recipe.batch.global_, "micro": recipe.batch.micro},
        "backend": "gloo" if cpu else "nccl",
        "use_cpu": cpu,
        "zero_stage": recipe.launch.stage or None,
        "environment": environment(recipe),
        "deepspeed": deepspeed(recipe),
        "fsdp": fsdp(recipe),
    }


def environment(recipe: Recipe) -> dict[str, str]:
    """What `accelerate launch` would set in each worker."""
    cpu, strategy = recipe.image.target == "cpu", recipe.launch.strategy
    # Weights in bfloat16 train under bfloat16 autocast, as TRL does.
    found = {
        "ACCELERATE_MIXED_PRECISION": "bf16" if recipe.model.dtype == "bfloat16" else "no",
        "ACCELERATE_DYNAMO_BACKEND": "no",
    }
    if strategy == "deepspeed":
        # Told ACCELERATE_USE_CPU, Accelerate silently leaves DeepSpeed out:
        # https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/state.py
        return found | {"DS_ACCELERATOR": "cpu" if cpu else "cuda"}
    return found | ({"ACCELERATE_USE_CPU": "true"} if cpu else {})


def deepspeed(recipe: Recipe) -> dict[str, Any] | None:
    """DeepSpeed's whole configuration (https://www.deepspeed.ai/docs/config-json/)."""
    if recipe.launch.strategy != "deepspeed":
        return None
    given = recipe.launch.deepspeed or DeepSpeed()
    return {
        "train_batch_size": recipe.batch.global_,
        "train_micro_batch_size_per_gpu": recipe.batch.micro,
        "gradient_accumulation_steps": recipe.accumulation,
        "gradient_clipping": recipe.train.get("max_grad_norm", MAX_GRAD_NORM),
        "gradient_predivide_factor": 1.0,
        "prescale_gradients": False,
        "bf16": {"enabled": recipe.model.dtype == "bfloat16"},
        "fp16": {"enabled": False},
        "zero_optimization": _zero(recipe.launch.stage, given),
        # The optimizer is torch's. DeepSpeed's own would be compiled when a run starts.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": sys.maxsize,
        "wall_clock_breakdown": False,
        "dump_state": False,
    }


def _zero(stage: int, given: DeepSpeed) -> dict[str, Any]:
    found: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": given.overlap_comm,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": given.reduce_bucket_size,
        "allgather_partitions": True,
        "allgather_bucket_size": given.allgather_bucket_size,
        "round_robin_gradients": False,
        "sub_group_size": ONE_BILLION,
    }
    if given.offload_optimizer:
        found["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if stage == SHARDED_STAGE:
        found |= {
            "stage3_prefetch_bucket_size": given.prefetch_bucket_size,
            "stage3_param_persistence_threshold": given.persistence_threshold,
            "stage3_max_live_parameters": ONE_BILLION,
            "stage3_max_reuse_distance": ONE_BILLION,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
        if given.offload_parameters:
            found["offload_param"] = {"device": "cpu", "pin_memory": True}
    return found


def fsdp(recipe: Recipe) -> dict[str, Any] | None:
    """`fsdp_config` of transformers: FSDP2, torch's `fully_shard`."""
    if recipe.launch.strategy != "fsdp":
        return None
    given = recipe.launch.fsdp or Fsdp()
    return {
        "version": 2,
        "reshard_after_forward": given.reshard_after_forward,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        # Left out, Accelerate takes the model's own list (`_no_split_modules`).
        **({"transformer_layer_cls_to_wrap": list(given.layers)} if given.layers else {}),
        "cpu_offload": given.offload,
        "cpu_ram_efficient_loading": False,
        "state_dict_type": "FULL_STATE_DICT",
        "activation_checkpointing": given.activation_checkpointing,
    }


def accelerator(recipe: Recipe) -> dict[str, Any] | None:
    """`accelerator_config`, where it is not the library's own."""
    if recipe.launch.strategy != "deepspeed" or recipe.image.target != "cpu":
        return None
    # The guest sets the process group up: left to itself, Accelerate runs DeepSpeed on a CPU as if each process were
    # the only one, and gives all of them the same rows.
    return {
        "split_batches": False,
        "dispatch_batches": None,
        "even_batches": True,
        "use_seedable_sampler": True,
        "non_blocking": False,
        "gradient_accumulation_kwargs": None,
        "use_configured_state": True,
    }
