"""Phase 6: one rank. Model, data, trainer from the lock; what is loaded and used is compared with it; then it trains."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import sys
import time
import traceback
from collections import Counter
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
import transformers
from trl import SFTConfig

from kitbuild.errors import KitbuildError, RecipeError, RunError, VerificationError
from kitbuild.guest import data, determinism, kernels, launch, manifest, record, selftest
from kitbuild.guest.evaluate import Evaluation
from kitbuild.guest.trainer import KitTrainer, Recorder, last_checkpoint

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


class LigerPatched(transformers.TrainerCallback):  # type: ignore[misc]
    """Liger is patched in when training begins; that it was is seen before the first step."""

    def on_train_begin(self, *_arguments: Any, model: Any, **_named: Any) -> None:
        """Refuse to train without what the recipe asks for."""
        if not kernels.liger_patched(model):
            hint = "this model has no Liger patch; set liger: false"
            raise RunError("Liger is in the recipe and nothing of it is in the model", hint=hint)


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
    ) -> None:
        self.config, self.terminal, self.stop, self.mode, self.started = config, terminal, stop, mode, started
        self.parent = parent
        self.rank, self.trained = 0, False
        self.calls: Counter[str] = Counter()
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
            traceback.print_exc()
            known = classify(error)
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
        if config.launch.world_size == 1:
            # As without a launcher: no process group, no DistributedDataParallel around the model.
            for name in DISTRIBUTED:
                os.environ.pop(name, None)
        elif config.cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        determinism.apply_flags(config)
        transformers.set_seed(config.seed)
        clock = time.perf_counter()
        tokenizer, model, replaced = self.load()
        self.seconds["load"] = time.perf_counter() - clock
        if self.mode == "selftest":
            return {"kernels": [str(kernel) for kernel in config.kernels]}
        clock = time.perf_counter()
        self.phase("load", "data and trainer")
        trainer = self.trainer(tokenizer, model)
        self.seconds["data"] = time.perf_counter() - clock
        proven = self.proven(trainer)
        determinism.check(config, when="while the trainer was set up")
        kernels.compare(config, None)
        return self.train(trainer, tokenizer, proven, replaced)

    def load(self) -> tuple[Any, Any, Any]:
        """Tokenizer and model on locked kernels, each kernel tested in the model's own shape."""
        config, places = self.config, self.config.places
        self.phase("load", f"model, attention {config.attention} (recipe)")
        local = {"local_files_only": True, "trust_remote_code": bool(config.recipe["model"].get("trust_remote_code"))}
        tokenizer = transformers.AutoTokenizer.from_pretrained(config.tokenizer_folder, **local)
        template = places.inputs / "chat_template.jinja"
        if template.exists():
            tokenizer.chat_template = template.read_text()
        module = kernels.load_attention(config, self.calls)
        folder = places.inputs / "model"
        if config.has_weights:
            settings = transformers.AutoConfig.from_pretrained(folder, **local)
        else:
            given = dict(config.raw["model"]["config"])
            settings = transformers.AutoConfig.for_model(given.pop("model_type"), **given)
        if module is not None:
            selftest.attention(config, module, shape(settings))
        dtype = getattr(torch, config.recipe["model"]["dtype"])
        chosen = {"attn_implementation": config.attention, "dtype": dtype}
        if config.has_weights:
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, **local, **chosen)
        else:
            # On the CPU whatever trains: the same first weights on every device.
            model = transformers.AutoModelForCausalLM.from_config(settings, **chosen)
        if config.cuda:
            model = model.to("cuda")
        model.train()
        replaced = kernels.kernelize_layers(model, config, self.calls)
        selftest.layers(config, replaced)
        return tokenizer, model, replaced

    def trainer(self, tokenizer: Any, model: Any) -> KitTrainer:
        """The trainer from the lock's values, and those of ours that follow from it."""
        config = self.config
        check_defaults(config)
        args = SFTConfig(**arguments(config))
        check_arguments(config, args)
        peft = None
        if config.recipe.get("lora"):
            from peft import LoraConfig

            peft = LoraConfig(**{"task_type": "CAUSAL_LM", **config.recipe["lora"]})
        held = {
            "world_size": config.launch.world_size,
            "content_sha256": config.raw["content_sha256"],
            "evaluate_before": None,
        }
        rows = data.training_rows(config)
        if data.conversational(rows) and not tokenizer.chat_template:
            text = "the data are conversations and the tokenizer has no chat template"
            raise RunError(text, hint="name one with model.chat_template")
        recorder = Recorder(
            metrics=record.Metrics(config.places.out / "metrics.jsonl"),
            stop=self.stop, progress=self.progress, kept=held, first=self.rank == 0, started=self.started,
        )  # fmt: skip
        trainer = KitTrainer(
            recorder=recorder, tracked=bool(config.recipe.get("track")), model=model, args=args,
            train_dataset=rows, processing_class=tokenizer, peft_config=peft,
        )  # fmt: skip
        if config.recipe.get("liger"):
            trainer.add_callback(LigerPatched())
        return trainer

    def proven(self, trainer: KitTrainer) -> dict[str, Any]:
        """What the rank really runs as; asked for and silently not done is an error."""
        accelerator = trainer.accelerator
        kind = str(accelerator.distributed_type).rpartition(".")[2]
        config = self.config
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
            "rank": self.rank,
            "distributed_type": kind,
            "device": str(accelerator.device),
            "threads": torch.get_num_threads(),
        }

    def train(self, trainer: KitTrainer, tokenizer: Any, proven: dict[str, Any], replaced: Any) -> dict[str, Any]:
        """Evaluate, train, compare, save, evaluate."""
        config, recorder = self.config, trainer.recorder
        evaluation = Evaluation(config, config.evaluate, trainer, tokenizer, self.say) if config.evaluate else None
        resumed = self.resumed(recorder)
        if evaluation and recorder.kept["evaluate_before"] is None:
            self.phase("evaluate", "before training")
            recorder.kept["evaluate_before"] = self.timed("evaluate_before", lambda: evaluation.measure("before"))
        calls_before = Counter(self.calls)
        self.phase("train", f"{len(trainer.train_dataset)} rows" + (f", from step {recorder.step}" if resumed else ""))
        recorder.clock, begun = time.perf_counter(), recorder.step
        self.timed("train", lambda: trainer.train(resume_from_checkpoint=resumed))
        recorder.flush()
        self.trained = True
        used = Counter(self.calls)
        used.subtract(calls_before)
        determinism.check(config, when="while training")
        result = {
            "stopped": recorder.stopped, "steps_done": recorder.step, "steps": trainer.state.max_steps,
            "calls": dict(used), "proven": proven, "seconds": self.seconds,
            "evaluate": {"metric": "exact_match", "before": recorder.kept["evaluate_before"], "after": None} if evaluation else None,
        }  # fmt: skip
        self.seconds["first_step"] = recorder.first_step_seconds or 0.0
        if self.rank == 0:
            result |= self.facts(trainer, replaced)
        kernels.compare(config, used if recorder.step > begun else None)
        if recorder.stopped:
            return result
        if evaluation:
            self.status.write("evaluate", "after training")
            result["evaluate"]["after"] = self.timed("evaluate_after", lambda: evaluation.measure("after"))
        self.timed("save", lambda: self.save(trainer, tokenizer))
        if self.rank == 0:
            result["weights"] = manifest.weights(config.places.out / "model")
        return result

    def resumed(self, recorder: Recorder) -> str | None:
        """The checkpoint to continue from; metrics are cut back to its step."""
        config = self.config
        found = last_checkpoint(config.places.checkpoints) if config.resume else None
        if found is None:
            if config.resume:
                raise RunError("there is no whole checkpoint to resume from", hint="start it again without --resume")
            if recorder.first:
                recorder.metrics.start()
            return None
        folder, mark = found
        for name in ("world_size", "content_sha256"):
            if mark[name] != recorder.kept[name]:
                raise RunError(
                    f"the checkpoint has {name} {mark[name]}, the lock {recorder.kept[name]}",
                    hint="resume with the run's own lock",
                )
        recorder.kept["evaluate_before"] = mark["evaluate_before"]
        recorder.step = mark["step"]
        if recorder.first:
            recorder.metrics.resume(recorder.step)
        return str(folder)

    def facts(self, trainer: KitTrainer, replaced: Any) -> dict[str, Any]:
        """What only a worker can tell the archive."""
        config = self.config
        liger = config.recipe.get("liger")
        return {
            "device": manifest.device(config),
            "build": manifest.build(),
            "arguments": resolved(trainer.args),
            "attention": {
                "requested": (config.recipe.get("kernels") or {}).get("attention", "sdpa"),
                "used": attention_of(trainer.model),
            },
            "liger": {"options": liger, "patched": kernels.liger_patched(trainer.model)} if liger else None,
            "layers": sorted({type(module).__name__ for module, _, _ in replaced}),
            "rows": len(trainer.train_dataset),
        }

    def save(self, trainer: KitTrainer, tokenizer: Any) -> None:
        """Full weights as safetensors; an adapter is kept beside the merged model."""
        folder, config = self.config.places.out / "model", self.config
        self.status.write("record", "saving the model")
        if config.launch.strategy != "ddp":
            trainer.save_model(str(folder))
        elif self.rank == 0:
            model = trainer.accelerator.unwrap_model(trainer.model)
            if config.recipe.get("lora"):
                model.save_pretrained(str(config.places.out / "adapter"))
                model = model.merge_and_unload()
            # The kernel is named in the archive; a model folder must load where the kernel is not.
            model.config._attn_implementation_internal = None  # noqa: SLF001
            model.save_pretrained(str(folder))
            tokenizer.save_pretrained(str(folder))

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


def attention_of(model: Any) -> str:
    """The attention implementation in force."""
    return str(model.config._attn_implementation)  # noqa: SLF001 - there is no public name


def shape(settings: Any) -> dict[str, int]:
    """Heads and width of the model's attention."""
    text = settings.get_text_config()
    heads = text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    return {"heads": heads, "kv_heads": getattr(text, "num_key_value_heads", None) or heads, "head_dim": width}


def arguments(config: Config) -> dict[str, Any]:
    """SFTConfig's arguments: what the lock decided, and where checkpoints go here."""
    locked = config.raw["defaults"]["arguments"]
    given = {name: item["value"] for name, item in locked.items() if item["origin"] != "library"}
    if not config.locked:
        known = {item.name for item in dataclasses.fields(SFTConfig)}
        given = {name: value for name, value in given.items() if name in known}
    return {**given, "output_dir": str(config.places.checkpoints)}


def check_arguments(config: Config, args: SFTConfig) -> None:
    """What the lock decided against what is in force after the library's own resolution (exit 7)."""
    allowed, wrong = set(config.raw["defaults"]["device_dependent"]), []
    for name, item in config.raw["defaults"]["arguments"].items():
        wanted, found = item["value"], plain(getattr(args, name, item["value"]))
        scalar = isinstance(wanted, bool | int | float | str) and isinstance(found, type(wanted))
        if scalar and item["origin"] != "library" and name not in allowed and wanted != found:
            wrong.append(f"{name} is {found!r}, the lock says {wanted!r}")
    if wrong:
        raise VerificationError(f"arguments in force are not the locked ones: {'; '.join(wrong)}", hint="lock again")


def check_defaults(config: Config) -> None:
    """The declared defaults in force against the lock's (exit 7): another library would train otherwise."""
    declared = config.raw["defaults"]["declared"].get("trl.SFTConfig")
    if not declared or not config.locked:
        return
    allowed = set(config.raw["defaults"]["device_dependent"])
    wrong = []
    for item in dataclasses.fields(SFTConfig):
        if item.name not in declared or item.name in allowed or item.default is dataclasses.MISSING:
            continue
        here, there = plain(item.default), declared[item.name]
        # Where the lock holds source text, the value is not a literal and cannot be compared.
        if here != there and not (isinstance(there, str) and not isinstance(item.default, str)):
            wrong.append(f"{item.name} defaults to {here!r}, the lock says {there!r}")
    if wrong:
        raise VerificationError(
            f"the trainer's defaults are not the locked ones: {'; '.join(wrong)}", hint="build the image again"
        )


def plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, Enum):
        return plain(value.value)
    return json.loads(json.dumps(value, default=str))


def resolved(args: SFTConfig) -> dict[str, Any]:
    """Every argument in force, less this machine's places."""
    held = plain(args.to_dict())
    return {
        name: value for name, value in sorted(held.items()) if name not in ("output_dir", "logging_dir", "run_name")
    }


def classify(error: BaseException) -> KitbuildError:
    """A library's error as one of ours: a fact, and what to do."""
    if isinstance(error, KitbuildError):
        return error
    text = str(error)
    first = text.strip().splitlines()[0][:500] if text.strip() else type(error).__name__
    out_of_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in text
    if out_of_memory or "CUDA out of memory" in text:
        return RunError(
            f"out of memory: {first}", hint="lower batch.micro or train.max_length, or use gradient_checkpointing"
        )
    if "deterministic" in text and isinstance(error, RuntimeError):
        return RecipeError(
            f"determinism: strict cannot be kept: {first}", hint="another attention or layer, or determinism: record"
        )
    # safetensors and torch tell it in words of their own.
    if (isinstance(error, OSError) and error.errno == errno.ENOSPC) or "No space left on device" in text:
        return RunError(
            "no space left on the device while training", hint="free space for the run directory, then resume"
        )
    return RunError(
        f"training failed: {type(error).__name__}: {first}",
        hint="the traceback is in logs/rank-0.log of the run directory",
    )
