"""Step 1: keys of the trainers that a recipe does not take, each with what to use instead.

Rendered in docs/recipe.md. A key is here because kitbuild sets it from another key of the recipe, because it would
reach out of the image, or because the promise of equal bits depends on its value.
"""

from __future__ import annotations

_LAUNCH = "use launch.strategy"
_EVALUATE = "use evaluate: it measures before and after training"
_TRACK = "use track; every tracker is offline"
_HUB = "training has no network: upload the run's model/ afterwards"
_DTYPE = "use model.dtype"
_RESUME = "fixed: a stopped run resumes bit for bit"

TRAIN_OWNED = {
    "output_dir": "use `kitbuild run --out`",
    "per_device_train_batch_size": "use batch.micro",
    "per_device_eval_batch_size": "use evaluate.batch",
    "gradient_accumulation_steps": "use batch.global: accumulation follows from it",
    "auto_find_batch_size": "use batch.micro: a size found at run time cannot be repeated",
    "average_tokens_across_devices": "fixed at true: the loss is normalised over all processes",
    "use_liger_kernel": "use liger",
    "liger_kernel_config": "use liger",
    "report_to": _TRACK,
    "run_name": "use name",
    "project": "use name",
    "trackio_space_id": _TRACK,
    "trackio_bucket_id": _TRACK,
    "trackio_static_space_id": _TRACK,
    "logging_dir": "use `kitbuild run --out`",
    "log_level": "`kitbuild run` shows progress, and logs/ holds everything",
    "log_level_replica": "`kitbuild run` shows progress, and logs/ holds everything",
    "log_on_each_node": "every rank has its own file in logs/",
    "disable_tqdm": "`kitbuild run` shows progress",
    "dataset_num_proc": "fixed: in the process itself, for the number of processes changes the batches when packing",
    "seed": "use seed, at the top of the recipe",
    "data_seed": "use seed, at the top of the recipe",
    "full_determinism": "use determinism",
    "tf32": "use determinism: precision is fixed before a worker starts",
    "deepspeed": _LAUNCH,
    "fsdp": _LAUNCH,
    "fsdp_config": _LAUNCH,
    "fsdp_min_num_params": _LAUNCH,
    "fsdp_transformer_layer_cls_to_wrap": _LAUNCH,
    "accelerator_config": _LAUNCH,
    "parallelism_config": _LAUNCH,
    "ddp_backend": "image.cuda decides: nccl on GPUs, gloo on a CPU",
    "local_rank": "use launch",
    "bf16": _DTYPE,
    "fp16": _DTYPE,
    "bf16_full_eval": _DTYPE,
    "fp16_full_eval": _DTYPE,
    "use_cpu": "use image.cuda: cpu",
    "no_cuda": "use image.cuda: cpu",
    "resume_from_checkpoint": "use `kitbuild run --resume`",
    "save_only_model": _RESUME,
    "ignore_data_skip": _RESUME,
    "restore_callback_states_from_checkpoint": _RESUME,
    "enable_jit_checkpoint": "a stopped run saves a checkpoint at the step boundary by itself",
    "save_on_each_node": "fixed: each node has a run directory of its own, with its own checkpoints",
    "push_to_hub": _HUB,
    "push_to_hub_token": _HUB,
    "hub_token": _HUB,
    "hub_private_repo": _HUB,
    "hub_model_id": _HUB,
    "hub_strategy": _HUB,
    "hub_always_push": _HUB,
    "hub_revision": _HUB,
    "model_init_kwargs": "use model and kernels.attention",
    "chat_template_path": "use model.chat_template",
    "trust_remote_code": "use model.trust_remote_code and policy.remote_code",
    "do_train": "`kitbuild run` trains",
    "do_eval": _EVALUATE,
    "do_predict": _EVALUATE,
    "eval_strategy": _EVALUATE,
    "evaluation_strategy": _EVALUATE,
    "eval_steps": _EVALUATE,
    "eval_delay": _EVALUATE,
    "eval_on_start": _EVALUATE,
    "eval_packing": _EVALUATE,
    "eval_do_concat_batches": _EVALUATE,
    "eval_use_gather_object": _EVALUATE,
    "eval_accumulation_steps": _EVALUATE,
    "prediction_loss_only": _EVALUATE,
    "include_for_metrics": _EVALUATE,
    "batch_eval_metrics": _EVALUATE,
    "load_best_model_at_end": _EVALUATE,
    "metric_for_best_model": _EVALUATE,
    "greater_is_better": _EVALUATE,
    "pad_token": "deprecated in TRL: set it in the tokenizer",
}

_OBJECT = "PEFT wants an object here that a recipe cannot hold"
LORA_OWNED = {
    "task_type": "fixed at CAUSAL_LM",
    "peft_type": "fixed at LORA",
    "base_model_name_or_path": "use model",
    "revision": "use model.revision",
    "auto_mapping": "use model",
    "peft_version": "use image.packages",
    "inference_mode": "fixed at false: it trains",
    "runtime_config": _OBJECT,
    "eva_config": _OBJECT,
    "corda_config": _OBJECT,
    "lora_ga_config": _OBJECT,
    "velora_config": _OBJECT,
    "monteclora_config": _OBJECT,
    "use_bdlora": _OBJECT,
    "arrow_config": _OBJECT,
    "kasa_config": _OBJECT,
    "megatron_config": _OBJECT,
    "megatron_core": _OBJECT,
}

# Names of other versions and tools, with the name that the tested set has.
TRAIN_RENAMED = {
    "max_seq_length": "max_length",
    "seq_length": "max_length",
    "warmup_ratio": "warmup_steps; a value below 1 is a share of all steps",
    "lr": "learning_rate",
    "epochs": "num_train_epochs",
    "steps": "max_steps",
    "group_by_length": "train_sampling_strategy: group_by_length",
    "attn_implementation": "kernels.attention, at the top of the recipe",
    "dtype": "model.dtype, at the top of the recipe",
    "torch_dtype": "model.dtype, at the top of the recipe",
    "model_name_or_path": "model.repo, at the top of the recipe",
    "dataset_name": "dataset.repo, at the top of the recipe",
    "per_gpu_train_batch_size": "batch.micro, at the top of the recipe",
    "use_peft": "lora, at the top of the recipe",
    "overwrite_output_dir": "nothing: every run has a directory of its own",
}
LORA_RENAMED = {"rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout"}
