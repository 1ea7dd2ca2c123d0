"""Phase 5: workers through the torchrun API, with Accelerate's environment. One path for one process and for many.

The libraries are imported once, here, and workers are forked from that: nothing is imported twice, and a second
rank costs no second import. CUDA is not started before the fork (PYTORCH_NVML_BASED_CUDA_CHECK); asserted.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import shlex
import shutil
import signal
import sys
import time
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from kitbuild.errors import RunError, StoppedError
from kitbuild.guest import failures

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kitbuild.guest.config import Config
    from kitbuild.guest.nodes import Meeting

PR_SET_PDEATHSIG = 1
SHUTDOWN_SECONDS = 15
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def environment(config: Config) -> dict[str, str]:
    """What `accelerate launch` would set for the line that `command` shows; from the lock."""
    return dict(config.raw["launch"]["environment"])


def sharded(config: Config) -> bool:
    """Whether no rank holds the whole model, so that each forward pass needs all of them."""
    return config.launch.strategy == "fsdp" or config.launch.stage == 3  # noqa: PLR2004 - ZeRO's own name


def command(config: Config) -> str:
    """The equal launcher line: Accelerate's, or torchrun's where Accelerate would silently start one process."""
    launch = config.launch
    worker = ["-m", "kitbuild.guest", "worker"]
    if not config.cuda and launch.world_size > 1:
        variables = [f"{name}={value}" for name, value in sorted(environment(config).items())]
        parts: list[Any] = [*variables, "torchrun", "--nnodes", launch.nodes]
        parts += ["--nproc-per-node", launch.processes_per_node]
        parts += ["--node-rank", "$NODE_RANK", *_address("--master-addr", "--master-port")] if launch.nodes > 1 else []
        return _line([*parts, *worker])
    parts = ["accelerate", "launch", "--num_machines", launch.nodes, "--num_processes", launch.world_size]
    parts += ["--num_cpu_threads_per_process", launch.threads_per_process]
    parts += ["--mixed_precision", environment(config)["ACCELERATE_MIXED_PRECISION"], "--dynamo_backend", "no"]
    parts += [] if config.cuda or launch.strategy == "deepspeed" else ["--cpu"]
    parts += ["--multi_gpu"] if config.cuda and launch.world_size > 1 and launch.strategy == "ddp" else []
    parts += ["--use_deepspeed", "--zero_stage", launch.stage] if launch.strategy == "deepspeed" else []
    parts += ["--use_fsdp", "--fsdp_version", 2] if launch.strategy == "fsdp" else []
    if launch.nodes > 1:
        parts += ["--machine_rank", "$NODE_RANK", *_address("--main_process_ip", "--main_process_port")]
    return _line([*parts, *worker])


def _address(address: str, port: str) -> list[str]:
    return [address, "$MASTER_ADDR", port, "$MASTER_PORT"]


def _line(parts: list[Any]) -> str:
    return " ".join(str(part) if str(part).startswith("$") else shlex.quote(str(part)) for part in parts)


class Stop:
    """A request to stop, made by a signal to any of the processes; workers look at each step boundary."""

    def __init__(self, scratch: Path) -> None:
        self._marker = scratch / "stop"
        self._seen, self._owner = False, 0

    def listen(self) -> None:
        """Take the signals; nothing is interrupted."""
        self._owner = os.getpid()
        for number in STOP_SIGNALS:
            signal.signal(number, self._request)

    def _request(self, number: int, _frame: object) -> None:
        if os.getpid() != self._owner:  # A helper that was forked and is told to end.
            os._exit(1)
        self._seen = True
        try:
            self._marker.write_text(signal.Signals(number).name)
        except OSError:
            return

    @property
    def requested(self) -> bool:
        """Whether to stop now."""
        self._seen = self._seen or self._marker.exists()
        return self._seen

    def check(self, phase: str) -> None:
        """Stop here, where nothing needs to be kept."""
        if self.requested:
            text = f"stopped in phase {phase}, before the first step"
            raise StoppedError(text, hint="start it again, or go on with kitbuild run --resume RUN; no step was lost")


def import_libraries(config: Config) -> None:
    """All that a worker needs, once."""
    os.environ.update(environment(config))  # DeepSpeed reads it when it is imported.
    wanted = ["datasets", "torch.distributed.launcher.api", "kitbuild.guest.train"]
    wanted += ["kernels"] if config.kernels else []
    wanted += ["deepspeed"] if config.launch.strategy == "deepspeed" else []
    wanted += ["peft"] if config.recipe.get("lora") else []
    wanted += ["liger_kernel.transformers"] if config.recipe.get("liger") else []
    # Nothing of a library is garbage: looking for it while importing costs a tenth of the time, and after it a copy
    # of every page in each worker (https://docs.python.org/3/library/gc.html#gc.freeze).
    gc.disable()
    for name in wanted:
        try:
            importlib.import_module(name)
        except ImportError as error:
            hint = "install the recipe's package set there" if not config.locked else "build the image again"
            raise RunError(f"{name} does not import: {error}", hint=hint) from error
    gc.freeze()
    gc.enable()


def run(
    config: Config, worker: Callable[[], None], stop: Stop, meeting: Meeting | None = None
) -> dict[int, dict[str, Any]]:
    """Start the workers of this node and wait for them; return what each left, or raise what went wrong first."""
    import torch
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if torch.cuda.is_initialized():
        raise RunError(
            "CUDA was started by an import, before the workers were", hint="report this with the package list"
        )
    launch, scratch = config.launch, config.places.scratch
    logs = scratch / "elastic"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    # Ours are the signals that mean stop; the agent would kill the workers.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    wanted = {
        "min_nodes": launch.nodes,
        "max_nodes": launch.nodes,
        "nproc_per_node": launch.processes_per_node,
        "run_id": "kit",
        "max_restarts": 0,
        "start_method": "fork",
        "monitor_interval": 0.05,
        "logs_specs": DefaultLogsSpecs(log_dir=str(logs)),
        "signals_to_handle": "SIGQUIT",
        "shutdown_timeout": SHUTDOWN_SECONDS,
        **_rendezvous(meeting),
    }
    known = {field.name for field in fields(LaunchConfig)}
    begin = meeting.rank * launch.processes_per_node if meeting else 0
    ranks = range(begin, begin + launch.processes_per_node)
    stop.listen()
    kills = failures.oom_kills()

    agent = os.getpid()

    def forked() -> None:
        _meet(logs, agent)
        worker()

    try:
        elastic_launch(LaunchConfig(**{key: value for key, value in wanted.items() if key in known}), forked)()
    except ChildFailedError as error:
        codes = {rank: item.exitcode for rank, item in error.failures.items()}
        starved = failures.oom_kills() > kills
        raise failures.first_error(scratch, codes, ranks, stopping=stop.requested, starved=starved) from error
    results = {int(path.stem.split("-")[1]): json.loads(path.read_bytes()) for path in scratch.glob("result-*.json")}
    if len(results) != launch.processes_per_node:
        raise failures.first_error(scratch, {}, ranks, stopping=stop.requested)
    return results


def _meet(folder: Path, agent: int) -> None:
    """Go on when every worker of this node is forked.

    A worker's first connection makes the agent's store thread look up a name; a fork in that moment copies the
    resolver's lock as taken, and the new worker would wait for it for ever.
    """
    (folder / f"forked-{os.environ['LOCAL_RANK']}").touch()
    while len(list(folder.glob("forked-*"))) < int(os.environ["LOCAL_WORLD_SIZE"]):
        if os.getppid() != agent:
            sys.exit(1)
        time.sleep(0.005)


def _rendezvous(meeting: Meeting | None) -> dict[str, Any]:
    if meeting is None:
        return {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "local_addr": "localhost"}
    from kitbuild.guest.nodes import handler

    return {"rdzv_backend": handler(meeting), "rdzv_endpoint": f"{meeting.address}:{meeting.port}"}


def enter_worker(parent: int) -> None:
    """No orphan: the kernel kills this process when the one that started it is gone."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        sys.exit(1)
