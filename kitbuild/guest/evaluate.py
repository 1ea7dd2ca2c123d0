"""Loss and exact match on the held-out split, before and after training. Leaves every random state as it was."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from kitbuild.guest import data, launch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kitbuild.guest.config import Config, Dataset

SHOWN, SHOWN_LENGTH = 3, 200


@contextmanager
def untouched(model: Any) -> Iterator[None]:
    """Evaluation mode and no gradients; random states and mode are put back."""
    import torch

    training = model.training
    states = torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
        torch.set_rng_state(states[0])
        if states[1] is not None:
            torch.cuda.set_rng_state_all(states[1])


@contextmanager
def whole(trainer: Any) -> Iterator[None]:
    """Before training nothing is sharded yet, though the libraries take ZeRO-3 for in force since it was configured."""
    config = getattr(trainer.args, "hf_deepspeed_config", None)
    if config is None:
        yield
        return
    from transformers.integrations import deepspeed

    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed.set_hf_deepspeed_config(config)


class Evaluation:
    """The held-out rows, prepared once and measured twice; ranks share the batches."""

    def __init__(
        self, config: Config, dataset: Dataset, trainer: Any, tokenizer: Any, say: Callable[[str], None]
    ) -> None:
        given = config.recipe["evaluate"]
        rows = data.load(config, dataset)
        self._rows = rows.select(range(min(given["examples"], len(rows))))
        self._batch, self._limit = given.get("batch", 25), given["max_new_tokens"]
        self._trainer, self._tokenizer, self._say = trainer, tokenizer, say
        self._sharded = launch.sharded(config)

    def measure(self, when: str) -> dict[str, Any]:
        """`loss` (exact), `exact_match`, `examples`, and the first answers, `shown`."""
        from accelerate.utils import gather_object

        accelerator = self._trainer.accelerator
        model = accelerator.unwrap_model(self._trainer.model)
        rank, world = accelerator.process_index, accelerator.num_processes
        if self._sharded and when == "after":
            rank, world = 0, 1  # A forward pass needs every rank: all measure everything, in step.
        starts = list(range(0, len(self._rows), self._batch))
        mine = []
        with untouched(model), whole(self._trainer) if when == "before" else nullcontext():
            prepared = self._prepared()
            for index in range(rank, len(starts), world):
                rows = self._rows.select(range(starts[index], min(starts[index] + self._batch, len(self._rows))))
                answers = self._answers(model, rows)
                right = sum(answer["right"] for answer in answers)
                summed = self._loss(model, prepared, starts[index])
                mine.append((index, summed, right, len(answers), answers[:SHOWN] if index < SHOWN else []))
                self._say(f"evaluate {when}: {min(starts[index] + self._batch, len(self._rows))} of {len(self._rows)}")
        found = sorted(gather_object(mine)) if world > 1 else mine
        tokens = sum(item[1][1] for item in found)
        loss = sum(item[1][0] for item in found) / max(tokens, 1)
        asked = sum(item[3] for item in found)
        match = sum(item[2] for item in found) / asked if asked else None
        shown = [answer for item in found for answer in item[4]][:SHOWN]
        return {"loss": loss.hex(), "exact_match": match, "examples": len(self._rows), "shown": shown}

    def _prepared(self) -> list[Any]:
        """The rows as the trainer would see them, not packed; one batch each so that no row moves."""
        args, trainer = self._trainer.args, self._trainer
        shuffle, args.shuffle_dataset = getattr(args, "shuffle_dataset", False), False
        try:
            held = trainer._prepare_dataset(self._rows, self._tokenizer, args, False, None, "evaluate")  # noqa: FBT003, SLF001
        finally:
            args.shuffle_dataset = shuffle
        return [{name: row[name] for name in ("input_ids", "labels")} for row in held]

    def _loss(self, model: Any, prepared: list[Any], start: int) -> tuple[float, int]:
        """Sum of the token losses and how many there are."""
        import torch
        from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

        rows = prepared[start : start + self._batch]
        if not rows:
            return 0.0, 0
        batch = DataCollatorForLanguageModeling(pad_token_id=self._tokenizer.pad_token_id)(rows)
        count = int((batch["labels"][..., 1:] != -100).sum())  # noqa: PLR2004 - the ignored label
        with torch.autocast(model.device.type, torch.bfloat16, enabled=self._trainer.args.bf16):
            out = model(**{name: tensor.to(model.device) for name, tensor in batch.items()}, use_cache=False)
        return float(out.loss.double()) * count, count

    def _answers(self, model: Any, rows: Any) -> list[dict[str, Any]]:
        """The greedy continuations, and whether each is the expected text."""
        import torch

        pairs = [pair for row in rows if (pair := question(row))]
        if not pairs:
            return []
        tokenizer = self._tokenizer
        texts = [self._text(prompt) for prompt, _ in pairs]
        held = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
        held = {name: held[name].to(model.device) for name in ("input_ids", "attention_mask")}
        with torch.autocast(model.device.type, torch.bfloat16, enabled=self._trainer.args.bf16):
            out = model.generate(
                **held, do_sample=False, num_beams=1, temperature=None, top_p=None, top_k=None, use_cache=True,
                max_new_tokens=self._limit, pad_token_id=tokenizer.pad_token_id,
                eos_token_id=_ends(model, tokenizer),
            )  # fmt: skip
        told = tokenizer.batch_decode(out[:, held["input_ids"].shape[1] :], skip_special_tokens=True)
        return [answered(prompt, text, expected) for text, (prompt, expected) in zip(told, pairs, strict=True)]

    def _text(self, prompt: Any) -> str:
        if isinstance(prompt, str):
            return prompt
        return str(self._tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))


def _ends(model: Any, tokenizer: Any) -> list[int]:
    given = model.generation_config.eos_token_id
    held = given if isinstance(given, list) else [given]
    return sorted({item for item in [*held, tokenizer.eos_token_id] if item is not None})


def answered(prompt: Any, answer: str, expected: str) -> dict[str, Any]:
    """What was asked, last, and what was said to it, for the eye: long texts are cut, after they were compared."""
    asked = prompt if isinstance(prompt, str) else str((prompt[-1] if prompt else {}).get("content") or "")
    texts = {"prompt": asked, "answer": answer.strip(), "expected": expected.strip()}
    return {name: text[:SHOWN_LENGTH] for name, text in texts.items()} | {"right": texts["answer"] == texts["expected"]}


def question(row: dict[str, Any]) -> tuple[Any, str] | None:
    """What the model is shown and what it should say; None for a row that asks nothing."""
    if row.get("messages"):
        *prompt, last = row["messages"]
        return (prompt, last["content"]) if prompt and last["role"] == "assistant" else None
    if "prompt" in row and "completion" in row:
        answer = row["completion"]
        return row["prompt"], answer if isinstance(answer, str) else answer[-1]["content"]
    return None
