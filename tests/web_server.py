"""A web server on a free local port, for as long as a test needs it."""

from __future__ import annotations

import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator


class Handler(BaseHTTPRequestHandler):
    """Keeps connections, and says nothing."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is the test's doing."""


@contextlib.contextmanager
def running(handler: type[Handler], state: object, *, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """Serve with `handler`, whose `state` this is; the port."""
    server = _Server(("127.0.0.1", 0), type("Handler", (handler,), {"state": state}))
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
