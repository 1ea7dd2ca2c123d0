"""One call of `kit train`: verify → preflight → launch → what the ranks leave → exit.json and manifest.json."""

from __future__ import annotations

import json
import os
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from kitbuild.errors import KitbuildError, RunError, StoppedError
from kitbuild.guest import (
    claim,
    determinism,
    kernels,
    launch,
    manifest,
    nodes,
    preflight,
    record,
    selftest,
    surroundings,
    usage,
)
from kitbuild.guest.verify import Verification

if TYPE_CHECKING:
    from kitbuild.guest.checkpoints import Checkpoint
    from kitbuild.guest.config import Config


class Session:
    """One call of `kit train` (or `selftest`): the phases in their order."""

    def __init__(self, config: Config, terminal: record.Terminal, started: float) -> None:
        self.config, self.terminal, self.started = config, terminal, started
        self.stop = launch.Stop(config.places.scratch)
        self.status = record.Status(config.places.out)
        self.phase_name = "verify"
        self.seconds: dict[str, float] = {}
        self.parts: dict[str, Any] = {}
        self.steps_done, self.steps = 0, None
        self.meeting: nodes.Meeting | None = None

    def phase(self, name: str, message: str) -> None:
        """Enter a phase."""
        self.phase_name = name
        self.status.write(name, message)
        self.terminal.say(f"{name}: {message}")

    def run(self, mode: str) -> None:
        """All phases; raises what went wrong."""
        config, environ = self.config, dict(os.environ)
        clock = time.perf_counter()
        self.phase("verify", "every locked file")
        verification = Verification(config, environ)
        try:
            self.phase("preflight", "device, memory, places")
            for line in preflight.check(config, environ):
                self.terminal.say(line)
            determinism.refuse(config)
            self.meeting = nodes.Meeting(config, environ) if config.launch.nodes > 1 else None
            self.settle(environ)
            if verification.refused:
                verification.wait()
            self.phase("verify", f"{verification.files} files, while libraries are imported")
            begun = time.perf_counter()
            launch.import_libraries(config)
            self.seconds["imports"] = time.perf_counter() - begun
            verification.wait()
        finally:
            verification.close()
        self.seconds["verify"] = time.perf_counter() - clock
        self.stop.check("verify")
        if self.meeting is not None:
            self.phase("verify", f"{config.launch.nodes} nodes meet at {self.meeting.address}:{self.meeting.port}")
            clock = time.perf_counter()
            self.meeting.join()
            self.seconds["meet"] = time.perf_counter() - clock
            self.meeting.watch()
        found = self.resumed()
        self.phase(
            "launch",
            f"{config.launch.processes_per_node} process(es), {config.launch.threads_per_process} thread(s) each",
        )
        from kitbuild.guest.train import Worker

        worker = Worker(
            config, self.terminal, self.stop, started=self.started, mode=mode, parent=os.getpid(), found=found
        )
        try:  # Where nobody lives to say more.
            manifest.write(config, {**self.parts, "started": _utc(self.started)})
        except OSError as problem:
            raise unrecorded(problem) from problem
        self.phase_name = "train"
        try:
            results = launch.run(config, worker.run, self.stop, self.meeting)
        except KitbuildError as error:
            raise (self.meeting.first(error) if self.meeting else error) from error
        self.collect(self.meeting.merged(results) if self.meeting else results)

    def settle(self, environ: dict[str, str]) -> None:
        """The environment that decides bits; what was set otherwise is told and recorded."""
        config = self.config
        overridden = determinism.overridden(config, environ)
        for name, value in overridden.items():
            self.terminal.say(f"{name}={value} is set here and has no effect")
        given = config.recipe.get("determinism")
        self.parts["determinism"] = {
            **(given if isinstance(given, dict) else {"mode": given or "strict"}),
            "overridden": overridden,
            "compiled_before": surroundings.compiled_before(config),
            "not_guaranteed": determinism.not_guaranteed(config),
        }
        determinism.apply(config, os.environ)

    def resumed(self) -> Checkpoint | None:
        """Where to go on from."""
        found, told = claim.find(self.config)
        for text in told:
            self.terminal.say(text)
        if found is not None:
            self.terminal.say(f"resume: from {found.folder.name}")
            self.parts["resumed"] = found.resumed
        return found

    def collect(self, results: dict[int, dict[str, Any]]) -> None:
        """The ranks' results as parts of the manifest."""
        config, first = self.config, results[min(results)]
        tested = config.places.out / selftest.KEPT
        self.parts["selftest"] = json.loads(tested.read_bytes()) if tested.exists() else None
        if "calls" not in first:
            return
        self.phase_name = "record"
        self.steps_done, self.steps = first["steps_done"], first["steps"]
        self.seconds |= first.pop("seconds")
        kept = ("device", "build", "arguments", "attention", "liger", "rows", "weights", "resumed")
        self.parts |= {name: first[name] for name in kept if name in first}
        self.parts["determinism"] |= {"settings": first.get("settings", {})}
        calls = {rank: item["calls"] for rank, item in sorted(results.items())}
        self.parts["kernels"] = kernels.described(
            config, calls, {rank: item["loaded"] for rank, item in results.items()}
        )
        for name, of_rank in (("attention", usage.attention_calls), ("liger", usage.liger_calls)):
            if self.parts.get(name):
                self.parts[name]["calls"] = {str(rank): of_rank(held) for rank, held in calls.items()}
        self.parts["launch"] = {
            "nodes": config.launch.nodes,
            "processes_per_node": config.launch.processes_per_node,
            "world_size": config.launch.world_size,
            "strategy": config.launch.strategy,
            "proven": [results[rank]["proven"] for rank in sorted(results)],
            "hosts": [host for _, host in sorted(self.meeting.hosts.items())] if self.meeting else None,
        }
        self.parts["results"] = {"evaluate": first["evaluate"]}
        if "measured" in first:
            self.parts["results"]["measured"] = first["measured"]
        if first["stopped"]:
            text = f"stopped on request after step {self.steps_done} of {self.steps}; a checkpoint is saved"
            raise StoppedError(text, hint="resume with kitbuild run --resume RUN")
        self.parts["complete"] = True

    def close(self, error: KitbuildError | None) -> KitbuildError | None:
        """manifest.json and exit.json, each whether or not the other can be written; what went wrong in the end."""
        out = self.config.places.out
        if self.meeting is not None:
            self.meeting.leave(error)
        self.seconds["total"] = time.time() - self.started
        self.parts["complete"] = error is None and self.parts.get("complete", False)
        self.parts.setdefault("results", {})["seconds"] = self.seconds
        self.parts |= {"driver": manifest.driver(), "started": _utc(self.started), "finished": _utc(time.time())}
        try:
            manifest.write(self.config, dict(self.parts))
        except OSError as problem:
            record.trace()
            error = error or unrecorded(problem)
        told: dict[str, Any] = (
            {"exit_code": 0, "code": "ok", "message": "trained", "hint": None, "problems": []}
            if error is None
            else error.as_json()
        )
        done = self.steps_done or len(record.read_metrics(out / "metrics.jsonl"))
        rest = {"schema": "kitbuild.exit/1", "phase": self.phase_name, "steps_done": done, "steps": self.steps}
        try:
            record.write_json(out / "exit.json", {**told, **rest})
        except OSError as problem:
            record.trace()
            error = error or unrecorded(problem)
        self.status.write("done", told["message"], step=done, steps=self.steps)
        return error


def unrecorded(problem: OSError) -> RunError:
    """The run itself may have gone well; without its record it is worth nothing."""
    return RunError(f"the run cannot be recorded: {problem}", hint="free space for the run directory, then resume")


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
