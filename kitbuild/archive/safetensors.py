"""Step 5, weights by hand: the digest of each tensor in a safetensors file, without any tensor library.

Format: https://huggingface.co/docs/safetensors/index#format (8 bytes little-endian header length, JSON header,
data; `data_offsets` count from the end of the header).
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import TYPE_CHECKING, Any

from kitbuild.archive.models import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kitbuild.archive.source import Stream

HEADER_LIMIT_BYTES = 100_000_000
CHUNK_BYTES = 1 << 20
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F4": 4,
}  # fmt: skip
_TORCH_NAMES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "float8_e5m2": "F8_E5M2", "float8_e4m3fn": "F8_E4M3", "int16": "I16",
    "uint16": "U16", "float16": "F16", "bfloat16": "BF16", "int32": "I32", "uint32": "U32", "float32": "F32",
    "float64": "F64", "int64": "I64", "uint64": "U64", "complex64": "C64",
}  # fmt: skip


def same_dtype(left: str, right: str) -> bool:
    """Whether two names (`F32`, `float32`, `torch.float32`) mean one type."""
    return _plain(left) == _plain(right)


def tensors(stream: Stream) -> Iterator[tuple[str, Tensor]]:
    """Each tensor in file order with its digest; `ValueError` says what is malformed."""
    size = stream.size
    header, start = _header(stream, size)
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: _offsets(item[0], item[1])):
        begin, stop = _offsets(name, entry)
        dtype, shape = entry.get("dtype"), entry.get("shape")
        if dtype not in BITS or not isinstance(shape, list) or not all(isinstance(n, int) and n >= 0 for n in shape):
            raise ValueError(f"tensor {name}: bad dtype or shape")
        if begin != end or (stop - begin) * 8 != math.prod(shape) * BITS[dtype] or start + stop > size:
            raise ValueError(f"tensor {name}: its bytes {begin}-{stop} do not fit its shape, its neighbour or the file")
        yield name, Tensor(dtype=dtype, shape=tuple(shape), sha256=_digest(stream, start + begin, stop - begin))
        end = stop
    if start + end != size:
        raise ValueError(f"{size - start - end} bytes after the last tensor")


def _plain(name: str) -> str:
    short = name.removeprefix("torch.")
    return _TORCH_NAMES.get(short, short)


def _header(stream: Stream, size: int) -> tuple[dict[str, dict[str, Any]], int]:
    stream.seek(0)
    length = int.from_bytes(stream.read(8), "little")
    if size < 8 or length > min(HEADER_LIMIT_BYTES, size - 8):  # noqa: PLR2004 - the format's length field
        raise ValueError("no safetensors header")
    try:
        header = json.loads(stream.read(length))
    except (ValueError, RecursionError) as error:
        raise ValueError("the safetensors header is not JSON") from error
    if not isinstance(header, dict) or not all(isinstance(entry, dict) for entry in header.values()):
        raise ValueError("the safetensors header is not a table of tensors")
    header.pop("__metadata__", None)
    return header, 8 + length


def _offsets(name: str, entry: dict[str, Any]) -> tuple[int, int]:
    match entry.get("data_offsets"):
        case [int(begin), int(stop)] if 0 <= begin <= stop:
            return begin, stop
        case _:
            raise ValueError(f"tensor {name}: bad data_offsets")


def _digest(stream: Stream, start: int, length: int) -> str:
    digest = hashlib.sha256()
    stream.seek(start)
    while length > 0:
        chunk = stream.read(min(CHUNK_BYTES, length))
        if not chunk:
            raise ValueError("the file is cut short")
        digest.update(chunk)
        length -= len(chunk)
    return digest.hexdigest()
