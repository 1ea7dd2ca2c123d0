"""Runs in the training environment: imports the libraries once, then forks one guest per line of stdin.

A line is a job: {"environ", "argv", "log"} and what is to happen to it:

- `terminate_after`: SIGTERM at the end of that step, and once more while its checkpoint is written;
- `terminate_in`: SIGTERM to the first process when that phase begins: "phase" or "phase: message";
- `kill_after`: SIGKILL at the end of that step, with the metrics written;
- `kill_in_save`: SIGKILL when the checkpoint of that step is written and not yet marked;
- `limit_after`: [step, bytes]: from that step on no file grows beyond that many bytes, as on a full disk;
- `full`: a file of the run directory that cannot be written;
- `other_weights`: the second process has other weights when it is looked at whether all are equal;
- `out_of_memory`: more than there is is asked for;
- `lie`: a function of `lies.py` is called first.

Answers: {"pid"}, then {"rc"}.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import resource
import signal
import sys
from typing import Any


class Injury:
    """What a job wants to happen, in whatever process comes to that place."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job, self.first = job, os.getpid()

    def ended(self, _recorder: Any, owner: Any, *_: Any) -> None:
        step, size = self.job.get("limit_after", (0, 0))
        if owner.state.global_step == self.job.get("terminate_after"):
            os.kill(os.getpid(), signal.SIGTERM)
        if owner.state.global_step == step:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    def recorded(self, recorder: Any, owner: Any, *_: Any) -> None:
        if owner.state.global_step == self.job.get("kill_after"):
            recorder.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    def sealed(self, _folder: Any, facts: Any, *_: Any) -> None:
        if facts["step"] == self.job.get("kill_in_save"):
            os.kill(os.getpid(), signal.SIGKILL)
        if facts["step"] == self.job.get("terminate_after"):
            os.kill(self.first, signal.SIGTERM)

    def begun(self, _status: Any, phase: str, message: str = "", **_: Any) -> None:
        if self.job.get("terminate_in") in (phase, f"{phase}: {message}"):
            os.kill(self.first, signal.SIGTERM)

    def written(self, path: Any, *_: Any) -> None:
        if path.name == self.job.get("full"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def compared(self, owner: Any, when: str) -> None:
        if when == self.job.get("other_weights") and owner.deal.rank == 1:
            next(owner.model.parameters()).data[0, 0] += 1e-3


def injure(job: dict[str, Any]) -> None:
    from kitbuild.guest import checkpoints, data, record, trainer, virtual_ranks  # noqa: PLC0415 - after the fork

    injury = Injury(job)
    around(trainer.Recorder, "end_step", before=injury.ended, after=injury.recorded)
    around(checkpoints, "seal", before=injury.sealed)
    around(record.Status, "write", before=injury.begun)
    around(record, "write_bytes", before=injury.written)
    around(virtual_ranks.VirtualTrainer, "check_replicas", before=injury.compared)
    if job.get("cores"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(str(job["cores"]))])
    if job.get("cpu_capability"):
        sys.modules["torch"].backends.cpu.get_cpu_capability = lambda: job["cpu_capability"]
    if job.get("out_of_memory"):
        data.training_rows = lambda config: bytearray(1 << 62)  # noqa: ARG005


def around(owner: Any, name: str, *, before: Any, after: Any = None) -> None:
    """Have something called before and after a function, with its arguments."""
    original = getattr(owner, name)

    def both(*given: Any, **named: Any) -> Any:
        before(*given, **named)
        value = original(*given, **named)
        if after is not None:
            after(*given, **named)
        return value

    setattr(owner, name, both)


def guest(job: dict[str, Any]) -> int:
    log = os.open(str(job["log"]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(job["environ"])
    from kitbuild.guest import entry  # noqa: PLC0415 - after the fork

    injure(job)
    if job.get("lie"):
        from tests.guest import lies  # noqa: PLC0415

        getattr(lies, str(job["lie"]))()
    return entry.main(job["argv"])


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    os.environ.update(json.loads(sys.argv[2]))
    for name in (
        "datasets",
        "kernels",
        "peft",
        "torch.distributed.launcher.api",
        "kitbuild.guest.train",
        *sys.argv[3:],
    ):
        importlib.import_module(name)
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if not child:
            code = 1
            try:
                code = guest(job)
            finally:
                os._exit(code)
        sys.__stdout__.write(json.dumps({"pid": child}) + "\n")  # type: ignore[union-attr]
        sys.__stdout__.flush()  # type: ignore[union-attr]
        _, status = os.waitpid(child, 0)
        sys.__stdout__.write(json.dumps({"rc": os.waitstatus_to_exitcode(status)}) + "\n")  # type: ignore[union-attr]
        sys.__stdout__.flush()  # type: ignore[union-attr]


main()
