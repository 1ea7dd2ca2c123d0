"""What went wrong in the workers, as one of our errors: a library's in words of ours, and of several the first."""

from __future__ import annotations

import errno
import json
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kitbuild.errors import KitbuildError, RecipeError, RunError, StoppedError

if TYPE_CHECKING:
    from collections.abc import Iterable

# What the ranks that are left say when one is gone (Gloo, NCCL).
# What safetensors and torch say of a disk that takes no more: the latter counts the bytes and knows no reason.
FULL = re.compile(
    r"No space left on device|Disk quota exceeded|File too large|PytorchStreamWriter failed|unexpected pos|iostream error"
)
LOST_PEER = re.compile(r"gloo|NCCL|[Cc]onnection (?:closed|reset)|Broken pipe")
MEMORY_HINT = "give the container more memory and resume; or start a new run with a smaller batch.micro"


def oom_kills() -> int:
    """How many processes the kernel has ended for memory so far, of whatever limit; 0 where it does not say."""
    try:  # https://docs.kernel.org/admin-guide/cgroup-v2.html names the event; vmstat counts it for all groups
        text = Path("/proc/vmstat").read_text()
    except OSError:
        return 0
    found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else 0


def first_error(
    scratch: Path, exit_codes: dict[int, int], ranks: Iterable[int], *, stopping: bool, starved: bool = False
) -> KitbuildError:
    """What came first: a worker that was killed (the others then lose their connection), else what one wrote."""
    killed = _killed(exit_codes, starved=starved)
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
        hint = "start it again, or go on with kitbuild run --resume RUN; no step was lost"
        return StoppedError("stopped before the first step", hint=hint)
    return RunError(f"a worker ended without a result (exit codes {exit_codes})", hint="see logs/rank-0.log")


def _killed(exit_codes: dict[int, int], *, starved: bool) -> RunError | None:
    for rank, code in sorted(exit_codes.items()):
        if code == -signal.SIGKILL and starved:
            return RunError(f"out of memory: the kernel ended worker {rank}", hint=MEMORY_HINT)
        if code == -signal.SIGKILL:
            text = f"worker {rank} was killed (SIGKILL): somebody's kill -9, or a limit of the machine's"
            return RunError(text, hint="resume with kitbuild run --resume RUN")
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
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if (isinstance(error, OSError) and error.errno in full) or FULL.search(text):
        return RunError(
            "no space left on the device while training", hint="free space for the run directory, then resume"
        )
    return RunError(
        f"training failed: {type(error).__name__}: {first}",
        hint="the traceback is in logs/rank-0.log of the run directory",
    )
