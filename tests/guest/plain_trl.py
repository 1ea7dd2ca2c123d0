"""The same training with TRL's own SFTTrainer and nothing of ours: run by test_plain_trl with the training Python."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from trl import SFTConfig, SFTTrainer

root, out = Path(sys.argv[1]), Path(sys.argv[2])
lock: dict[str, Any] = json.loads((root / "kit/lock.json").read_bytes())
torch.set_num_threads(lock["recipe"]["launch"]["threads_per_process"])
torch.use_deterministic_algorithms(mode=True)
transformers.set_seed(lock["recipe"]["seed"])
steps: list[float] = []


class Plain(SFTTrainer):  # type: ignore[misc]
    """TRL's trainer; what each micro-batch returns is added up, as it was differentiated."""

    held = torch.zeros(())

    def training_step(self, *arguments: Any, **named: Any) -> Any:
        loss = super().training_step(*arguments, **named)
        self.held = self.held + loss.float().cpu()
        return loss


class Steps(transformers.TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, *_arguments: Any, **_named: Any) -> None:
        steps.append(trainer.held.item())
        trainer.held = torch.zeros(())


kept = lock["defaults"]["arguments"]
given = {name: item["value"] for name, item in kept.items() if item["origin"] != "library"}
arguments = SFTConfig(output_dir=str(out), **{**given, "logging_strategy": "steps", "logging_steps": 1})
model = transformers.AutoModelForCausalLM.from_pretrained(
    root / "inputs/model", attn_implementation="sdpa", dtype=getattr(torch, lock["recipe"]["model"]["dtype"])
)
rows = datasets.load_dataset("json", data_files=str(root / "inputs/data/0/chats.jsonl"), split="train")
trainer = Plain(
    model=model,
    args=arguments,
    train_dataset=rows,
    processing_class=transformers.AutoTokenizer.from_pretrained(root / "inputs/model"),
    callbacks=[Steps()],
)
trainer.train()
norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
print(
    json.dumps({"loss": steps, "grad_norm": [float(norm) for norm in norms], "threads": os.environ["OMP_NUM_THREADS"]})
)
