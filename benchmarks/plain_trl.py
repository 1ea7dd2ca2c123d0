"""Plain TRL with a lock's arguments and nothing of kitbuild, timed step by step: what a run of ours stands beside.

PYTHON benchmarks/plain_trl.py LOCK FOLDER      # FOLDER: the recipe's; PYTHON: one with torch and trl
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-not-found,unused-ignore]
import torch  # type: ignore[import-not-found,unused-ignore] # noqa: TID251 - this is the other side
import transformers  # type: ignore[import-not-found,unused-ignore] # noqa: TID251
import trl  # type: ignore[import-not-found,unused-ignore] # noqa: TID251

lock: dict[str, Any] = json.loads(Path(sys.argv[1]).read_bytes())
folder, recipe, seconds = Path(sys.argv[2]), lock["recipe"], []
known = {field.name for field in dataclasses.fields(trl.SFTConfig)}
locked = lock["defaults"]["arguments"]
given = {name: item["value"] for name, item in locked.items() if item["origin"] != "library" and name in known}


class Clock(transformers.TrainerCallback):  # type: ignore[misc]
    """Seconds from one step's end to the next, as our own record has them."""

    last = 0.0

    def on_train_begin(self, *_arguments: Any, **_named: Any) -> None:
        """From here."""
        self.last = time.perf_counter()

    def on_step_end(self, *_arguments: Any, **_named: Any) -> None:
        """To here."""
        now = time.perf_counter()
        seconds.append(now - self.last)
        self.last = now


transformers.set_seed(recipe["seed"])
config = dict(lock["model"]["config"])
settings = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
chosen = {"attn_implementation": recipe["kernels"]["attention"], "dtype": getattr(torch, recipe["model"]["dtype"])}
with tempfile.TemporaryDirectory() as out, torch.device("cuda"):
    model = transformers.AutoModelForCausalLM.from_config(settings, **chosen)
    with torch.device("cpu"):
        trainer = trl.SFTTrainer(
            model=model,
            args=trl.SFTConfig(output_dir=out, **given),
            train_dataset=datasets.load_dataset(
                "json", data_files=str(folder / recipe["dataset"][0]["path"]), split="train"
            ),
            processing_class=transformers.AutoTokenizer.from_pretrained(folder / "tokenizer"),
            callbacks=[Clock()],
        )
        trainer.train()
print(json.dumps({"seconds": seconds, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}))
