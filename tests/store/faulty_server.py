"""A web server whose answers fail as told: one list of faults per path, taken in turn, then all is well."""

from __future__ import annotations

import contextlib
import gzip
import re
import socket
import struct
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.web_server import Handler, running

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass
class Faulty:
    """Bodies by path; faults by path; what was asked."""

    bodies: dict[str, bytes] = field(default_factory=dict)
    faults: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    redirects: dict[str, str] = field(default_factory=dict)
    seen: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    ranges: bool = True
    delay_seconds: float = 0.0
    port: int = 0

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    def requests(self, path: str) -> list[dict[str, str]]:
        return [headers for seen, headers in self.seen if seen == path]


class _Handler(Handler):
    state: Faulty

    def do_GET(self) -> None:  # noqa: N802 - the name is http.server's
        state = self.state
        state.seen.append((self.path, {key.lower(): value for key, value in self.headers.items()}))
        if self.path in state.redirects:
            self._empty(302, {"Location": state.redirects[self.path]})
            return
        fault = state.faults[self.path].pop(0) if state.faults[self.path] else ""
        body = state.bodies.get(self.path)
        if fault.isdigit():
            self._empty(int(fault), {})
        elif match := re.fullmatch(r"(429|503) (.+)", fault):
            self._empty(int(match[1]), {"Retry-After": match[2]})
        elif fault == "hang":
            time.sleep(3)
        elif fault == "reset":
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.connection.close()
        elif body is None:
            self._empty(404, {})
        elif fault in {"chunked", "gzip"}:
            self._coded(body, fault)
        else:
            self._body(body, fault)

    def _empty(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": "0"}.items():
            self.send_header(key, value)
        self.end_headers()

    def _coded(self, body: bytes, fault: str) -> None:
        self.send_response(200)
        if fault == "gzip":
            body = gzip.compress(body)
            self.send_header("Content-Encoding", "gzip")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for offset in range(0, len(body), 50_000):
            piece = body[offset : offset + 50_000]
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        self.wfile.write(b"0\r\n\r\n")

    def _body(self, body: bytes, fault: str) -> None:
        start, status = 0, 200
        asked = self.headers.get("Range", "")
        if asked and self.state.ranges:
            start, status = int(asked.removeprefix("bytes=").rstrip("-")), 206
            if start >= len(body):
                self._empty(416, {})
                return
        rest = body[start:]
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        if fault != "no length":
            self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        if fault in {"truncated", "stall", "no length"}:
            rest = rest[: len(rest) // 2]
        if fault == "flipped":
            rest = rest[:-1] + bytes([rest[-1] ^ 1])
        pieces = 20 if fault == "drip" else max(1, len(rest) // 65536)
        for piece in range(pieces):
            self.wfile.write(rest[len(rest) * piece // pieces : len(rest) * (piece + 1) // pieces])
            time.sleep(0.1 if fault == "drip" else self.state.delay_seconds)
        if fault == "stall":
            self.wfile.flush()
            time.sleep(3)
        if fault in {"truncated", "no length"}:
            self.close_connection = True


@contextlib.contextmanager
def serving() -> Iterator[Faulty]:
    """A server on a free local port, stopped at the end."""
    state = Faulty()
    with running(_Handler, state) as state.port:
        yield state
