"""Phase 6: one rank. Model, data, trainer from the lock; what is loaded and used is compared with it; then it trains."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import transformers
from trl import SFTConfig

from kitbuild.errors import RunError
from kitbuild.guest import (
    arguments,
    checkpoints,
    claim,
    data,
    determinism,
    failures,
    kernels,
    launch,
    manifest,
    measure,
    nodes,
    record,
    strategy,
    usage,
    virtual_ranks,
)
from kitbuild.guest import model as models
from kitbuild.guest.callbacks import Begin
from kitbuild.guest.evaluate import Evaluation
from kitbuild.guest.trainer import KitTrainer, Recorder

if TYPE_CHECKING:
    from kitbuild.guest.config import Config


class Worker:
    """What a rank carries from phase to phase."""

    def __init__(
        self,
        config: Config,
        terminal: record.Terminal,
        stop: launch.Stop,
        *,
        started: float,
        mode: str,
        parent: int,
        found: checkpoints.Checkpoint | None = None,
    ) -> None:
        self.config, self.terminal, self.stop, self.mode, self.started = config, terminal, stop, mode, started
        self.parent, self.found = parent, found
        self.rank, self.trained = 0, False
        self.calls: Counter[str] = Counter()
        self.begin = Begin(config, self.calls)
        self.seconds: dict[str, float] = {}
        self.status = record.Status(config.places.out)

    def run(self) -> None:
        """A rank's whole life; leaves a result or an error for the process that started it."""
        launch.enter_worker(self.parent)
        self.stop.listen()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self.rank = int(os.environ.get("RANK", "0"))
        places = self.config.places
        self.terminal.capture(places.out / "logs" / f"rank-{self.rank}.log")
        try:
            result = self.work()
        except Exception as error:  # noqa: BLE001 - any error becomes a message and exit 6
            record.trace()
            known = failures.classify(error)
            told = {"code": known.code, "message": known.message, "hint": known.hint, "time": time.time()}
            record.write_json(places.scratch / f"error-{self.rank}.json", told)
            sys.exit(1)
        record.write_json(places.scratch / f"result-{self.rank}.json", result)

    def phase(self, name: str, message: str) -> None:
        """Say where the run is."""
        self.stop.check(name)
        if self.rank == 0:
            self.status.write(name, message)
            self.terminal.say(f"{name}: {message}")

    def work(self) -> dict[str, Any]:
        """Set-up, training, record, in this order."""
        config = self.config
        strategy.enter(config)
        determinism.apply_flags(config)
        transformers.set_seed(config.seed)
        clock = time.perf_counter()
        self.phase("load", f"model, attention {config.attention} (recipe)")
        tokenizer, model, replaced = models.load(config, self.calls)
        self.seconds["load"] = time.perf_counter() - clock
        if self.mode == "selftest":
            return {"kernels": [str(kernel) for kernel in config.kernels]}
        clock = time.perf_counter()
        self.phase("load", "data and trainer")
        trainer = self.trainer(tokenizer, model)
        self.seconds["data"] = time.perf_counter() - clock
        proven = strategy.proven(config, trainer, rank=self.rank)
        uneven = strategy.uneven(config, len(trainer.train_dataset))
        if uneven and self.rank == 0:
            self.terminal.say(uneven)
        trainer.add_callback(strategy.Proof(config, trainer, proven))
        determinism.check(config, when="while the trainer was set up")
        self.compare(None)
        return self.train(trainer, tokenizer, proven, replaced)

    def trainer(self, tokenizer: Any, model: Any) -> KitTrainer:
        """The trainer from the lock's values, and those of ours that follow from it."""
        config = self.config
        arguments.check_defaults(config)
        args = SFTConfig(**arguments.given(config))
        arguments.check(config, args)
        if os.environ.get(nodes.SHARED):
            args.save_on_each_node = False
        peft = None
        if config.recipe.get("lora"):
            from peft import LoraConfig

            peft = LoraConfig(**{"task_type": "CAUSAL_LM", **config.recipe["lora"]})
        held = {**claim.mark(config), "device": manifest.identity(config), "evaluate_before": None, "resumed": []}
        rows = data.training_rows(config)
        if data.conversational(rows) and not tokenizer.chat_template:
            text = "the data are conversations and the tokenizer has no chat template"
            raise RunError(text, hint="name one with model.chat_template")
        deal = virtual_ranks.Deal.of(config, self.rank)
        recorder = (virtual_ranks.VirtualRecorder if deal else Recorder)(
            metrics=record.Metrics(config.places.out / "metrics.jsonl"),
            stop=self.stop, progress=self.progress, kept=held, first=self.rank == 0, started=self.started,
            save_seconds=checkpoints.seconds_between(config), keep=checkpoints.kept(config),
        )  # fmt: skip
        kind = partial(virtual_ranks.VirtualTrainer, deal=deal) if deal else KitTrainer
        trainer: KitTrainer = kind(
            recorder=recorder, tracked=bool(config.recipe.get("track")), model=model, args=args,
            train_dataset=rows, processing_class=tokenizer, peft_config=peft,
        )  # fmt: skip
        if not len(trainer.train_dataset):
            text = f"none of the {len(rows)} rows has a token to learn from within max_length"
            raise RunError(text, hint="raise train.max_length, or look at what assistant_only_loss masks")
        trainer.add_callback(self.begin)
        return trainer

    def train(self, trainer: KitTrainer, tokenizer: Any, proven: dict[str, Any], replaced: Any) -> dict[str, Any]:
        """Evaluate, train, compare, save, evaluate."""
        config, recorder = self.config, trainer.recorder
        evaluation = Evaluation(config, config.evaluate, trainer, tokenizer, self.say) if config.evaluate else None
        resumed, held = self.resumed(trainer)
        if evaluation and recorder.kept["evaluate_before"] is None:
            self.phase("evaluate", "before training")
            recorder.kept["evaluate_before"] = self.timed("evaluate_before", lambda: evaluation.measure("before"))
        calls_before = Counter(self.calls)
        calls_before.subtract(held)
        recorder.calls = lambda: self.since(calls_before)
        self.phase("train", f"{len(trainer.train_dataset)} rows" + (f", from step {recorder.step}" if resumed else ""))
        recorder.clock, recorder.saved = time.perf_counter(), time.monotonic()
        self.timed("train", lambda: trainer.train(resume_from_checkpoint=resumed))
        recorder.flush()
        self.trained = True
        used = recorder.calls()
        determinism.check(config, when="while training")
        result = {
            "stopped": recorder.stopped, "steps_done": recorder.step, "steps": trainer.state.max_steps,
            "calls": used, "loaded": sorted(kernels.loaded_files().values()), "proven": proven, "seconds": self.seconds, "resumed": recorder.kept["resumed"],
            "evaluate": {"metric": "exact_match", "before": recorder.kept["evaluate_before"], "after": None} if evaluation else None,
        }  # fmt: skip
        self.seconds["first_step"] = recorder.first_step_seconds or 0.0
        if self.rank == 0:
            result |= self.facts(trainer, replaced)
        self.compare(used if recorder.step else None)
        if config.measure and not recorder.stopped:
            result["measured"] = measure.measured(config, trainer.model)
        if recorder.stopped or config.measure:
            return result
        if evaluation:
            self.status.write("evaluate", "after training")
            result["evaluate"]["after"] = self.timed("evaluate_after", lambda: evaluation.measure("after"))
        self.status.write("record", "saving the model")
        self.timed("save", lambda: models.save(config, trainer, tokenizer, first=self.rank == 0))
        if self.rank == 0:
            result["weights"] = manifest.weights(config.places.out / "model")
        return result

    def compare(self, used: dict[str, int] | None) -> None:
        """What is loaded and, after training, used, with the lock."""
        kernels.compare(self.config, used)
        if used is not None:
            usage.check_attention(self.config, used)
            usage.check_liger(self.config.recipe.get("liger") or {}, used)

    def since(self, before: Counter[str]) -> dict[str, int]:
        """The kernels' calls since then."""
        used = Counter(self.calls)
        used.subtract(before)
        return dict(used)

    def resumed(self, trainer: KitTrainer) -> tuple[str | None, dict[str, int]]:
        """The checkpoint to continue from, and the kernels' calls up to it; metrics are cut back to its step."""
        config, recorder = self.config, trainer.recorder
        found = trainer.agreed(self.found) if config.launch.nodes > 1 else self.found
        if found is None:
            if recorder.first:
                recorder.metrics.start()
            return None, {}
        recorder.kept |= {"evaluate_before": found.mark["evaluate_before"], "resumed": found.resumed}
        claim.same_device(config, found, recorder.kept["device"])
        recorder.step = recorder.saved_step = found.step
        if trainer.args.should_save:
            checkpoints.drop_after(found)
        if recorder.first:
            recorder.metrics.resume(found.step, found.folder / checkpoints.METRICS)
        missing = [name for name in trainer.own_files(self.rank) if not (found.folder / name).is_file()]
        if missing:  # Transformers would go on with other random numbers, and say so in a log.
            text = f"{found.folder.name} lacks {', '.join(missing)} of rank {self.rank}"
            raise RunError(text, hint="start a new run")
        calls = found.folder / checkpoints.calls(self.rank)
        return str(found.folder), json.loads(calls.read_bytes()) if calls.is_file() else {}

    def facts(self, trainer: KitTrainer, replaced: Any) -> dict[str, Any]:
        """What only a worker can tell the archive."""
        config = self.config
        liger = config.recipe.get("liger")
        return {
            "device": manifest.device(config),
            "build": manifest.build(),
            "settings": determinism.state(config),
            "arguments": arguments.resolved(trainer.args),
            "attention": {
                "requested": (config.recipe.get("kernels") or {}).get("attention", "sdpa"),
                "used": models.attention_of(trainer.model),
            },
            "liger": {"options": liger, "patched": self.begin.patched} if liger else None,
            "layers": sorted({type(module).__name__ for module, _, _ in replaced}),
            "rows": len(trainer.train_dataset),
        }

    def timed(self, name: str, work: Any) -> Any:
        """Do it and keep how long it took."""
        clock = time.perf_counter()
        value = work()
        self.seconds[name] = time.perf_counter() - clock
        return value

    def say(self, text: str) -> None:
        """One line from the first rank; before training, a place to stop."""
        if not self.trained:
            self.stop.check("evaluate")
        if self.rank == 0:
            self.terminal.say(text, every_seconds=5)

    def progress(self, line: dict[str, Any], steps: int) -> None:
        """status.json and the terminal, after a step was written."""
        seconds = max(line["seconds"], 1e-9)
        left = (steps - line["step"]) * seconds
        speed = line["tokens"] / seconds
        final = line["step"] >= steps
        if self.status.due() or final:
            self.status.write(
                "train", step=line["step"], steps=steps, loss=line["loss"], tokens_per_second=speed, seconds_left=left
            )
        every = 0.0 if final or line["step"] == 1 else 5.0
        self.terminal.say(
            f"step {line['step']}/{steps} loss {line['loss']:.4f} {speed:,.0f} tokens/s, {left:.0f} s left",
            every_seconds=every,
        )
