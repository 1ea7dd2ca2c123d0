"""Merges gradients on several processes: run by test_tree with the training Python; prints what each ended with."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, sys.argv[1])
from kitbuild.guest import tree

COUNT = 8
SHAPES = ((3, 5), (), (64, 33), (1,), (700,))  # sizes that no number of processes divides
tree.BUCKET_VALUES = 1000  # several buckets, and a tensor in pieces


def gradients(virtual_rank: int) -> list[torch.Tensor]:
    """Magnitudes so far apart that another order of sums is another number."""
    torch.manual_seed(virtual_rank)
    made = [torch.randn(shape) * 10 ** torch.randint(-4, 5, shape) for shape in SHAPES]
    return [made[0].bfloat16(), *made[1:3], made[3].double(), made[4].bfloat16()]


def digest(tensors: list[torch.Tensor]) -> str:
    held = hashlib.sha256()
    for tensor in tensors:
        held.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return held.hexdigest()


def recursive(first: int, count: int) -> list[torch.Tensor]:
    """The tree as it is defined."""
    if count == 1:
        return gradients(first)
    halves = recursive(first, count // 2), recursive(first + count // 2, count // 2)
    return [left + right for left, right in zip(*halves, strict=True)]


def process(rank: int, world: int, folder: Path) -> None:
    if world > 1:
        store = dist.FileStore(str(folder / f"store-{world}"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    sums, share = tree.Sums(), COUNT // world
    waiting = []
    for virtual_rank in range(rank * share, (rank + 1) * share):
        sums.add(gradients(virtual_rank))
        waiting.append(len(sums.held))
    merged = sums.take()
    if world > 1:
        tree.merge(merged, rank=rank, world=world)
    told = {"digest": digest(merged), "waiting": max(waiting), "fingerprint": tree.fingerprint(merged).item()}
    (folder / f"{world}-{rank}.json").write_text(json.dumps(told))


def main() -> None:
    folder = Path(tempfile.mkdtemp(dir=sys.argv[2]))
    torch.set_num_threads(1)
    for world in (1, 2, 4, 8):
        children = []
        for rank in range(world):
            child = os.fork()
            if not child:
                process(rank, world, folder)
                os._exit(0)
            children.append(child)
        assert all(os.waitpid(child, 0)[1] == 0 for child in children)
    one = torch.linspace(0, 1, 2000)
    nudged, swapped = one.clone(), one.clone()
    nudged[1500] = torch.nextafter(nudged[1500], torch.tensor(2.0))
    swapped[[10, 1200]] = swapped[[1200, 10]]
    plain = gradients(0)
    for index in range(1, COUNT):
        plain = [left + right for left, right in zip(plain, gradients(index), strict=True)]
    print(
        json.dumps(
            {
                "expected": digest(recursive(0, COUNT)),
                "one_after_the_other": digest(plain),
                "found": {path.stem: json.loads(path.read_bytes()) for path in sorted(folder.glob("*.json"))},
                "fingerprints": [tree.fingerprint([item, one]).item() for item in (one, nudged, swapped)],
                "scalar": tree.total([torch.tensor(value) for value in (1e8, 1.0, -1e8, 1.0)]).item(),
            }
        )
    )


main()
