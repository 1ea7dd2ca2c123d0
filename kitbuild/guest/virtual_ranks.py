"""The same bits on 1, 2, 4 … N processes: a global batch is always N micro-batches, one for each virtual rank.

Process r of W holds the N/W virtual ranks in a row that begin at r · N/W. Losses and gradients are merged by one
binary tree over the virtual ranks: its lower levels inside a process, its upper levels between processes. Everything
random in a micro-batch follows from the seed, the step and the virtual rank. So nothing that is added up depends on W.
"""

from __future__ import annotations

import functools
import hashlib
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import RandomSampler, Sampler

from kitbuild.errors import RunError
from kitbuild.guest import tree
from kitbuild.guest.trainer import KitTrainer, Recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kitbuild.guest.config import Config


@dataclass(frozen=True, kw_only=True)
class Deal:
    """Which virtual ranks this process holds."""

    count: int
    world: int
    rank: int
    micro: int
    seed: int

    @classmethod
    def of(cls, config: Config, rank: int) -> Deal | None:
        """The lock's; None without virtual ranks."""
        count = config.virtual_ranks
        if count is None:
            return None
        return cls(count=count, world=config.launch.world_size, rank=rank, micro=config.micro, seed=config.seed)

    @property
    def share(self) -> int:
        """Virtual ranks in a process."""
        return self.count // self.world

    @property
    def mine(self) -> range:
        """Those of this process, in a row."""
        return range(self.rank * self.share, (self.rank + 1) * self.share)

    def draw_from(self, step: int, virtual_rank: int) -> None:
        """Seed every generator for one virtual rank of one step, whatever process it is on."""
        found = hashlib.sha256(f"{self.seed} {step} {virtual_rank}".encode()).digest()
        number = int.from_bytes(found[:8], "little") >> 1
        random.seed(number)
        np.random.seed(number % 2**32)  # noqa: NPY002 - the generator that libraries share
        torch.manual_seed(number)


class DealtRows(Sampler):  # type: ignore[misc]
    """Rows in whole global batches, in the order from which Accelerate's round robin deals each process its own.

    The last batch of an epoch is filled up from the epoch's first rows, as N processes would do, or dropped.
    """

    def __init__(self, rows: Any, deal: Deal, *, drop_last: bool, step: Callable[[], int]) -> None:
        self._rows, self._deal, self._step = rows, deal, step
        self._global = deal.count * deal.micro
        held = len(rows)
        self._length = (held if drop_last else held + self._global - 1) // self._global * self._global
        if not self._length:
            text = f"{held} rows are less than one global batch of {self._global}, and dataloader_drop_last is on"
            raise RunError(text, hint="a smaller batch.global, or more rows")

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        if isinstance(self._rows, SeedableRandomSampler):
            # From the step, for a resumed epoch's loader is not told its number on several processes.
            self._rows.set_epoch(self._step() // (self._length // self._global))
        order = list(self._rows)
        micro, share = self._deal.micro, self._deal.share
        for start in range(0, self._length, self._global):
            for index in range(share):
                for rank in range(self._deal.world):
                    first = start + (rank * share + index) * micro
                    yield from (order[place % len(order)] for place in range(first, first + micro))


class VirtualRecorder(Recorder):
    """A step's values by virtual rank; the loss is merged by the tree."""

    def scaled(self, losses: torch.Tensor, _world: int) -> torch.Tensor:
        """As they are: they were differentiated like that."""
        return losses

    def in_order(self, held: torch.Tensor) -> torch.Tensor:
        """By virtual rank: each process has its own in a row."""
        return held.reshape(-1, *held.shape[2:])

    def total(self, losses: torch.Tensor) -> torch.Tensor:
        """By the tree."""
        return tree.total(list(losses))


class VirtualTrainer(KitTrainer):
    """Each process has the whole model and no wrapper around it; gradients are merged here and nowhere else."""

    def __init__(self, *, deal: Deal, **arguments: Any) -> None:
        self.deal, self._sums, self._done = deal, tree.Sums(), 0
        super().__init__(**arguments)
        # Precision and device as for training, without DistributedDataParallel.
        self.accelerator.prepare_model = functools.partial(self.accelerator.prepare_model, evaluation_mode=True)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        rows = super()._get_train_sampler(train_dataset)
        if isinstance(rows, RandomSampler):
            rows = SeedableRandomSampler(rows.data_source, data_seed=self.args.data_seed)
        return DealtRows(rows, self.deal, drop_last=self.args.dataloader_drop_last, step=lambda: self.state.global_step)

    def _prepare_for_training(self, *arguments: Any, **named: Any) -> Any:
        prepared = super()._prepare_for_training(*arguments, **named)
        if isinstance(self.model_wrapped, torch.nn.parallel.DistributedDataParallel):
            text = "the model is wrapped in DistributedDataParallel, which adds gradients in an order of its own"
            raise RunError(text, hint="report this: virtual_ranks needs the bare model")
        self.check_replicas("before the first step")
        return prepared

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
        """Without the factor that makes up for DDP's mean; a power of two, so nothing is rounded."""
        loss = super().compute_loss(model, inputs, *arguments, **named)
        return loss / self.deal.world if model.training else loss

    def training_step(self, *arguments: Any, **named: Any) -> Any:
        """One virtual rank; after the last of this process, the gradients are those of the whole batch."""
        step = self.state.global_step
        self.deal.draw_from(step, self.deal.mine[self._done])
        loss = super().training_step(*arguments, **named)
        parameters = [item for item in self.model.parameters() if item.requires_grad]
        self._sums.add([_taken(item) for item in parameters])
        self._done += 1
        last = self._done == self.deal.share
        if last != self.accelerator.sync_gradients:
            raise RunError(
                f"a step has {self._done} micro-batches, virtual_ranks {self.deal.count} means {self.deal.share}",
                hint="report this: the global batch is not whole",
            )
        if last:
            self._done = 0
            merged = self._sums.take()
            if self.deal.world > 1:
                tree.merge(merged, rank=self.deal.rank, world=self.deal.world)
            for item, gradient in zip(parameters, merged, strict=True):
                item.grad = gradient
            # What the optimizer draws is the same everywhere too.
            self.deal.draw_from(step, self.deal.count)
        return loss * self.deal.world

    def own_files(self, _rank: int) -> tuple[str, ...]:
        """None: see below."""
        return ()

    def _save_rng_state(self, output_dir: str) -> None:
        """No file: every draw follows from seed, step and virtual rank, so any number of processes may go on."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """None, likewise."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.check_replicas(f"at step {self.state.global_step}")
        super()._save_checkpoint(model, trial)

    def _finalize_training(self, *arguments: Any, **named: Any) -> Any:
        self.check_replicas("after the last step")
        return super()._finalize_training(*arguments, **named)

    def check_replicas(self, when: str) -> None:
        """Every process has the same weights; nothing else keeps them equal."""
        if self.deal.world == 1:
            return
        held = self.accelerator.gather(tree.fingerprint(list(self.model.parameters()))[None]).tolist()
        other = [rank for rank, value in enumerate(held) if value != held[0]]
        if other:
            raise RunError(
                f"{when}, process {other[0]} has other weights than process 0",
                hint="the devices are not equal or one of them is faulty: look at the archive's device of each rank",
            )


def _taken(parameter: torch.Tensor) -> torch.Tensor:
    """A micro-batch's gradient, taken off; zero where the micro-batch did not use the parameter."""
    gradient, parameter.grad = parameter.grad, None
    return torch.zeros_like(parameter) if gradient is None else gradient.contiguous()
