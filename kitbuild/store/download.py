"""Fill the store from addresses: parallel, resumable, verified. Part of the foundation below the steps.

Bytes go to `work/<sha256>.part` and are hashed as they come; a part that a kill or a lost connection left
behind is taken up again by whoever asks next for the same digest. One process at a time works on a blob.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import re
import shutil
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO
from urllib.parse import unquote, urlsplit

from kitbuild.errors import ResolveError, VerificationError
from kitbuild.store.blobs import CHUNK_BYTES, space_errors
from kitbuild.store.http import Client, Passing, Timeouts, host

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import requests

    from kitbuild.progress import Progress
    from kitbuild.store.blobs import Store

ATTEMPTS = 5
_LONGEST_BACKOFF_SECONDS = 30.0
_PARTIAL, _RANGE_NOT_SATISFIABLE = 206, 416


@dataclass(frozen=True, kw_only=True)
class Download:
    """One file to fetch. `headers` (a token) are sent to the origin of `url` only and are never shown."""

    name: str
    url: str = field(repr=False)
    sha256: str | None = None
    size: int | None = None
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)


class Stopped(Exception):  # noqa: N818 - not an error: another download failed first
    """Asked to stop."""


def fetch(
    store: Store,
    downloads: Sequence[Download],
    *,
    progress: Progress,
    environ: Mapping[str, str],
    workers: int = 8,
    timeouts: Timeouts | None = None,
    sleep: Callable[[float], None] | None = None,
) -> dict[Download, str]:
    """Bring every file into the store; returns the sha256 of each. What is there already makes no request.

    The first file that cannot be had stops all: ResolveError (4), or VerificationError (7) for wrong bytes.
    """
    found = {item: item.sha256 for item in downloads if item.sha256 is not None and store.has(item.sha256)}
    missing = [item for item in dict.fromkeys(downloads) if item not in found]
    if not missing:
        return found
    sizes = [item.size for item in missing]
    total = float(sum(size or 0 for size in sizes)) if None not in sizes else None
    _check_space(store.root, total)
    client = Client(environ, timeouts=timeouts or Timeouts(), connections=workers)
    title = missing[0].name if len(missing) == 1 else f"{len(missing)} files"
    try:
        with progress.activity(f"Downloading {title}", total=total, unit="bytes") as advance:
            job = _Job(store=store, client=client, advance=_locked(advance), sleep=sleep)
            return found | _all(job, missing, workers=workers)
    finally:
        client.close()


def _all(job: _Job, missing: Sequence[Download], *, workers: int) -> dict[Download, str]:
    pool = concurrent.futures.ThreadPoolExecutor(max_workers=workers, thread_name_prefix="download")
    try:
        # The largest first: otherwise it starts last and the other workers idle beside it.
        ordered = sorted(missing, key=lambda item: -(item.size or 0))
        futures = {pool.submit(job.bring, item): item for item in ordered}
        for future in concurrent.futures.as_completed(futures):
            future.result()
        return {item: future.result() for future, item in futures.items()}
    finally:
        job.stop()
        pool.shutdown(wait=True, cancel_futures=True)


@dataclass(kw_only=True)
class _Job:
    """What the workers share."""

    store: Store
    client: Client
    advance: Callable[[float], None]
    sleep: Callable[[float], None] | None
    stopped: threading.Event = field(default_factory=threading.Event)
    _open: set[requests.Response] = field(default_factory=set)

    def stop(self) -> None:
        """Make every worker give up at once, also one that waits for a byte."""
        self.stopped.set()
        self.client.hang_up()
        for response in tuple(self._open):
            shutdown = getattr(response.raw, "shutdown", None)
            try:
                if shutdown:
                    shutdown()
            except (ValueError, RuntimeError, OSError):
                continue  # urllib3 raises for a connection that has ended or was given back meanwhile

    def bring(self, item: Download) -> str:
        """One file, from wherever it is."""
        if item.url.startswith("file:"):
            return self._copy(item)
        if item.sha256 is None:
            with self.store.scratch() as folder:
                return self._try_often(item, folder / "part")
        with self.store.making(f"blob {item.sha256}", stopped=self.stopped.is_set):
            self._give_up_if_stopped()
            if self.store.has(item.sha256):
                self.advance(item.size or 0)
                return item.sha256
            with space_errors(self.store.root):
                return self._try_often(item, self.store.root / "work" / f"{item.sha256}.part")

    def _copy(self, item: Download) -> str:
        path = Path(unquote(urlsplit(item.url).path))
        try:
            sha256 = self.store.add_file(path, name=item.name, expected=item.sha256)
        except FileNotFoundError as error:
            raise ResolveError(f"{item.name} is not on this disk any more") from error
        except (PermissionError, IsADirectoryError) as error:
            raise ResolveError(f"{item.name} cannot be read: {error.strerror}") from error
        self.advance(item.size or 0)
        return sha256

    def _try_often(self, item: Download, path: Path) -> str:
        failures, furthest = 0, 0
        while True:
            self._give_up_if_stopped()
            with _Part.open(path, advance=self.advance, resume=item.sha256 is not None) as part:
                resumed = part.size > 0
                furthest = max(furthest, part.size)
                try:
                    if item.size is None or part.size != item.size:
                        self._receive(item, part)
                    sha256 = part.finish()
                except Passing as passing:
                    self._give_up_if_stopped()
                    failures = 0 if part.size > furthest else failures + 1
                    if failures >= ATTEMPTS:
                        raise _given_up(item, passing) from passing
                    seconds = min(0.5 * 2**failures, _LONGEST_BACKOFF_SECONDS)
                    self._wait(seconds if passing.wait_seconds is None else passing.wait_seconds)
                    continue
            if resumed and sha256 != item.sha256:  # what was there may have come from elsewhere
                path.unlink()
                self.advance(-part.size)
                continue
            try:
                return self.store.adopt(path, sha256=sha256, name=item.name, expected=item.sha256)
            finally:
                path.unlink(missing_ok=True)

    def _receive(self, item: Download, part: _Part) -> None:
        """Append the rest of the body to `part`; whatever stops it leaves what came in place."""
        extra = {"Range": f"bytes={part.size}-"} if part.size else {}
        request = self.client.request("GET", item.url, name=item.name, headers=dict(item.headers), extra=extra)
        with request as response:
            total = _place(response, item=item, part=part)
            if total is not None and item.size is not None and total != item.size:
                part.restart()
                raise _wrong_size(item, f"{total} bytes")
            for chunk in self._chunks(response):
                part.write(chunk)
                if item.size is not None and part.size > item.size:
                    part.restart()
                    raise _wrong_size(item, f"more than {item.size} bytes")
        wanted = item.size if item.size is not None else total
        if wanted is not None and part.size < wanted:
            raise Passing(f"the answer ended after {part.size} of {wanted} bytes")

    def _chunks(self, response: requests.Response) -> Iterator[bytes]:
        self._open.add(response)
        try:
            # read1: what has come, so that a connection which breaks costs nothing that had arrived.
            while chunk := response.raw.read1(CHUNK_BYTES, decode_content=True):
                self._give_up_if_stopped()
                yield chunk
        finally:
            self._open.discard(response)

    def _give_up_if_stopped(self) -> None:
        if self.stopped.is_set():
            raise Stopped

    def _wait(self, seconds: float) -> None:
        if self.sleep:
            self.sleep(seconds)
        else:
            self.stopped.wait(seconds)


class _Part:
    """A file that grows, its digest, and the progress it stands for."""

    def __init__(self, stream: BinaryIO, advance: Callable[[float], None]) -> None:
        self._stream = stream
        self._advance = advance
        self._digest = hashlib.sha256()
        self.size = 0
        self.finished = False

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path, *, advance: Callable[[float], None], resume: bool) -> Iterator[_Part]:
        """Open for appending after what is there (`resume`) or from nothing."""
        with path.open("a+b" if resume else "w+b") as stream:
            part = cls(stream, advance)
            stream.seek(0)
            while chunk := stream.read(CHUNK_BYTES):
                part._count(chunk)
            try:
                yield part
            finally:
                if not part.finished:
                    advance(-part.size)
                    if not part.size:
                        path.unlink(missing_ok=True)

    def _count(self, chunk: bytes) -> None:
        self._digest.update(chunk)
        self.size += len(chunk)
        self._advance(len(chunk))

    def write(self, chunk: bytes) -> None:
        """Append."""
        self._stream.write(chunk)
        self._count(chunk)

    def restart(self) -> None:
        """Drop everything."""
        self._stream.truncate(0)
        self._advance(-self.size)
        self._digest, self.size = hashlib.sha256(), 0

    def finish(self) -> str:
        """The sha256 of all, written out."""
        self._stream.flush()
        self.finished = True
        return self._digest.hexdigest()


def _place(response: requests.Response, *, item: Download, part: _Part) -> int | None:
    """Make `part` stand where the body of `response` begins; the size of the whole where the server says it."""
    if response.status_code == _PARTIAL:
        match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
        if match and int(match[1]) == part.size:
            return None if match[2] == "*" else int(match[2])
    if response.status_code in {_PARTIAL, _RANGE_NOT_SATISFIABLE}:
        if not part.size:
            raise ResolveError(f"{item.name}: {host(response.url)} answers {response.status_code} to a plain request")
        part.restart()
        raise Passing("the server holds another file than before", wait_seconds=0.0)
    part.restart()
    length = response.headers.get("Content-Length", "")
    return int(length) if length.isdigit() and "Content-Encoding" not in response.headers else None


def _wrong_size(item: Download, found: str) -> VerificationError:
    return VerificationError(
        f"{item.name}: the server has {found}, expected {item.size}",
        hint="the source changed or the transfer was damaged; try again, then lock anew",
    )


def _given_up(item: Download, passing: Passing) -> ResolveError:
    return ResolveError(
        f"{item.name} cannot be fetched from {host(item.url)}: {passing.reason}",
        hint="what has arrived is kept; run the same command again to go on",
    )


def _locked(advance: Callable[[float], None]) -> Callable[[float], None]:
    lock = threading.Lock()

    def locked(amount: float) -> None:
        if amount:
            with lock:
                advance(amount)

    return locked


def _check_space(root: Path, total: float | None) -> None:
    free = shutil.disk_usage(root).free
    if total is not None and total > free:
        raise ResolveError(
            f"{total / 1e9:.1f} GB are to be downloaded and {free / 1e9:.1f} GB are free in the store {root}",
            hint="free some space (`kitbuild store gc`) or set KITBUILD_HOME to another disk",
        )


def remote_size(item: Download, *, environ: Mapping[str, str], timeouts: Timeouts | None = None) -> int | None:
    """The size in bytes where a HEAD request or the disk tells it, else None."""
    if item.url.startswith("file:"):
        path = Path(unquote(urlsplit(item.url).path))
        return path.stat().st_size if path.is_file() else None
    client = Client(environ, timeouts=timeouts or Timeouts(), connections=1)
    try:
        with client.request("HEAD", item.url, name=item.name, headers=dict(item.headers)) as response:
            length = response.headers.get("Content-Length", "")
            return int(length) if length.isdigit() and "Content-Encoding" not in response.headers else None
    except (Passing, ResolveError):
        return None
    finally:
        client.close()
