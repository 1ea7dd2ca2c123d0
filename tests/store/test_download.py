"""Downloads into the store, against a server that fails in every way that servers do."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from typing import TYPE_CHECKING

import pytest

from kitbuild.errors import ResolveError, VerificationError
from kitbuild.progress import Silent
from kitbuild.store import Store
from kitbuild.store.download import Download, fetch
from kitbuild.store.http import Timeouts
from tests.store.faulty_server import Faulty, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

BODY = random.Random(7).randbytes(3_000_000)  # noqa: S311 - any bytes that do not compress
SHA256 = hashlib.sha256(BODY).hexdigest()
QUICK = Timeouts(connect_seconds=1.0, stall_seconds=0.5)


def download(server: Faulty, path: str = "/w.whl", **changes: object) -> Download:
    fields: dict[str, object] = {"name": "w.whl", "url": server.url(path), "sha256": SHA256, "size": len(BODY)}
    return Download(**(fields | changes))  # type: ignore[arg-type]


def bring(store: Store, *items: Download, waits: list[float] | None = None) -> dict[Download, str]:
    waited = waits if waits is not None else []
    return fetch(store, items, progress=Silent(), environ={}, timeouts=QUICK, sleep=waited.append)


def leftovers(store: Store) -> list[str]:
    return sorted(path.name for path in (store.root / "work").iterdir())


def test_a_file_arrives_once(store: Store, server: Faulty) -> None:
    """The blob has the bytes; asking again makes no request and leaves nothing in work/."""
    server.bodies["/w.whl"] = BODY
    item = download(server)
    assert bring(store, item) == {item: SHA256}
    assert store.path(SHA256).read_bytes() == BODY
    assert bring(store, item) == {item: SHA256}
    assert len(server.requests("/w.whl")) == 1
    assert leftovers(store) == []


def test_a_file_of_unknown_digest_gets_one(store: Store, server: Faulty) -> None:
    """Where an index gives no hash, the digest comes from the bytes."""
    server.bodies["/w.whl"] = BODY
    item = download(server, sha256=None, size=None)
    assert bring(store, item) == {item: SHA256}


def test_an_empty_file_is_a_file(store: Store, server: Faulty) -> None:
    """No byte at all is stored as such."""
    server.bodies["/e"] = b""
    empty = hashlib.sha256(b"").hexdigest()
    item = download(server, "/e", sha256=empty, size=0)
    assert bring(store, item) == {item: empty}
    assert store.path(empty).read_bytes() == b""


@pytest.mark.parametrize("coding", ["chunked", "gzip"])
@pytest.mark.parametrize("known_size", [True, False])
def test_a_coded_body_is_read_as_what_it_stands_for(
    store: Store, server: Faulty, *, coding: str, known_size: bool
) -> None:
    """Chunks, and a compression that was not asked for."""
    server.bodies["/w.whl"] = BODY
    server.faults["/w.whl"] = [coding]
    bring(store, download(server, size=len(BODY) if known_size else None))
    assert store.path(SHA256).read_bytes() == BODY
    assert len(server.requests("/w.whl")) == 1


@pytest.mark.parametrize("fault", ["429", "500", "502", "503", "504", "reset", "truncated", "hang", "stall"])
def test_what_may_pass_is_tried_again(store: Store, server: Faulty, fault: str) -> None:
    """One failure of each passing kind still ends with the right bytes."""
    server.bodies["/w.whl"] = BODY
    server.faults["/w.whl"] = [fault]
    bring(store, download(server))
    assert store.path(SHA256).read_bytes() == BODY
    assert len(server.requests("/w.whl")) == 2


def test_the_server_says_how_long_to_wait(store: Store, server: Faulty) -> None:
    """Retry-After in seconds is obeyed; a date in the past is no wait; without one the wait doubles; two minutes are most."""
    server.bodies["/w.whl"] = BODY
    server.faults["/w.whl"] = ["429 7", "503 Wed, 21 Oct 2015 07:28:00 GMT", "503", "503 3600"]
    waits: list[float] = []
    bring(store, download(server), waits=waits)
    assert waits == [7.0, 0.0, 4.0, 120.0]


def test_a_slow_server_is_waited_for(store: Store, server: Faulty) -> None:
    """What keeps coming is no stall, however long all of it takes."""
    server.bodies["/w.whl"] = BODY
    server.faults["/w.whl"] = ["drip"]
    begun = time.monotonic()
    bring(store, download(server))
    assert time.monotonic() - begun > 3 * QUICK.stall_seconds
    assert len(server.requests("/w.whl")) == 1
    assert store.path(SHA256).read_bytes() == BODY


def test_a_truncated_body_is_taken_up_where_it_ended(store: Store, server: Faulty) -> None:
    """The second request asks for the rest only."""
    server.bodies["/w.whl"] = BODY
    server.faults["/w.whl"] = ["truncated"]
    bring(store, download(server))
    assert server.requests("/w.whl")[1]["range"] == f"bytes={len(BODY) // 2}-"
    assert store.path(SHA256).read_bytes() == BODY


def test_a_server_without_ranges_sends_all_again(store: Store, server: Faulty) -> None:
    """A 200 to a Range request starts the file over."""
    server.ranges = False
    server.bodies["/w.whl"] = BODY
    server.faults["/w.whl"] = ["truncated"]
    bring(store, download(server))
    assert store.path(SHA256).read_bytes() == BODY


def test_a_body_that_ends_early_without_a_length_is_seen(store: Store, server: Faulty) -> None:
    """Where only the lock knows the size, half a file is not taken for the whole."""
    server.bodies["/w.whl"] = BODY
    server.faults["/w.whl"] = ["no length"]
    bring(store, download(server))
    assert store.path(SHA256).read_bytes() == BODY


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("503", "127.0.0.1 answers 503"),
        ("429", "127.0.0.1 answers 429"),
        ("hang", "nothing received for 0.5 s"),
    ],
)
def test_what_does_not_pass_is_exit_4(store: Store, server: Faulty, fault: str, reason: str) -> None:
    """After five tries the message names file, host and reason."""
    server.bodies["/w.whl"] = BODY
    server.faults["/w.whl"] = [fault] * 9
    with pytest.raises(ResolveError) as caught:
        bring(store, download(server))
    assert caught.value.message == f"w.whl cannot be fetched from 127.0.0.1: {reason}"
    assert len(server.requests("/w.whl")) == 5
    assert leftovers(store) == []


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("404", "w.whl is not at 127.0.0.1 (404)"),
        ("410", "w.whl is not at 127.0.0.1 (410)"),
        ("401", "w.whl: 127.0.0.1 refuses access (401)"),
        ("403", "w.whl: 127.0.0.1 refuses access (403)"),
        ("418", "w.whl: 127.0.0.1 answers 418"),
    ],
)
def test_what_will_not_pass_is_asked_once(store: Store, server: Faulty, fault: str, message: str) -> None:
    """A refusal is final."""
    server.faults["/w.whl"] = [fault] * 9
    with pytest.raises(ResolveError) as caught:
        bring(store, download(server))
    assert caught.value.message == message
    assert len(server.requests("/w.whl")) == 1


def test_no_server_at_all_is_exit_4(store: Store) -> None:
    """A refused connection is said as such."""
    with serving() as gone:
        item = download(gone)
    with pytest.raises(ResolveError, match=r"^w\.whl cannot be fetched from 127\.0\.0\.1: the connection is refused$"):
        bring(store, item)


def test_an_unknown_host_is_exit_4(store: Store) -> None:
    """A name that does not resolve is said as such."""
    item = Download(name="w.whl", url="https://index.invalid/w.whl?token=secret", sha256=SHA256, size=1)
    with pytest.raises(ResolveError) as caught:
        bring(store, item)
    assert caught.value.message == "w.whl cannot be fetched from index.invalid: its name is not known here"


@pytest.mark.parametrize("known_size", [True, False])
def test_a_wrong_byte_is_exit_7(store: Store, server: Faulty, *, known_size: bool) -> None:
    """A flipped bit of the right length is refused by name, and nothing of it stays."""
    server.bodies["/w.whl"] = BODY
    server.faults["/w.whl"] = ["flipped"] * 9
    with pytest.raises(VerificationError, match=rf"^w\.whl: sha256 is [0-9a-f]{{64}}, expected {SHA256}$"):
        bring(store, download(server, size=len(BODY) if known_size else None))
    assert len(server.requests("/w.whl")) == 1
    assert leftovers(store) == []
    assert not store.has(SHA256)


@pytest.mark.parametrize("other", [BODY[:-5], BODY + b"12345"])
def test_another_size_is_exit_7_at_once(store: Store, server: Faulty, other: bytes) -> None:
    """A body of another length than the locked one is not read to its end."""
    server.bodies["/w.whl"] = other
    with pytest.raises(VerificationError) as caught:
        bring(store, download(server))
    assert caught.value.message == f"w.whl: the server has {len(other)} bytes, expected {len(BODY)}"
    assert leftovers(store) == []


def test_a_part_with_wrong_bytes_is_fetched_anew(store: Store, server: Faulty) -> None:
    """What lay in work/ proves nothing: a mismatch after a resume starts over once."""
    server.bodies["/w.whl"] = BODY
    (store.root / "work" / f"{SHA256}.part").write_bytes(b"x" * 1000)
    bring(store, download(server))
    assert [request.get("range") for request in server.requests("/w.whl")] == ["bytes=1000-", None]
    assert store.path(SHA256).read_bytes() == BODY


def test_a_part_longer_than_the_file_is_dropped(store: Store, server: Faulty) -> None:
    """A 416 starts over."""
    server.bodies["/w.whl"] = BODY
    (store.root / "work" / f"{SHA256}.part").write_bytes(BODY + b"more")
    bring(store, download(server))
    assert store.path(SHA256).read_bytes() == BODY


def test_a_complete_part_needs_no_request(store: Store, server: Faulty) -> None:
    """A kill between the last byte and the rename costs nothing."""
    (store.root / "work" / f"{SHA256}.part").write_bytes(BODY)
    bring(store, download(server))
    assert server.seen == []
    assert store.has(SHA256)


def test_a_token_stays_with_its_origin(store: Store, server: Faulty) -> None:
    """A redirect to another origin carries no header of ours, also one that requests would keep."""
    with serving() as other:
        other.bodies["/cdn"] = BODY
        server.redirects["/w.whl"] = "/again"
        server.redirects["/again"] = other.url("/cdn")
        headers = (("Authorization", "Bearer s3cret"), ("X-Token", "s3cret"))
        bring(store, download(server, headers=headers))
        assert [request.get("x-token") for request in server.requests("/again")] == ["s3cret"]
        assert "s3cret" not in str(other.seen)


def test_a_token_is_in_no_error(store: Store, server: Faulty) -> None:
    """Neither message nor representation shows headers or the address's query."""
    server.faults["/w.whl?sig=s3cret"] = ["403"]
    item = download(server, "/w.whl?sig=s3cret", headers=(("Authorization", "Bearer s3cret"),))
    with pytest.raises(ResolveError) as caught:
        bring(store, item)
    assert "s3cret" not in f"{caught.value} {caught.value.as_json()} {item!r}"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("/w.whl", "w.whl: 127.0.0.1 redirects more than 10 times"),
        ("file:///etc/passwd", "w.whl: 127.0.0.1 redirects to something that is no web address"),
    ],
)
def test_redirects_have_limits(store: Store, server: Faulty, target: str, message: str) -> None:
    """Neither a circle nor a file of this machine is followed."""
    server.redirects["/w.whl"] = target
    with pytest.raises(ResolveError) as caught:
        bring(store, download(server))
    assert caught.value.message == message


def test_files_on_disk_are_copied_and_verified(store: Store, tmp_path: Path) -> None:
    """A file: address is a copy; a wrong digest or an absent file is said."""
    path = tmp_path / "a b.whl"
    path.write_bytes(BODY)
    item = Download(name="a b.whl", url=path.as_uri(), sha256=SHA256)
    assert bring(store, item) == {item: SHA256}
    with pytest.raises(VerificationError):
        bring(store, Download(name="a b.whl", url=path.as_uri(), sha256="0" * 64))
    with pytest.raises(ResolveError, match=r"^gone\.whl is not on this disk any more$"):
        bring(store, Download(name="gone.whl", url=(tmp_path / "gone.whl").as_uri(), sha256="0" * 64))


def test_many_files_come_at_once(store: Store, server: Faulty) -> None:
    """Forty files, some the same, arrive with one request per content."""
    bodies = {f"/{number}": f"file {number}".encode() for number in range(40)}
    server.bodies |= bodies
    items = [
        Download(name=path, url=server.url(path), sha256=hashlib.sha256(body).hexdigest(), size=len(body))
        for path, body in bodies.items()
    ]
    found = bring(store, *items, *items)
    assert len(found) == 40
    assert len(server.seen) == 40


def test_the_first_failure_stops_the_others(store: Store, server: Faulty) -> None:
    """A 404 beside a slow download ends both soon; the slow one's part stays for the next time."""
    server.bodies["/w.whl"] = BODY
    server.delay_seconds = 0.2
    begun = time.monotonic()
    with pytest.raises(ResolveError, match=r"^gone is not at"):
        bring(store, download(server), Download(name="gone", url=server.url("/gone"), sha256="1" * 64, size=1))
    assert time.monotonic() - begun < 5
    assert not store.has(SHA256)


def test_progress_adds_up(store: Store, server: Faulty) -> None:
    """Whatever is dropped and fetched again, the sum of advances is the size."""
    server.bodies["/w.whl"] = BODY
    server.ranges = False
    server.faults["/w.whl"] = ["truncated", "503", "stall"]
    sums: list[float] = []

    class Counting(Silent):
        @contextlib.contextmanager
        def activity(self, title: str, *, total: float | None, unit: str) -> Iterator[Callable[[float], None]]:
            assert (title, total, unit) == ("Downloading w.whl", float(len(BODY)), "bytes")
            yield sums.append

    fetch(store, [download(server)], progress=Counting(), environ={}, timeouts=QUICK, sleep=lambda _: None)
    assert sum(sums) == len(BODY)


def test_a_full_disk_is_exit_4(store: Store, server: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    """No space while writing: one clear error, and the store is as before."""
    server.bodies["/w.whl"] = BODY

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("kitbuild.store.download._Part.write", full)
    with pytest.raises(ResolveError) as caught:
        bring(store, download(server))
    assert caught.value.message == f"the store {store.root} cannot be written: No space left on device"
    assert not store.has(SHA256)
    assert leftovers(store) == []


def test_a_really_full_disk_is_exit_4(tmp_path: Path, server: Faulty) -> None:
    """On a file system of 2 MB, a file of 3 MB of unknown size fails cleanly and a small one still fits."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(small)], check=False, capture_output=True
    )
    home = small if mounted.returncode == 0 else tmp_path / "unmounted"
    try:
        store = Store.open({"KITBUILD_HOME": str(home)})
        server.bodies |= {"/w.whl": BODY, "/s": b"small"}
        if mounted.returncode == 0:
            with pytest.raises(ResolveError, match=r"^the store .* cannot be written: No space left on device$"):
                bring(store, download(server, size=None))
            with pytest.raises(ResolveError, match=r"^0\.0 GB are to be downloaded and 0\.0 GB are free in the store"):
                bring(store, download(server))
        for path in (store.root / "work").iterdir():
            path.unlink()
        sha256 = hashlib.sha256(b"small").hexdigest()
        bring(store, Download(name="s", url=server.url("/s"), sha256=sha256, size=5))
        assert store.has(sha256)
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", str(small)], check=True)


CHILD = textwrap.dedent("""
    import sys
    from kitbuild.progress import Silent
    from kitbuild.store import Store
    from kitbuild.store.download import Download, fetch
    home, url, sha256, size = sys.argv[1:]
    item = Download(name="w.whl", url=url, sha256=sha256, size=int(size))
    fetch(Store.open({"KITBUILD_HOME": home}), [item], progress=Silent(), environ={})
""")


@pytest.fixture
def child(store: Store, server: Faulty) -> Callable[[], subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", CHILD, str(store.root), server.url("/w.whl"), SHA256, str(len(BODY))]
    return lambda: subprocess.Popen(command)


def test_two_processes_fetch_a_blob_once(
    store: Store, server: Faulty, child: Callable[[], subprocess.Popen[bytes]]
) -> None:
    """The second waits for the first and makes no request."""
    server.bodies["/w.whl"] = BODY
    server.delay_seconds = 0.02
    children = [child(), child()]
    assert [process.wait(timeout=60) for process in children] == [0, 0]
    assert len(server.requests("/w.whl")) == 1
    assert store.path(SHA256).read_bytes() == BODY


def test_a_kill_in_the_middle_costs_only_the_rest(
    store: Store, server: Faulty, child: Callable[[], subprocess.Popen[bytes]]
) -> None:
    """After SIGKILL the store is valid, and the next process goes on from the part."""
    server.bodies["/w.whl"] = BODY
    server.delay_seconds = 0.1
    process = child()
    part = store.root / "work" / f"{SHA256}.part"
    deadline = time.monotonic() + 30
    while not (part.exists() and part.stat().st_size > 0):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not store.has(SHA256)
    have = part.stat().st_size
    server.delay_seconds = 0
    bring(store, download(server))
    assert server.requests("/w.whl")[1]["range"] == f"bytes={have}-"
    assert store.path(SHA256).read_bytes() == BODY


def test_an_interrupt_ends_also_a_silent_download(store: Store, server: Faulty) -> None:
    """Ctrl-C while the server is silent does not wait for the stall limit."""
    server.bodies["/w.whl"] = BODY
    server.faults["/w.whl"] = ["stall"]
    threading.Timer(0.6, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        fetch(store, [download(server)], progress=Silent(), environ={}, timeouts=Timeouts(stall_seconds=30))
    assert time.monotonic() - begun < 2.5
    assert not store.has(SHA256)


def test_the_users_ca_is_read(store: Store, server: Faulty) -> None:
    """A CA bundle that is not there is an error that names it."""
    item = download(server, url=server.url("/w.whl").replace("http:", "https:"))
    with pytest.raises(ResolveError) as caught:
        fetch(store, [item], progress=Silent(), environ={"SSL_CERT_FILE": "/nowhere.pem"}, timeouts=QUICK)
    assert caught.value.message == "the CA bundle /nowhere.pem cannot be read"


def test_the_users_proxy_is_used(store: Store, server: Faulty) -> None:
    """http_proxy gets the request, no_proxy keeps it away."""
    with serving() as proxy:
        proxy.bodies["http://index.invalid/w.whl"] = BODY
        environ = {"http_proxy": proxy.url(""), "no_proxy": "127.0.0.1"}
        item = Download(name="w.whl", url="http://index.invalid/w.whl", sha256=SHA256)
        fetch(store, [item], progress=Silent(), environ=environ, timeouts=QUICK)
        server.bodies["/o"] = b"own"
        own = Download(name="o", url=server.url("/o"), sha256=hashlib.sha256(b"own").hexdigest())
        fetch(store, [own], progress=Silent(), environ=environ, timeouts=QUICK)
        assert [path for path, _ in proxy.seen] == ["http://index.invalid/w.whl"]
