"""The one way by which the store asks a web server: proxies, CA and credentials as given, never leaked.

Redirects are followed here and not by requests: what goes with a request (a token) stays with its origin
(requests strips only `Authorization`: https://requests.readthedocs.io/en/latest/user/quickstart/#custom-headers).
"""

from __future__ import annotations

import contextlib
import email.utils
import re
import socket
import ssl
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

import requests
import urllib3.exceptions
from requests.adapters import HTTPAdapter

from kitbuild.errors import ResolveError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_REDIRECTS = {301, 302, 303, 307, 308}
PASSING = {408, 425, 429, 500, 502, 503, 504}
_MOST_REDIRECTS = 10
_LONGEST_ASKED_WAIT_SECONDS = 120.0
_CA_VARIABLES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Seconds to wait for a connection, and for the next byte of an answer."""

    connect_seconds: float = 15.0
    stall_seconds: float = 60.0


class Passing(Exception):  # noqa: N818 - not an error yet: it may pass
    """A failure that may pass: try again, after `wait_seconds` where the server asked for that."""

    def __init__(self, reason: str, *, wait_seconds: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wait_seconds = wait_seconds


def origin(url: str) -> tuple[str, str, int | None]:
    """Scheme, host and port: what a credential is good for."""
    parts = urlsplit(url)
    default = {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, (parts.hostname or "").lower(), parts.port or default


def host(url: str) -> str:
    """The host alone, for a message: no path, no query, no credential."""
    return urlsplit(url).hostname or "the server"


class _Adapter(HTTPAdapter):
    """Knows its open connections, so that a thread which waits for a silent server can be ended from another one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._live: weakref.WeakSet[Any] = weakref.WeakSet()
        self._ended = False

    def get_connection_with_tls_context(self, *arguments: Any, **options: Any) -> Any:
        """The pool for a request; its connections are known from now on."""
        pool: Any = super().get_connection_with_tls_context(*arguments, **options)
        if not issubclass(pool.ConnectionCls, _Known):
            pool.ConnectionCls = type("Connection", (_Known, pool.ConnectionCls), {"adapter": self})
        return pool

    def opened(self, connection: Any) -> None:
        """A connection stands."""
        self._live.add(connection)
        if self._ended:
            connection.close()
            raise ConnectionAbortedError("asked to stop")

    def hang_up(self) -> None:
        """End what is open and what is opened later."""
        self._ended = True
        for connection in tuple(self._live):
            with contextlib.suppress(OSError, AttributeError):
                connection.sock.shutdown(socket.SHUT_RDWR)


class _Known:
    """Mixed into urllib3's connections."""

    adapter: _Adapter

    def connect(self) -> None:
        """Connect, and tell."""
        super().connect()  # type: ignore[misc]
        self.adapter.opened(self)


class Client:
    """Asks web servers, in many threads at once."""

    def __init__(self, environ: Mapping[str, str], *, timeouts: Timeouts, connections: int) -> None:
        self._environ = {key.lower(): value for key, value in environ.items() if key.lower().endswith("_proxy")}
        self._timeouts = timeouts
        self._session = requests.Session()
        self._session.trust_env = False
        self._session.verify = next((environ[name] for name in _CA_VARIABLES if environ.get(name)), True)
        self._session.headers["Accept-Encoding"] = "identity"
        self._session.headers["User-Agent"] = "kitbuild"
        self._adapter = _Adapter(pool_connections=connections, pool_maxsize=connections, max_retries=0)
        self._session.mount("https://", self._adapter)
        self._session.mount("http://", self._adapter)

    def hang_up(self) -> None:
        """End every connection, also one that waits for the first byte of an answer; new ones fail."""
        self._adapter.hang_up()

    def close(self) -> None:
        """Close idle connections."""
        self._session.close()

    @contextlib.contextmanager
    def request(
        self, method: str, url: str, *, name: str, headers: Mapping[str, str], extra: Mapping[str, str] | None = None
    ) -> Iterator[requests.Response]:
        """An answer with a body still to be read; `headers` go to the origin of `url` only, `extra` to all.

        Raises `Passing` for what may pass and `ResolveError` for what will not.
        """
        with self.errors(url, name=name):
            response = self._follow(method, url, name=name, headers=headers, extra=extra or {})
            try:
                _check_status(response, name=name)
                yield response
            finally:
                response.close()

    def _follow(
        self, method: str, url: str, *, name: str, headers: Mapping[str, str], extra: Mapping[str, str]
    ) -> requests.Response:
        allowed = dict(headers)
        for _ in range(_MOST_REDIRECTS):
            response = self._session.request(
                method,
                url,
                headers={**allowed, **extra},
                stream=True,
                allow_redirects=False,
                proxies=self._proxies(url),
                timeout=(self._timeouts.connect_seconds, self._timeouts.stall_seconds),
            )
            target = response.headers.get("Location")
            if response.status_code not in _REDIRECTS or target is None:
                return response
            response.close()
            following = urljoin(url, target)
            if urlsplit(following).scheme not in {"http", "https"}:
                raise ResolveError(f"{name}: {host(url)} redirects to something that is no web address")
            if origin(following) != origin(url):
                allowed = {}
            url = following
        raise ResolveError(f"{name}: {host(url)} redirects more than {_MOST_REDIRECTS} times")

    def _proxies(self, url: str) -> dict[str, str]:
        scheme, name, _ = origin(url)
        if _bypassed(name, self._environ.get("no_proxy", "")):
            return {}
        proxy = self._environ.get(f"{scheme}_proxy") or self._environ.get("all_proxy")
        return {scheme: proxy} if proxy else {}

    @contextlib.contextmanager
    def errors(self, url: str, *, name: str) -> Iterator[None]:
        """Turn what requests and urllib3 raise into `Passing` or `ResolveError`."""
        try:
            yield
        except (requests.exceptions.SSLError, urllib3.exceptions.SSLError, ssl.SSLError) as error:
            raise ResolveError(
                f"{name}: the certificate of {host(url)} is not trusted here",
                hint="set SSL_CERT_FILE to the bundle that holds your CA",
            ) from error
        except (requests.exceptions.ConnectTimeout, urllib3.exceptions.ConnectTimeoutError) as error:
            raise Passing(f"no connection within {self._timeouts.connect_seconds:g} s") from error
        except (requests.exceptions.Timeout, urllib3.exceptions.ReadTimeoutError) as error:
            raise Passing(f"nothing received for {self._timeouts.stall_seconds:g} s") from error
        except (
            requests.exceptions.ConnectionError,
            requests.exceptions.ChunkedEncodingError,
            urllib3.exceptions.HTTPError,
            ConnectionError,
        ) as error:
            raise Passing(_connection_reason(error)) from error
        except requests.exceptions.RequestException as error:
            raise ResolveError(f"{name}: its address cannot be asked ({type(error).__name__})") from error
        except OSError as error:
            if isinstance(self._session.verify, str) and not Path(self._session.verify).exists():
                raise ResolveError(
                    f"the CA bundle {self._session.verify} cannot be read", hint="mend or unset SSL_CERT_FILE"
                ) from error
            raise


def _check_status(response: requests.Response, *, name: str) -> None:
    status, place = response.status_code, host(response.url)
    if status in PASSING:
        raise Passing(f"{place} answers {status}", wait_seconds=asked_wait(response))
    if status in {401, 403}:
        raise ResolveError(f"{name}: {place} refuses access ({status})", hint="give a token that may read it")
    if status in {404, 410}:
        raise ResolveError(f"{name} is not at {place} ({status})")
    if status >= 400 and status != 416:  # noqa: PLR2004 - 416 answers a Range that the caller made
        raise ResolveError(f"{name}: {place} answers {status}")


def asked_wait(response: requests.Response) -> float | None:
    """Seconds that the server asks for by Retry-After, as a number or a date; never more than two minutes."""
    value = response.headers.get("Retry-After", "").strip()
    if re.fullmatch(r"\d+(\.\d+)?", value):
        return min(float(value), _LONGEST_ASKED_WAIT_SECONDS)
    try:
        moment = email.utils.parsedate_to_datetime(value).timestamp()
    except ValueError:
        return None
    return min(max(moment - time.time(), 0.0), _LONGEST_ASKED_WAIT_SECONDS)


def _connection_reason(error: BaseException) -> str:
    text = str(error)
    for sign, reason in (
        ("NameResolution", "its name is not known here"),
        ("Name or service not known", "its name is not known here"),
        ("getaddrinfo", "its name is not known here"),
        ("Connection refused", "the connection is refused"),
        ("ProxyError", "the proxy refuses"),
        ("unreachable", "the network is unreachable"),
        ("reset", "the connection was reset"),
        ("IncompleteRead", "the answer ended early"),
        ("timed out", "the connection timed out"),
    ):
        if sign in text or sign in repr(error):
            return reason
    return "the connection broke"


def _bypassed(name: str, no_proxy: str) -> bool:
    entries = [entry.strip().lower().lstrip(".").partition(":")[0] for entry in no_proxy.split(",") if entry.strip()]
    return any(entry in {"*", name} or name.endswith(f".{entry}") for entry in entries)
