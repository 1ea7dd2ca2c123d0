"""A registry gives back exactly what was pushed; what it breaks is noticed."""

from __future__ import annotations

import base64
import contextlib
import gzip
import http.server
import json
import threading
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from kitbuild.base import oci
from kitbuild.base.reference import Reference
from kitbuild.base.registry import Registry, push
from kitbuild.errors import ImageError, ResolveError, UsageError, VerificationError
from kitbuild.progress import Silent
from tests.base import made
from tests.store.faulty_server import serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LAYERS = [made.layer(made.DEBIAN), made.layer({"a": "b" * 3_000_000})]
CONFIG = made.config(LAYERS)
MANIFEST = oci.manifest_bytes(CONFIG, [(oci.digest_of(data), len(data)) for data in LAYERS])


def pushed(reference: str, folder: Path, environ: dict[str, str] | None = None) -> str:
    layers = [(oci.digest_of(data), path) for data, path in zip(LAYERS, made.write(folder, LAYERS), strict=True)]
    return push(reference, MANIFEST, CONFIG, layers, environ=environ or {}, progress=Silent())


def opened(reference: str, environ: dict[str, str] | None = None) -> Registry:
    return Registry(Reference.parse(reference), environ=environ or {})


def pulled_layer(registry: Registry, digest: str, folder: Path) -> bytes:
    with registry.layer(digest, folder=folder, progress=Silent()) as stream:
        return stream.read()


def test_round_trip(registry: str, tmp_path: Path) -> None:
    """The digest in the registry is that of our manifest's bytes; by tag and by digest the same image comes back."""
    where = pushed(f"{registry}/team/base:1", tmp_path)
    assert where == f"{registry}/team/base@{oci.digest_of(MANIFEST)}"
    for reference in (f"{registry}/team/base:1", where):
        remote = opened(reference)
        image = remote.image(architecture="amd64")
        assert image is not None
        assert (image.digest, image.config) == (oci.digest_of(MANIFEST), CONFIG)
        assert [pulled_layer(remote, digest, tmp_path) for digest in image.layers] == LAYERS


def test_pushing_again_sends_no_layer(registry: str, tmp_path: Path) -> None:
    """What the registry has is not sent: the layers' files may even be gone."""
    pushed(f"{registry}/team/again:1", tmp_path)
    layers = [(oci.digest_of(data), tmp_path / "gone") for data in LAYERS]
    push(f"{registry}/team/again:2", MANIFEST, CONFIG, layers, environ={}, progress=Silent())
    assert opened(f"{registry}/team/again:2").head() == oci.digest_of(MANIFEST)


def test_missing_is_none(registry: str) -> None:
    """A repository, tag or digest that is not there is None, not an error."""
    assert opened(f"{registry}/team/none:1").head() is None
    assert opened(f"{registry}/team/none@sha256:{'0' * 64}").image(architecture="amd64") is None


def test_registry_down(tmp_path: Path) -> None:
    """A pull is exit 4 and a push exit 5; both name the host."""
    with pytest.raises(ResolveError, match=r"^the registry localhost:9 does not answer: .*refused") as caught:
        opened("localhost:9/a").head()
    assert caught.value.hint == "check the host name, that the registry runs, and the network"
    with pytest.raises(ImageError, match=r"^the registry localhost:9 does not answer"):
        pushed("localhost:9/a:1", tmp_path)


def test_damaged_layer(registry: str, registry_state: Path, tmp_path: Path) -> None:
    """A byte flipped in the registry's own storage is exit 7."""
    data = made.layer({"x": "to be damaged"})
    configuration = made.config([data])
    manifest = oci.manifest_bytes(configuration, [(oci.digest_of(data), len(data))])
    (path,) = made.write(tmp_path, [data])
    digest = oci.digest_of(data)
    push(f"{registry}/bad:1", manifest, configuration, [(digest, path)], environ={}, progress=Silent())
    (blob,) = (registry_state / "registry" / "data").rglob(f"{digest[7:]}/data")
    blob.write_bytes(data.replace(b"damaged", b"DAMAGED"))
    with pytest.raises(VerificationError, match=f"layer {digest} of {registry}/bad:1: sha256 is"):
        pulled_layer(opened(f"{registry}/bad:1"), digest, tmp_path)


@pytest.mark.parametrize("reference", ["", "UPPER/case", "a b", "x:", "x@sha256:12", "https://host/x"])
def test_bad_references(reference: str) -> None:
    """What is no reference is a usage error that quotes it."""
    with pytest.raises(UsageError) as caught:
        Reference.parse(reference)
    assert caught.value.message == f"{reference!r} is no image reference"


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("debian:12", "https://registry-1.docker.io/v2/library/debian"),
        ("team/base", "https://registry-1.docker.io/v2/team/base"),
        ("ghcr.io/team/base:1", "https://ghcr.io/v2/team/base"),
        ("localhost:5000/a/b/c", "http://localhost:5000/v2/a/b/c"),
        ("127.0.0.1:5000/a", "http://127.0.0.1:5000/v2/a"),
        ("localhost.example.com/a", "https://localhost.example.com/v2/a"),
    ],
)
def test_urls(text: str, url: str) -> None:
    """Plain HTTP is for this machine only."""
    assert url == Reference.parse(text).base_url


class Stub(http.server.BaseHTTPRequestHandler):
    """A registry that asks for credentials, has an index of two platforms, and breaks a blob off once."""

    protocol_version = "HTTP/1.1"
    broken: ClassVar[int] = 0
    blob = gzip.compress(LAYERS[1], mtime=0)

    def log_message(self, *_: Any) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        host = f"http://{self.headers['Host']}"
        if self.path.startswith("/token"):
            right = self.headers.get("Authorization") == "Basic " + base64.b64encode(b"me:secret").decode()
            self.answer(200 if right else 401, json.dumps({"token": "t"}).encode() if right else b"{}")
        elif self.headers.get("Authorization") != "Bearer t":
            challenge = f'Bearer realm="{host}/token",service="s",scope="repository:team/base:pull"'
            self.answer(401, b'{"errors":[{"code":"UNAUTHORIZED","message":"who?"}]}', {"WWW-Authenticate": challenge})
        elif "/manifests/" in self.path:
            self.manifest()
        else:
            self.send_blob()

    def manifest(self) -> None:
        inner = json.loads(MANIFEST) | {"layers": [{"digest": oci.digest_of(self.blob)}]}
        inner_bytes = oci.canonical(inner)
        platform = {"os": "linux", "architecture": "amd64"}
        other = {"digest": "sha256:" + "0" * 64, "platform": {"os": "linux", "architecture": "arm64"}}
        index = oci.canonical({"manifests": [other, {"digest": oci.digest_of(inner_bytes), "platform": platform}]})
        body = inner_bytes if self.path.endswith(oci.digest_of(inner_bytes)) else index
        self.answer(200, body, {"Docker-Content-Digest": oci.digest_of(body)})

    def send_blob(self) -> None:
        if self.path.endswith(oci.digest_of(CONFIG)):
            self.answer(200, CONFIG)
            return
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        rest = self.blob[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        if not Stub.broken:
            Stub.broken = 1
            self.wfile.write(rest[: len(rest) // 2])
            self.close_connection = True
            return
        self.wfile.write(rest)

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextlib.contextmanager
def stub() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stub) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_login_platform_and_resume(tmp_path: Path) -> None:
    """`docker login`'s credentials get a token, the platform is chosen, a transfer that broke off goes on."""
    Stub.broken = 0
    with stub() as host:
        auth = base64.b64encode(b"me:secret").decode()
        (tmp_path / "config.json").write_text(json.dumps({"auths": {host: {"auth": auth}}}))
        remote = opened(f"{host}/team/base:1", {"DOCKER_CONFIG": str(tmp_path)})
        image = remote.image(architecture="amd64")
        assert image is not None
        assert image.config == CONFIG
        assert pulled_layer(remote, image.layers[0], tmp_path) == LAYERS[1]
        with pytest.raises(ResolveError, match="has no image for linux/s390x"):
            remote.image(architecture="s390x")


@pytest.mark.parametrize(
    ("faults", "waits"),
    [
        (["429 7", "503 Wed, 21 Oct 2015 07:28:00 GMT"], [7.0, 0.0]),
        (["500", "503", "429 3600"], [2.0, 4.0, 120.0]),
    ],
)
def test_a_busy_registry_is_asked_again(faults: list[str], waits: list[float]) -> None:
    """429, 500 and 503 are tried again, after the time that Retry-After names or twice as long each time."""
    slept: list[float] = []
    with serving() as busy:
        path = "/v2/team/base/manifests/1"
        busy.bodies[path] = MANIFEST
        busy.faults[path] = list(faults)
        reference = Reference.parse(f"127.0.0.1:{busy.port}/team/base:1")
        registry = Registry(reference, environ={}, sleep=slept.append)
        assert registry._manifest("1") == MANIFEST
    assert slept == waits


def test_a_registry_that_stays_busy() -> None:
    """After four tries it is exit 4 with the registry's answer."""
    with serving() as busy:
        busy.faults["/v2/team/base/manifests/1"] = ["503"] * 9
        reference = Reference.parse(f"127.0.0.1:{busy.port}/team/base:1")
        registry = Registry(reference, environ={}, sleep=lambda _seconds: None)
        with pytest.raises(ResolveError, match="the registry answered 503 Service Unavailable to GET"):
            registry._manifest("1")
        assert len(busy.seen) == 4


def test_no_login() -> None:
    """Refused without credentials: exit 4, with the command that mends it."""
    with stub() as host, pytest.raises(ResolveError) as caught:
        opened(f"{host}/team/base:1").image(architecture="amd64")
    assert "the registry answered 401 Unauthorized to HEAD" in caught.value.message
    assert caught.value.hint == f"docker login {host}"


@pytest.mark.parametrize(
    "manifest",
    [
        b"null",
        b"<html>",
        b"[" * 100_000,
        b'{"manifests": 5}',
        b'{"config": {"digest": "../../evil"}, "layers": []}',
        b'{"config": {"digest": "sha256:%b"}, "layers": [{"digest": "/etc/evil"}]}' % (b"0" * 64),
    ],
)
def test_a_manifest_that_is_none(manifest: bytes) -> None:
    """A registry's digests become file names: what is no digest, and what is no manifest, is refused unread."""

    class Hostile(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(b"")

        def do_GET(self) -> None:
            self._answer(manifest)

        def _answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Docker-Content-Digest", oci.digest_of(manifest))
            self.send_header("Content-Length", str(len(manifest)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hostile) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(ResolveError, match=r"the registry's manifest is not that of an image$"):
            opened(f"127.0.0.1:{server.server_port}/team/x:1").image(architecture="amd64")
        server.shutdown()
