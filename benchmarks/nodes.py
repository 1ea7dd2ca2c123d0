"""How long nodes take to meet and to merge, against their number: processes of one machine, one thread each.

    PYTHONPATH=. $KITBUILD_TRAIN_PYTHON benchmarks/nodes.py 2 4 8 16 32

One line of JSON a number of nodes: seconds until all have met and compared, and to merge what 8 ranks a node told.
"""

from __future__ import annotations

import json
import multiprocessing
import socket
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kitbuild.guest.nodes import Meeting

RANKS_PER_NODE = 8
RESULT = {"calls": {"attention": 100}, "proven": {"sharing": {"whole": 1, "here": 1}}, "text": "x" * 2000}


def node(place: tuple[int, int, int, str], told: Any, ready: Any) -> None:
    """One node's meeting and merge."""
    rank, nodes, port, folder = place
    import torch.distributed  # noqa: F401, PLC0415, TID251 - before the clock

    places = SimpleNamespace(kit=Path(folder), checkpoints=Path(folder) / "checkpoints")
    config: Any = SimpleNamespace(
        launch=SimpleNamespace(nodes=nodes), places=places, lock_sha256="0" * 64, resume=False
    )
    environ = {"NODE_RANK": str(rank), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    meeting = Meeting(config, environ)
    ready.wait()
    clock = time.perf_counter()
    meeting.join()
    met = time.perf_counter() - clock
    meeting.watch()
    clock = time.perf_counter()
    meeting.merged({rank * RANKS_PER_NODE + item: dict(RESULT) for item in range(RANKS_PER_NODE)})
    told.put((met, time.perf_counter() - clock))
    meeting.leave(None)


def main() -> None:
    """Each number of nodes of the command line."""
    for nodes in map(int, sys.argv[1:]):
        with socket.socket() as found:
            found.bind(("localhost", 0))
            port = found.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        told, ready = context.Queue(), context.Barrier(nodes)
        with tempfile.TemporaryDirectory() as folder:
            every = [((rank, nodes, port, folder), told, ready) for rank in range(nodes)]
            started = [context.Process(target=node, args=given) for given in every]
            for process in started:
                process.start()
            lines = [told.get() for _ in range(nodes)]
            for process in started:
                process.join()
        met, merged = max(line[0] for line in lines), max(line[1] for line in lines)
        print(
            json.dumps({"nodes": nodes, "ranks": nodes * RANKS_PER_NODE, "meet_seconds": met, "merge_seconds": merged})
        )


if __name__ == "__main__":
    main()
