"""Between verify and launch: the nodes of a job meet, compare what they hold, and watch each other until the end.

One store on the first node, at MASTER_ADDR:MASTER_PORT, is all that nodes share beside the folder of checkpoints. It
has taken its last connection before a worker is forked; the workers' own store is the first rank's.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kitbuild.errors import KitbuildError, Problem, RunError, VerificationError
from kitbuild.guest import failures, manifest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kitbuild.guest.config import Config

JOIN_SECONDS = 300.0
"""How long a node waits for all others; they may still be loading the image or hashing a model."""
LOST_SECONDS = 60.0
"""A node that was not heard of for this long is lost, and the run ends."""
BEAT_SECONDS = 1.0
TELL_SECONDS = 5.0
BACKEND = "kit"
SHARED = "KIT_SHARED_CHECKPOINTS"


class Meeting:
    """A node's place among the others."""

    def __init__(self, config: Config, environ: Mapping[str, str]) -> None:
        self.config, self.nodes = config, config.launch.nodes
        self.rank = int(environ["NODE_RANK"])
        self.address, self.port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        self.join_seconds = float(environ.get("KIT_JOIN_SECONDS") or JOIN_SECONDS)
        self.lost_seconds = float(environ.get("KIT_LOST_SECONDS") or LOST_SECONDS)
        self.host = socket.gethostname()
        self.hosts: dict[int, str] = {}
        self.verdict: KitbuildError | None = None
        self.over = threading.Event()
        self._answered = time.monotonic()
        self.store: Any = None

    def join(self) -> None:
        """Meet all nodes; raise on each of them where one holds something else (exit 7)."""
        from torch.distributed import TCPStore

        deadline = time.monotonic() + self.join_seconds
        try:
            self.store = TCPStore(
                self.address, self.port, is_master=self.rank == 0, wait_for_workers=False,
                timeout=timedelta(seconds=self.join_seconds),
            )  # fmt: skip
        except Exception as error:
            text = f"node {self.rank} found no node 0 at {self.address}:{self.port} within {self.join_seconds:.0f} s"
            raise RunError(text, hint="see whether node 0 ended, and whether this node reaches that address") from error
        if self.rank == 0:
            _share(self.config.places.checkpoints)
        self.store.set(f"held/{self.rank}", json.dumps(identity(self.config, self.host)))
        held = self._everyone(deadline)
        self.hosts = {rank: item["host"] for rank, item in held.items()}
        # One folder for all: the first rank writes there, instead of each node's first into its own.
        if len({item["checkpoints"] for item in held.values()}) == 1:
            os.environ[SHARED] = "1"
        problems = list(differences(held))
        if problems:
            # The first node has the store: it leaves last.
            self.store.add("left", 1)
            self._wait_until(lambda: self.rank > 0 or self.store.add("left", 0) == self.nodes, TELL_SECONDS)
            raise VerificationError(
                f"the nodes of the job are not alike: {'; '.join(problem.message for problem in problems[:3])}",
                hint="nothing was trained; start the same image with the same lock on every node",
                problems=tuple(problems),
            )

    def _everyone(self, deadline: float) -> dict[int, dict[str, Any]]:
        names = {rank: f"held/{rank}" for rank in range(self.nodes)}
        self._wait_until(lambda: self.store.check(list(names.values())), deadline - time.monotonic())
        missing = [rank for rank, name in names.items() if not self.store.check([name])]
        if missing:
            text = f"{len(missing)} of {self.nodes} nodes did not come within {self.join_seconds:.0f} s: {_listed(missing)}"
            raise RunError(text, hint="see whether they ended: an error before the meeting is in their own logs")
        return {rank: json.loads(self.store.get(name)) for rank, name in names.items()}

    def _wait_until(self, condition: Any, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not condition() and time.monotonic() < until:
            time.sleep(0.05)

    def watch(self) -> None:
        """From now on, say that we live and see that the others do."""
        self._answered = time.monotonic()
        threading.Thread(target=self._beat, daemon=True).start()
        threading.Thread(target=self._look, daemon=True).start()

    def _beat(self) -> None:
        seen: dict[int, tuple[int, float]] = {}
        with contextlib.suppress(Exception):  # The store is gone: `_look` tells.
            while not self.over.wait(BEAT_SECONDS):
                now = time.monotonic()
                self.store.add(f"beat/{self.rank}", 1)
                for rank in self._others():
                    count = self.store.add(f"beat/{rank}", 0)
                    if self.store.check([f"end/{rank}"]) or seen.get(rank, (-1, 0.0))[0] != count:
                        seen[rank] = (count, now)
                    elif now - seen[rank][1] > self.lost_seconds:
                        self.end(rank)
                self._answered = time.monotonic()

    def _others(self) -> list[int]:
        """The first node hears all; each of the others hears the first, which has the store."""
        return [rank for rank in range(self.nodes) if rank != self.rank] if self.rank == 0 else [0]

    def _look(self) -> None:
        while not self.over.wait(BEAT_SECONDS):
            if time.monotonic() - self._answered > self.lost_seconds:
                self.end(0 if self.rank else None)

    def end(self, rank: int | None) -> None:
        """A node is lost: end the workers, which may wait for it for half an hour."""
        if self.over.is_set():
            return
        who = "the other nodes" if rank is None else f"node {rank} ({self.hosts.get(rank)})"
        self.verdict = RunError(
            f"{who} did not answer for {self.lost_seconds:.0f} s: stopped, cut off, or its machine is down",
            hint="start the job again with KIT_RESUME=auto: it goes on from the last whole checkpoint",
        )
        self.over.set()
        for process in _children(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def first(self, error: KitbuildError) -> KitbuildError:
        """What came first over all nodes: ours, or the one of a node with which our workers lost their connection."""
        if self.verdict is not None:
            return self.verdict
        if not failures.LOST_PEER.search(error.message):
            return error
        told: list[tuple[int, dict[str, Any]]] = []

        def look() -> bool:
            for rank in range(self.nodes):
                if rank != self.rank and self.store.check([f"end/{rank}"]):
                    item = json.loads(self.store.get(f"end/{rank}"))
                    if item["exit_code"] and not failures.LOST_PEER.search(item["message"]):
                        told.append((rank, item))
            return bool(told)

        with contextlib.suppress(Exception):
            self._wait_until(look, TELL_SECONDS)
        if told:
            rank, item = told[0]
            return failures.revive({**item, "message": f"node {rank} ({self.hosts[rank]}): {item['message']}"})
        return RunError(
            f"the connection to another node was lost: {error.message}",
            hint="see the logs of the other nodes; start the job again with KIT_RESUME=auto to go on",
        )

    def merged(self, results: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """On the first node what every rank of the job left; on the others their own."""
        if self.rank:
            self.store.set(f"results/{self.rank}", json.dumps(results))
            return results
        names = [f"results/{rank}" for rank in range(1, self.nodes)]
        self._wait_until(lambda: self.verdict is not None or self.store.check(names), self.lost_seconds)
        if not self.store.check(names):
            raise self.verdict or RunError("not every node told what its ranks did", hint="see their logs")
        for name in names:
            results |= {int(rank): item for rank, item in json.loads(self.store.get(name)).items()}
        return results

    def leave(self, error: KitbuildError | None) -> None:
        """Say how it ended here; the first node waits for the others, whose store it has."""
        if self.store is None or self.verdict is not None:
            self.over.set()
            return
        told = error.as_json() if error else {"exit_code": 0, "code": "ok", "message": "", "hint": None}
        with contextlib.suppress(Exception):
            self.store.set(f"end/{self.rank}", json.dumps(told))
            if self.rank == 0:
                names = [f"end/{rank}" for rank in range(1, self.nodes)]
                self._wait_until(lambda: self.store.check(names) or self.verdict is not None, 2 * TELL_SECONDS)
        self.over.set()

    def rendezvous(self) -> Any:
        """Torchrun's handler over our store; the workers' own store is the first rank's."""
        from torch.distributed import PrefixStore
        from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousStoreInfo
        from torch.distributed.elastic.utils.distributed import get_free_port

        if self.rank == 0:
            self.store.set("port", str(get_free_port()))
        info = RendezvousStoreInfo(self.address, int(self.store.get("port")))
        return RendezvousInfo(PrefixStore("elastic", self.store), self.rank, self.nodes, info)


def handler(meeting: Meeting) -> str:
    """Register the rendezvous of a meeting; the name for LaunchConfig."""
    from torch.distributed.elastic.rendezvous import RendezvousHandler, rendezvous_handler_registry

    class Handler(RendezvousHandler):  # type: ignore[misc]
        def get_backend(self) -> str:
            return BACKEND

        def next_rendezvous(self) -> Any:
            return meeting.rendezvous()

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None:
            return

        def num_nodes_waiting(self) -> int:
            return 0

        def get_run_id(self) -> str:
            return BACKEND

        def shutdown(self) -> bool:
            return True

    rendezvous_handler_registry.register(BACKEND, lambda _parameters: Handler())
    return BACKEND


def identity(config: Config, host: str) -> dict[str, Any]:
    """What must be equal on every node, each file of it verified by then; and which folder of checkpoints it sees."""
    return {
        "host": host,
        "lock": config.lock_sha256,
        "image": manifest.content_digest(config) or "none",
        "nodes": config.launch.nodes,
        "resume": config.resume,
        "checkpoints": _shared(config.places.checkpoints),
    }


NAMES = {
    "lock": "lock",
    "image": "image",
    "nodes": "number of nodes",
    "resume": "wish to resume",
}


def differences(held: dict[int, dict[str, Any]]) -> list[Problem]:
    """Where a node is not as the first one is. Pure."""
    first, found = held[0], []
    for rank, item in sorted(held.items()):
        for name, what in NAMES.items():
            if item[name] != first[name]:
                text = f"node {rank} ({item['host']}) has another {what} than node 0 ({first['host']})"
                found.append(Problem(message=text, key=name))
    return found


def _share(checkpoints: Path) -> None:
    checkpoints.mkdir(parents=True, exist_ok=True)
    (checkpoints / ".job").write_text(f"{socket.gethostname()} {time.time_ns()}")


def _shared(checkpoints: Path) -> str:
    """What the first node wrote there, where it is the same folder; a file system may show it a little later."""
    for _ in range(10):
        with contextlib.suppress(OSError):
            return (checkpoints / ".job").read_text()
        time.sleep(0.1)
    return ""


def _children(parent: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(path.parent.name))
    return found


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown  # noqa: PLR2004 - fits a line
