"""What went wrong in the workers, as one of our errors: a library's in words of ours, and of several the first."""

from __future__ import annotations

import errno
import json
import re
import signal
from typing import TYPE_CHECKING, Any

from kitbuild.errors import KitbuildError, RecipeError, RunError, StoppedError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

# What the ranks that are left say when one is gone (Gloo, NCCL).
LOST_PEER = re.compile(r"gloo|NCCL|[Cc]onnection (?:closed|reset)|Broken pipe")
MEMORY_HINT = "give the container more memory, or use a smaller batch.micro, then resume"


def first_error(scratch: Path, exit_codes: dict[int, int], ranks: Iterable[int], *, stopping: bool) -> KitbuildError:
    """What came first: a worker that was killed (the others then lose their connection), else what one wrote."""
    killed = _killed(exit_codes)
    if killed is not None:
        return killed
    held = {int(path.stem.split("-")[1]): json.loads(path.read_bytes()) for path in scratch.glob("error-*.json")}
    told = list(held.values())
    silent = sorted(set(ranks) - set(held))
    if told and silent and all(LOST_PEER.search(item["message"]) for item in told):
        text = f"worker {silent[0]} was killed or crashed, and the others lost their connection to it"
        return RunError(text, hint=MEMORY_HINT)
    if told:
        return revive(min(told, key=lambda item: item["time"]))
    if stopping:
        return StoppedError("stopped before the first step", hint="start or resume it again; no step was lost")
    return RunError(f"a worker ended without a result (exit codes {exit_codes})", hint="see logs/rank-0.log")


def _killed(exit_codes: dict[int, int]) -> RunError | None:
    for rank, code in sorted(exit_codes.items()):
        if code == -signal.SIGKILL:
            text = f"worker {rank} was killed (SIGKILL): the memory limit, or someone's kill -9"
            return RunError(text, hint=MEMORY_HINT)
        if code < 0 and code != -signal.SIGTERM:
            return RunError(f"worker {rank} died of {signal.Signals(-code).name}", hint=f"see logs/rank-{rank}.log")
    return None


def revive(told: dict[str, Any]) -> KitbuildError:
    """An error of the family, as a worker wrote it down."""
    classes = {item.code: item for item in _family(KitbuildError)}
    return classes.get(told["code"], KitbuildError)(told["message"], hint=told["hint"])


def _family(parent: type[KitbuildError]) -> list[type[KitbuildError]]:
    return [parent, *(item for child in parent.__subclasses__() for item in _family(child))]


def classify(error: BaseException) -> KitbuildError:
    """A library's error as one of ours: a fact, and what to do."""
    if isinstance(error, KitbuildError):
        return error
    import torch

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
