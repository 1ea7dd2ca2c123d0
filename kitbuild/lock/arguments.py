"""Step 2: every SFTConfig argument in force and where it comes from. The one place where they are decided. Pure.

Origins: `recipe` (a key of `train`), `kitbuild` (the table below), `library` (the declared default). The guest
gives SFTConfig those of the first two, and its own directories; nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kitbuild.errors import Problem, RecipeError
from kitbuild.lock import launcher
from kitbuild.lock.models import Argument

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kitbuild.recipe.models import Recipe

# Directories, identities and ranks: facts of a run and not of a recipe.
LEFT_OUT = frozenset({"output_dir", "logging_dir", "run_name", "local_rank", "resume_from_checkpoint", "hub_token"})
# The libraries replace these while they construct, from the device or from what can be imported.
DEVICE_DEPENDENT = frozenset({"dataloader_pin_memory", "optim", "torch_compile_backend"})


class _Leave:
    """The recipe's value or the library's stays."""


LEAVE = _Leave()


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What kitbuild gives an argument and why. `yields`: a recipe may set it otherwise."""

    value: Callable[[Recipe], Any]
    reason: str
    yields: bool = False


def _cpu(recipe: Recipe) -> bool:
    return recipe.image.target == "cpu"


def _save_strategy(recipe: Recipe) -> str:
    return "steps" if "save_steps" in recipe.train else "no"


def _or_leave(value: Any) -> Any:
    return LEAVE if value is None else value


SETTINGS: Mapping[str, Setting] = {
    "per_device_train_batch_size": Setting(value=lambda r: r.batch.micro, reason="batch.micro"),
    "per_device_eval_batch_size": Setting(
        value=lambda r: r.evaluate.batch if r.evaluate else LEAVE, reason="evaluate.batch"
    ),
    "gradient_accumulation_steps": Setting(value=lambda r: r.accumulation, reason="follows from batch and launch"),
    "average_tokens_across_devices": Setting(
        value=lambda _: True, reason="the loss is normalised over all processes, so that their number does not matter"
    ),
    "seed": Setting(value=lambda r: r.seed, reason="seed"),
    "data_seed": Setting(value=lambda r: r.seed, reason="the order of the data follows the same seed"),
    "bf16": Setting(value=lambda r: r.model.dtype == "bfloat16", reason="model.dtype; TRL's own default is on"),
    "fp16": Setting(
        value=lambda _: False, reason="the weights themselves are model.dtype; a scaler refuses float16 gradients"
    ),
    "tf32": Setting(value=lambda _: None, reason="the guest fixes precision before a worker starts"),
    "use_cpu": Setting(value=_cpu, reason="image.cuda; without it SFTConfig raises where there is no GPU"),
    "optim": Setting(
        value=lambda _: "adamw_torch_fused",
        reason="the declared default follows the torch that can be imported; this is what it is for torch 2.8 and later",
        yields=True,
    ),
    "trust_remote_code": Setting(value=lambda r: r.model.trust_remote_code, reason="model.trust_remote_code"),
    "use_liger_kernel": Setting(value=lambda r: r.liger is not None, reason="liger"),
    "liger_kernel_config": Setting(
        value=lambda r: r.liger.model_dump() if r.liger else None, reason="liger; what is left out is off"
    ),
    "dataset_num_proc": Setting(
        value=lambda _: None,
        reason="in the process itself: the number of processes changes the batches when packing (1 starts one more)",
    ),
    "dataloader_pin_memory": Setting(
        value=lambda r: not _cpu(r), reason="the library turns it off on a CPU while it constructs", yields=True
    ),
    "ddp_backend": Setting(
        value=lambda r: LEAVE if r.launch.world_size == 1 else "gloo" if _cpu(r) else "nccl", reason="image.cuda"
    ),
    "ddp_find_unused_parameters": Setting(
        value=lambda r: r.keeps_buckets,
        reason="false: every parameter takes part. Under strict on more than two processes true: without it"
        " DistributedDataParallel orders its buckets anew after the first step, and so after a resume too",
        yields=True,
    ),
    "deepspeed": Setting(
        value=lambda r: _or_leave(launcher.deepspeed(r)),
        reason="launch.strategy; overlapped communication has no fixed order",
    ),
    "fsdp": Setting(value=lambda r: r.launch.strategy == "fsdp" or LEAVE, reason="launch.strategy"),
    "fsdp_config": Setting(value=lambda r: _or_leave(launcher.fsdp(r)), reason="launch.fsdp"),
    "accelerator_config": Setting(
        value=lambda r: _or_leave(launcher.accelerator(r)), reason="DeepSpeed on a CPU would run each process alone"
    ),
    "max_grad_norm": Setting(
        value=lambda r: launcher.MAX_GRAD_NORM if r.launch.strategy == "deepspeed" else LEAVE,
        reason="DeepSpeed clips by its own configuration, which has the same value",
        yields=True,
    ),
    "save_strategy": Setting(
        value=_save_strategy, reason="checkpoints on request (save_steps), and when a run is stopped", yields=True
    ),
    "save_on_each_node": Setting(
        value=lambda r: True if r.launch.nodes > 1 else LEAVE, reason="each node has a run directory of its own"
    ),
    "save_only_model": Setting(value=lambda _: False, reason="a stopped run resumes bit for bit"),
    "ignore_data_skip": Setting(value=lambda _: False, reason="a stopped run resumes bit for bit"),
    "eval_strategy": Setting(value=lambda _: "no", reason="evaluate measures before and after training"),
    "report_to": Setting(value=lambda r: list(r.track) or "none", reason="track"),
    "logging_strategy": Setting(
        value=lambda r: "steps" if r.track else "no",
        reason="metrics.jsonl holds every step; trackers read the log",
        yields=True,
    ),
    "logging_steps": Setting(value=lambda _: 1, reason="a tracker sees every step", yields=True),
    "logging_nan_inf_filter": Setting(
        value=lambda _: False, reason="a loss that is no number is shown as it is", yields=True
    ),
    "disable_tqdm": Setting(value=lambda _: True, reason="the host shows the progress"),
}


def resolve_arguments(
    recipe: Recipe, declared: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, Argument], tuple[str, ...]]:
    """Every argument of the declared SFTConfig, and the names of those that the libraries set from the device.

    A key of the recipe that the locked trainers do not have is a RecipeError (2), all at once.
    """
    fields = declared.get("trl.SFTConfig", {})
    lora = declared.get("peft.LoraConfig", {})
    problems = [*_unknown("train", recipe.train, fields, "SFTConfig"), *_lost(recipe, fields)]
    problems += _unknown("lora", recipe.lora or {}, lora, "LoraConfig")
    if problems:
        raise RecipeError("the locked trainers do not take what the recipe asks for", problems=problems)
    arguments: dict[str, Argument] = {}
    for name in sorted(fields):
        if name not in LEFT_OUT:
            arguments[name] = _argument(name, recipe, fields[name])
    return arguments, tuple(sorted(DEVICE_DEPENDENT & set(fields)))


def _argument(name: str, recipe: Recipe, default: Any) -> Argument:
    setting = SETTINGS.get(name)
    ours = setting.value(recipe) if setting else LEAVE
    if name in recipe.train and (setting is None or setting.yields or ours is LEAVE):
        return Argument(value=recipe.train[name], origin="recipe")
    if ours is not LEAVE:
        return Argument(value=ours, origin="kitbuild")
    return Argument(value=default, origin="library")


def _unknown(section: str, given: Mapping[str, Any], fields: Mapping[str, Any], made_of: str) -> Iterator[Problem]:
    for key in given:
        if key not in fields:
            yield Problem(
                key=f"{section}.{key}",
                message=f"the locked {made_of} has no such key",
                hint="another version of the package (image.packages), or leave the key out",
            )


def _lost(recipe: Recipe, fields: Mapping[str, Any]) -> Iterator[Problem]:
    """What another key of the recipe asks for and these trainers cannot do."""
    if recipe.liger is not None and "use_liger_kernel" not in fields:
        yield Problem(
            key="liger",
            message="the locked SFTConfig has no use_liger_kernel",
            hint="take trl 1.14.2, or `liger: false`",
        )
