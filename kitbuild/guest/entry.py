"""`kit`, the image's entry point: verify → preflight → selftest → determinism → launch → train → record.

Leaves exit.json and manifest.json whatever happens. The user sees short lines; everything else is in logs/.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import replace
from shutil import rmtree
from typing import TYPE_CHECKING, Any

from kitbuild import __version__
from kitbuild.errors import KitbuildError, Problem, RunError
from kitbuild.guest import checkpoints, claim, determinism, launch, preflight, record, seal
from kitbuild.guest.config import Config, Places
from kitbuild.guest.session import Session, unrecorded
from kitbuild.guest.verify import Verification

if TYPE_CHECKING:
    from collections.abc import Sequence

HASH_SEED = "PYTHONHASHSEED"


def train(config: Config, terminal: record.Terminal, started: float, mode: str) -> int:
    """Run the phases; the exit code says how it went."""
    places = config.places
    try:
        if claim.done(config):
            terminal.say(f"the run in {places.out} is finished")
            return 0
        held = claim.take(config)
        rmtree(places.scratch, ignore_errors=True)
        places.scratch.mkdir(parents=True)
        for name in ("lock.json", "recipe.yaml"):
            if (places.kit / name).exists():
                record.write_bytes(places.out / name, (places.kit / name).read_bytes())
    except OSError as error:
        hint = f"mount directories that user {os.getuid()} can write to, with space in them"
        refusal = RunError(f"{error.filename or places.out} is not writable: {error.strerror}", hint=hint)
        _record_refusal(places, refusal, "preflight")
        return report(terminal, refusal)
    try:
        return _train(config, terminal, started, mode)
    finally:
        if held is not None:
            os.close(held)


def _train(config: Config, terminal: record.Terminal, started: float, mode: str) -> int:
    terminal.capture(config.places.out / "logs" / "guest.log")
    session = Session(config, terminal, started)
    session.stop.listen()
    failure: KitbuildError | None = None
    try:
        session.run(mode)
    except KitbuildError as error:
        record.trace()
        failure = error
    except Exception as error:  # noqa: BLE001 - the one place where a bug becomes a message
        record.trace()
        text = f"unexpected {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        failure = KitbuildError(text, hint="please report it, with logs/guest.log")
    failure = session.close(failure)
    try:
        terminal.release()
        seal.write(config.places.out)
    except OSError as problem:
        failure = session.close(failure or unrecorded(problem))
    if failure is not None:
        return report(terminal, failure)
    checkpoints.clean(config)
    if mode == "train":
        terminal.say(f"done: {session.steps_done} steps in {session.seconds['total']:.1f} s")
    return 0


def selftest(config: Config, terminal: record.Terminal, started: float) -> int:
    """The phases up to the self-test, in a directory of the cache: what is in /out stays as it is. JSON on stdout."""
    out, stdout = config.places.cache / "selftest-run", os.dup(1)
    rmtree(out, ignore_errors=True)
    code = train(replace(config, places=replace(config.places, out=out), resume=False), terminal, started, "selftest")
    if code == 0:
        found = json.loads((out / "manifest.json").read_bytes())["selftest"]
        for check in found["checks"]:
            terminal.say(f"selftest: {check['kernel']}: {check['check']}: right")
        terminal.say(f"selftest: every kernel is right (checks: {len(found['checks'])})")
        os.write(stdout, json.dumps({"schema": "kitbuild.selftest/1", **found}).encode() + b"\n")
    return code


def _record_refusal(places: Places, error: KitbuildError, phase: str) -> None:
    """exit.json of a run that did not begin; a run that is there stays as it is."""
    path = places.out / "exit.json"
    told = {"schema": "kitbuild.exit/1", "phase": phase, "steps_done": 0, "steps": None}
    if not path.exists():
        with suppress(OSError):
            record.write_json(path, {**error.as_json(), **told})


def report(terminal: record.Terminal, error: KitbuildError) -> int:
    """One line for the user, one for each problem, and the exit code."""
    terminal.say(f"error: {error.message}" + (f" (hint: {error.hint})" if error.hint else ""))
    for problem in error.problems[:20]:
        terminal.say(f"  {problem.file or problem.key or ''}: {problem.message}")
    return error.exit_code


def info(config: Config) -> dict[str, Any]:
    """What this image holds, without importing any of it."""
    return {
        "name": config.name,
        "kitbuild": __version__,
        "target": config.raw["target"],
        "lock_sha256": config.lock_sha256,
        "content_sha256": config.raw["content_sha256"],
        "attention": config.attention,
        "kernels": [str(kernel) for kernel in config.kernels],
        "threads": config.launch.threads_per_process,
        "processes": config.launch.world_size,
    }


def dispatch(arguments: argparse.Namespace, terminal: record.Terminal, started: float) -> int:
    """One verb."""
    try:
        config = Config.read(os.environ)
    except KitbuildError as error:
        if arguments.verb == "train":
            _record_refusal(Places.read(os.environ), error, "verify")
        raise
    match arguments.verb:
        case "train":
            return train(config, terminal, started, arguments.verb)
        case "selftest":
            return selftest(config, terminal, started)
        case "verify":
            verification = Verification(config, dict(os.environ))
            verification.wait()
            terminal.say(f"verify: {verification.files} files are the locked ones")
        case "preflight":
            problems = list(determinism.refusals(config))
            for line in [*preflight.check(config, os.environ), *(str(problem) for problem in problems)]:
                terminal.say(line)
            determinism.refuse(config)
            terminal.say("preflight: nothing stands in the way")
        case "worker":
            determinism.apply(config, os.environ, launched=True)
            launch.import_libraries(config)
            from kitbuild.guest.train import Worker

            stop = launch.Stop(config.places.scratch)
            found, _ = claim.find(config)
            Worker(config, terminal, stop, started=started, mode="train", parent=os.getppid(), found=found).run()
        case "launch":
            sys.stdout.write(launch.command(config) + "\n")
        case _:
            sys.stdout.write(json.dumps(info(config), indent=1) + "\n")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, run, and turn an error into its exit code."""
    started = time.time()
    sys.dont_write_bytecode = True  # Kernels and libraries are locked; what is written beside them would not be.
    if os.environ.get(HASH_SEED) != "0":
        # The order of sets is fixed when Python starts, so it has to start again.
        given = list(sys.argv[1:] if argv is None else argv)
        environ = {**os.environ, HASH_SEED: "0", "PYTHONSAFEPATH": "1"}
        os.execve(sys.executable, [sys.executable, "-m", "kitbuild.guest", *given], environ)  # noqa: S606 - the same program
    parser = argparse.ArgumentParser(prog="kit", description="Train what this image was locked for.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name, text in (
        ("train", "verify, then train, then record in /out"),
        ("verify", "compare every byte with the lock"),
        ("preflight", "what would stop a run here"),
        ("selftest", "each kernel, forward and backward, against fp32"),
        ("info", "what this image holds"),
        ("worker", "one rank of a launcher that is already there"),
    ):
        verbs.add_parser(name, help=text, description=text)
    verb = verbs.add_parser("launch", help="the equal accelerate line")
    verb.add_argument("--print", action="store_true", required=True, help="print it")
    terminal = record.Terminal()
    try:
        return dispatch(parser.parse_args(argv), terminal, started)
    except KitbuildError as error:
        return report(terminal, error)


__all__ = ["Problem", "main"]
