"""How fast the guest looks at every byte, beside reading the same bytes: seconds per GB, and the ratio.

    python benchmarks/verify.py [--root DIR] [--rounds 5] [--output F]

`--root`: a directory laid out as an image (`$KITBUILD_HOME/envs/…`); default: a tree made here, of four shards of 1 GiB
and 20,000 small files, as a model and its packages are. Both sides use the same number of processes and the same
buffers; they alternate. "cold": the pages are dropped from the cache before (posix_fadvise), as at a container's first
start; "warm": they are in memory. The target holds for cold reads: a warm read is a copy of memory, and no digest is
as fast as that.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "benchmarks")]

from machine import keep, machine, summary  # noqa: E402 - a script: the checkout is put on the path first

from kitbuild.guest import verify  # noqa: E402
from kitbuild.guest.config import cores  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

SHARDS, SHARD_BYTES = 4, 1 << 30
SMALL_FILES, SMALL_BYTES = 20_000, 12_000
BLOCK = 1 << 22


def make(root: Path) -> None:
    """A tree with the sizes of a model and its environment; random bytes, so that no file system shortens them."""
    (root / "small").mkdir(parents=True)
    for number in range(SHARDS):
        with (root / f"model-{number}.safetensors").open("wb") as file:
            for _ in range(SHARD_BYTES // BLOCK):
                file.write(os.urandom(BLOCK))
    for number in range(SMALL_FILES):
        (root / "small" / f"{number}.py").write_bytes(os.urandom(SMALL_BYTES))


def digests(root: Path) -> dict[str, tuple[int | None, str]]:
    """What the guest would be told of each file."""
    found: dict[str, tuple[int | None, str]] = {}
    for path in sorted(root.rglob("*")):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                found[str(path)] = (path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())
    return found


def read_chunk(chunk: verify.Chunk) -> list[tuple[str, str]]:
    """Read as the guest does, and look at nothing."""
    buffer = bytearray(verify.BUFFER_BYTES)
    for path, _size, _digest, flags in chunk:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
        with open(descriptor, "rb", buffering=0) as file:  # noqa: PTH123 - as the guest
            place = asked = 0
            while count := file.readinto(buffer):
                place += count
                if place >= asked:
                    os.posix_fadvise(descriptor, place, 2 * verify.AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
                    asked = place + verify.AHEAD_BYTES
    return []


def drop(expected: dict[str, Any]) -> None:
    """Take the files' pages out of the cache."""
    os.sync()
    for path in expected:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def timed(work: Callable[[verify.Chunk], list[tuple[str, str]]], chunks: list[verify.Chunk]) -> float:
    """Seconds for all chunks in as many processes as there are cores."""
    begun = time.perf_counter()
    with multiprocessing.get_context("fork").Pool(max(1, min(cores(), len(chunks)))) as pool:
        wrong = [item for found in pool.map(work, chunks, chunksize=1) for item in found]
    seconds = time.perf_counter() - begun
    assert not wrong, wrong[:3]
    return seconds


def measure(root: Path, rounds: int) -> dict[str, Any]:
    """Alternating rounds, cold and warm."""
    expected = digests(root)
    chunks, size = list(verify.chunks(expected)), sum(size or 0 for size, _ in expected.values())
    result: dict[str, Any] = {"files": len(expected), "gb": round(size / 1e9, 3)}
    for state in ("cold", "warm"):
        times: dict[str, list[float]] = {"read": [], "verify": []}
        for number in range(rounds):
            sides = [("read", read_chunk), ("verify", verify.check_chunk)]
            for name, work in sides if number % 2 == 0 else sides[::-1]:
                if state == "cold":
                    drop(expected)
                times[name].append(timed(work, chunks))
        found = {name: summary(seconds) for name, seconds in times.items()}
        ratio = found["verify"]["median"] / found["read"]["median"]
        speed = {f"{name}_gb_per_second": round(size / 1e9 / item["median"], 2) for name, item in found.items()}
        result[state] = {**found, **speed, "ratio": round(ratio, 3)}
    return result


def main() -> None:
    """Print and keep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    facts = {"what": "kit verify against reading the same bytes", "target_cold_ratio": 1.2, "machine": machine()}
    if arguments.root:
        keep({**facts, **measure(arguments.root, arguments.rounds)}, arguments.output)
        return
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        make(Path(folder))
        keep({**facts, **measure(Path(folder), arguments.rounds)}, arguments.output)


if __name__ == "__main__":
    main()
