"""Adding up over virtual ranks in one fixed binary tree: inside a process as a counter, between processes in pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BUCKET_VALUES = 1 << 24  # exchanged at once: 32 MiB in bfloat16, 64 MiB in float32


class Sums:
    """Partial sums, carried as a binary number counts: two over 2^k virtual ranks become one over 2^(k+1).

    At most log2(N/W) of them wait at any time.
    """

    def __init__(self) -> None:
        self.held: list[tuple[int, list[torch.Tensor]]] = []

    def add(self, tensors: list[torch.Tensor]) -> None:
        """The next virtual rank's; the lists become ours."""
        size = 1
        while self.held and self.held[-1][0] == size:
            _, left = self.held.pop()
            torch._foreach_add_(left, tensors)
            tensors, size = left, 2 * size
        self.held.append((size, tensors))

    def take(self) -> list[torch.Tensor]:
        """The sum over a power of two."""
        ((_, total),) = self.held
        self.held = []
        return total


def total(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The same tree over a power of two of values."""
    sums = Sums()
    for value in values:
        sums.add([value.clone()])
    return sums.take()[0]


def merge(tensors: Sequence[torch.Tensor], *, rank: int, world: int) -> None:
    """The upper levels of the tree, in place: each process ends with the sum over all of them."""
    for pieces in _buckets(tensors):
        values = sum(piece.numel() for piece in pieces)
        padding = pieces[0].new_zeros(-values % world)
        flat = torch.cat([*pieces, padding])
        _merge_flat(flat, rank, world)
        torch._foreach_copy_(list(pieces), list(flat[:values].split([piece.numel() for piece in pieces])))


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Flat views of about one size, each list of one type."""
    pieces: list[torch.Tensor] = []
    held = 0
    for tensor in tensors:
        for piece in tensor.view(-1).split(BUCKET_VALUES):
            if pieces and (held + piece.numel() > BUCKET_VALUES or piece.dtype != pieces[0].dtype):
                yield pieces
                pieces, held = [], 0
            pieces.append(piece)
            held += piece.numel()
    if pieces:
        yield pieces


def _merge_flat(flat: torch.Tensor, rank: int, world: int) -> None:
    """Recursive halving, then doubling: at level k a process and the one 2^k away halve what they still add up.

    Each value is added up by one process in the tree's order, and copied to the others: (W-1)/W of the gradient is
    sent twice, as in a ring; the largest parts go to the nearest ranks.
    """
    low, high = 0, flat.numel()
    halves = []
    for level in range(world.bit_length() - 1):
        middle, partner = (low + high) // 2, rank ^ (1 << level)
        lower, upper = slice(low, middle), slice(middle, high)
        keep, give = (upper, lower) if rank >> level & 1 else (lower, upper)
        received = torch.empty_like(flat[keep])
        _swap(flat[give], received, partner)
        flat[keep] += received
        halves.append((keep, give, partner))
        low, high = keep.start, keep.stop
    for keep, give, partner in reversed(halves):
        _swap(flat[keep], flat[give], partner)


def _swap(given: torch.Tensor, received: torch.Tensor, partner: int) -> None:
    requests = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, given, partner), dist.P2POp(dist.irecv, received, partner)]
    )
    for request in requests:
        request.wait()


def fingerprint(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One number from every bit and its place, made where the tensors are."""
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    for tensor in tensors:
        flat = tensor.detach().contiguous().view(-1)
        for piece in flat.view(kinds[flat.element_size()]).split(BUCKET_VALUES):
            places = torch.arange(1, piece.numel() + 1, device=piece.device)
            total = total * 1_000_003 + (piece.long() * places).sum()
    return total
