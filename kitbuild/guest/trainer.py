"""TRL's SFTTrainer, with each step's exact values taken from where they are made.

Values stay on the device and are read one step late, so that recording makes no extra synchronisation.
"""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import Trainer
from trl import SFTTrainer

from kitbuild.guest import checkpoints, record
from kitbuild.guest.data import KEY, Recorded

if TYPE_CHECKING:
    from collections.abc import Callable

    from kitbuild.guest.launch import Stop

STOP, SAVE = 1, 2  # bits of the byte that ranks show each other with each step
RECORD_BYTES = 40  # sha256 and a token count


@dataclass(kw_only=True)
class Recorder:
    """Collects what a step is made of; the first rank writes it."""

    metrics: record.Metrics
    stop: Stop
    progress: Callable[[dict[str, Any], int], None]
    kept: dict[str, Any]
    first: bool
    started: float
    batches: list[bytes] = field(default_factory=list)
    losses: list[Any] = field(default_factory=list)
    pending: dict[str, Any] | None = None
    step: int = 0
    steps: int = 0
    stopping: bool = False
    stopped: bool = False
    saving: bool = False
    save_seconds: float | None = None
    saved: float = field(default_factory=time.monotonic)
    saved_step: int = 0
    keep: int | None = None
    calls: Callable[[], dict[str, int]] = dict
    first_step_seconds: float | None = None
    clock: float = 0.0

    def end_step(self, trainer: Any, grad_norm: Any, learning_rate: float) -> None:
        """Take the values of the step that just ended, still on the device; write those of the one before."""
        accelerator = trainer.accelerator
        world, device = accelerator.num_processes, accelerator.device
        losses = self.scaled(torch.stack(self.losses).float(), world)
        flags = STOP * self.stop.requested | SAVE * self.save_due
        held = torch.frombuffer(bytearray(b"".join(self.batches) + bytes([flags])), dtype=torch.uint8)
        if world > 1:
            losses = accelerator.gather(losses[None])
            held = accelerator.gather(held.to(device)[None])
        now = time.perf_counter()
        taken = {
            "step": trainer.state.global_step,
            "losses": losses,
            "held": held,
            "grad_norm": grad_norm.detach() if isinstance(grad_norm, torch.Tensor) else grad_norm,
            "learning_rate": learning_rate,
            "seconds": now - self.clock,
            "peak_memory_bytes": peak_memory_bytes(),
        }
        self.batches, self.losses, self.clock = [], [], now
        self.step, self.steps = trainer.state.global_step, trainer.state.max_steps
        self.flush()
        self.pending = taken
        if world == 1:
            self.stopping, self.saving = bool(flags & STOP), bool(flags & SAVE)
        if self.first_step_seconds is None:
            self.flush()
            self.first_step_seconds = time.time() - self.started

    @property
    def save_due(self) -> bool:
        """Whether the last checkpoint is long ago, by the first rank's clock."""
        return self.first and self.save_seconds is not None and time.monotonic() - self.saved >= self.save_seconds

    def flush(self) -> None:
        """Read the values taken last and write their line."""
        if self.pending is None:
            return
        taken, self.pending = self.pending, None
        losses, held = taken.pop("losses").cpu(), taken.pop("held").cpu()
        rows = held.reshape(-1, held.shape[-1])
        # All ranks see the same flags of the same step, and so stop at the same one.
        self.stopping = self.stopping or bool((rows[:, -1] & STOP).any())
        self.saving = self.saving or bool((rows[:, -1] & SAVE).any())
        order = self.in_order(rows[:, :-1].reshape(rows.shape[0], -1, RECORD_BYTES))
        total = self.total(self.in_order(losses.reshape(rows.shape[0], -1)))
        records = [bytes(row.tolist()) for row in order]
        digest = hashlib.sha256(b"".join(item[:32] for item in records)).hexdigest()
        tokens = sum(int.from_bytes(item[32:], "little") for item in records)
        line = {
            **taken,
            "loss": total.item(),
            "grad_norm": float(taken["grad_norm"]),
            "tokens": tokens,
            "batch_sha256": digest,
        }
        if rows.shape[0] > 1:
            parts = losses.reshape(rows.shape[0], -1).tolist()
            line["ranks"] = record.ranks(parts, [bytes(row[:-1].tolist()) for row in rows], RECORD_BYTES)
        if self.first:
            names = (
                "step",
                "loss",
                "grad_norm",
                "learning_rate",
                "tokens",
                "batch_sha256",
                "seconds",
                "peak_memory_bytes",
                "ranks",
            )
            self.metrics.append({name: line[name] for name in names if name in line})
            self.progress(line, self.steps)

    def scaled(self, losses: torch.Tensor, world: int) -> torch.Tensor:
        """DistributedDataParallel takes the mean over the ranks."""
        return losses / world

    def in_order(self, held: torch.Tensor) -> torch.Tensor:
        """From (rank, micro-batch, …) by global micro-batch: number k of the step is batch k // world of rank k % world."""
        return held.transpose(0, 1).reshape(-1, *held.shape[2:])

    def total(self, losses: torch.Tensor) -> torch.Tensor:
        """One after the other, in that order."""
        total = torch.zeros((), dtype=torch.float32)
        for value in losses:
            total = total + value
        return total


def peak_memory_bytes() -> int:
    """The most memory that this process's tensors took: on the GPU, or of the whole process on a CPU."""
    if torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class KitTrainer(SFTTrainer):  # type: ignore[misc]
    """Records, and stops at a step boundary; trains exactly as SFTTrainer does."""

    def __init__(self, *, recorder: Recorder, tracked: bool, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.recorder, self.tracked = recorder, tracked
        collator: Any = self.data_collator
        self.data_collator: Any = Recorded(collator)

    def get_batch_samples(self, *arguments: Any, **named: Any) -> Any:
        """Take the batches' digests off them. A run that is resumed after its last step gets none."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return [], None
        batches, count = super().get_batch_samples(*arguments, **named)
        self.recorder.batches += [batch.pop(KEY) for batch in batches]
        return batches, count

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
        """TRL's loss, without the statistics that it takes off the device for its log in each micro-batch."""
        if self.tracked or not model.training:
            return super().compute_loss(model, inputs, *arguments, **named)
        inputs["use_cache"] = False
        if self.aux_loss_enabled:
            inputs["output_router_logits"] = True
        if self.args.use_liger_kernel:
            inputs["skip_logits"] = True
            inputs["use_token_scaling"] = self.args.loss_type == "dft"
        return Trainer.compute_loss(self, model, inputs, *arguments, **named)

    def training_step(self, *arguments: Any, **named: Any) -> Any:
        """Keep the loss that was differentiated."""
        loss = super().training_step(*arguments, **named)
        self.recorder.losses.append(loss)
        return loss

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *arguments: Any, **named: Any) -> None:
        recorder = self.recorder
        if self.state.global_step > recorder.step:
            rate = named.get("learning_rate")
            recorder.end_step(self, grad_norm, self._get_learning_rate() if rate is None else rate)
            recorder.stopped = recorder.stopping and recorder.step < recorder.steps
            if recorder.stopped:
                self.control.should_training_stop = True
            if recorder.stopped or (recorder.saving and recorder.step < recorder.steps):
                self.control.should_save = True
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *arguments, **named)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Transformers' files and ours; nothing older goes before the new one is whole."""
        recorder, step = self.recorder, self.state.global_step
        if recorder.saved_step == step:  # Where a step ends an epoch, each of them may ask for it.
            return
        recorder.flush()
        folder = Path(self.args.output_dir) / f"{checkpoints.PREFIX}{step}"
        if self.args.should_save:  # the first rank; of several nodes, each one's
            checkpoints.begin(folder)
        self.accelerator.wait_for_everyone()
        try:
            self._write_checkpoint(folder, model, trial)
        except BaseException:
            if self.args.should_save:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        if self.args.should_save:
            checkpoints.prune(folder.parent, keep=recorder.keep, newest=folder)
        recorder.saved, recorder.saved_step, recorder.saving = time.monotonic(), step, False

    def agreed(self, found: checkpoints.Checkpoint | None) -> checkpoints.Checkpoint | None:
        """Of several nodes, each with its own checkpoints: the newest that all of them hold."""
        mine = torch.tensor([found.step if found else 0], device=self.accelerator.device)
        least = min(self.accelerator.gather(mine).tolist())
        return found if found is None or found.step == least else checkpoints.whole_at(found.folder.parent, least)

    def own_files(self, rank: int) -> tuple[str, ...]:
        """What a rank cannot go on without, and Transformers would: its random numbers, as Transformers names them."""
        return ("rng_state.pth" if self.args.world_size == 1 else f"rng_state_{rank}.pth",)

    def _write_checkpoint(self, folder: Path, model: Any, trial: Any) -> None:
        recorder, args = self.recorder, self.args
        if args.save_on_each_node:  # of which save_pretrained knows nothing: it asks for the first rank of all
            self.model.should_save_on_this_rank = lambda is_main_process: is_main_process
        # Transformers would remove the one before as soon as its own files of this one are written.
        limit, args.save_total_limit = args.save_total_limit, None
        super()._save_checkpoint(model, trial)
        args.save_total_limit = limit
        record.write_json(folder / checkpoints.calls(args.process_index), recorder.calls())
        if recorder.first:
            recorder.metrics.copy(folder / checkpoints.METRICS)
        self.accelerator.wait_for_everyone()
        if args.should_save:
            facts = {"step": self.state.global_step, "steps": self.state.max_steps, **recorder.kept}
            ranks = range(args.process_index, args.process_index + int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
            checkpoints.seal(folder, facts, [name for rank in ranks for name in self.own_files(rank)])
        self.accelerator.wait_for_everyone()

    def create_model_card(self, *_arguments: Any, **_named: Any) -> None:
        """No card: the archive says more, and says the same each time."""
