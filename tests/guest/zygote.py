"""Runs in the training environment: imports the libraries once, then forks one guest per line of stdin.

A line is a job: {"environ", "argv", "log", "terminate_after"}. Answers: {"pid"}, then {"rc"}.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys


def guest(job: dict[str, object]) -> int:
    log = os.open(str(job["log"]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(job["environ"])  # type: ignore[call-overload]
    from kitbuild.guest import data, entry, trainer  # noqa: PLC0415 - after the fork

    last = job.get("terminate_after")
    end_step = trainer.Recorder.end_step

    def terminated(self: trainer.Recorder, owner: object, grad_norm: object, rate: float) -> None:
        if owner.state.global_step == last:  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGTERM)
        end_step(self, owner, grad_norm, rate)

    trainer.Recorder.end_step = terminated  # type: ignore[method-assign, assignment]
    if job.get("out_of_memory"):
        data.training_rows = lambda config: bytearray(1 << 62)  # noqa: ARG005
    return entry.main(job["argv"])  # type: ignore[arg-type]


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    os.environ.update(json.loads(sys.argv[2]))
    for name in ("datasets", "kernels", "peft", "torch.distributed.launcher.api", "kitbuild.guest.train"):
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
