"""Pull and push images by the registry API, with exactly the manifest bytes that we computed.

Client libraries serialise the manifest themselves, which changes its digest; so this speaks the few requests of
https://github.com/opencontainers/distribution-spec. Credentials are those of `docker login`, read by the Docker SDK.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import docker.auth
import docker.errors
import requests
import urllib3.exceptions

from kitbuild.base import oci
from kitbuild.base.manifest import digest_in, is_for, manifest_errors
from kitbuild.base.reference import Reference
from kitbuild.errors import ImageError, KitbuildError, ResolveError, UsageError, VerificationError
from kitbuild.store.http import PASSING, asked_wait

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kitbuild.progress import Progress

_DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
_DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
_ACCEPT = f"{oci.MANIFEST_TYPE}, {oci.INDEX_TYPE}, {_DOCKER_MANIFEST}, {_DOCKER_INDEX}"
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')
_TIMEOUT_SECONDS = (5, 60)
_ATTEMPTS = 4
_UNAUTHORIZED = 401
_NOT_FOUND = 404
_PARTIAL = 206


@dataclass(frozen=True, kw_only=True)
class RemoteImage:
    """A manifest in a registry and the configuration that it names; `layers` are as transferred, bottom first."""

    digest: str
    config: bytes
    layers: tuple[str, ...]


class Registry:
    """One repository of one registry. `failure`: what a request that fails is raised as."""

    def __init__(
        self,
        reference: Reference,
        *,
        environ: Mapping[str, str],
        failure: type[KitbuildError] = ResolveError,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.reference = reference
        self._failure = failure
        self._environ = environ
        self._session = requests.Session()
        self._sleep = sleep
        self._authorization: str | None = None

    def head(self) -> str | None:
        """The digest that the reference means now, or None where the registry has no such image."""
        response = self._request("HEAD", f"/manifests/{self.reference.target}", missing_is_fine=True)
        if response is None:
            return None
        return response.headers.get("Docker-Content-Digest") or oci.digest_of(self._manifest(self.reference.target))

    def image(self, *, architecture: str) -> RemoteImage | None:
        """The image that the reference means, for one architecture, or None where there is none."""
        if (digest := self.head()) is None:
            return None
        with manifest_errors(self.reference, self._failure):
            manifest = json.loads(self._manifest(digest))
            if "manifests" in manifest:
                chosen = [entry for entry in manifest["manifests"] if is_for(entry, architecture)]
                if not chosen:
                    what = f"{self.reference} has no image for linux/{architecture}"
                    raise ResolveError(what, hint="use another base")
                manifest = json.loads(self._manifest(digest_in(chosen[0])))
            about, layers = digest_in(manifest["config"]), tuple(digest_in(entry) for entry in manifest["layers"])
        config = self._get(f"/blobs/{about}").content
        _check(config, about, name=f"configuration of {self.reference}")
        return RemoteImage(digest=digest, config=config, layers=layers)

    @contextlib.contextmanager
    def layer(self, digest: str, *, folder: Path, progress: Progress) -> Iterator[IO[bytes]]:
        """The uncompressed content of a layer, after its transfer into `folder` has been verified."""
        path = folder / digest.removeprefix("sha256:")
        try:
            self._download(digest, path, progress)
            with path.open("rb") as stream, oci.uncompressed(stream, name=f"layer {digest}") as plain:
                yield plain
        finally:
            path.unlink(missing_ok=True)

    def _download(self, digest: str, path: Path, progress: Progress) -> None:
        hashing = hashlib.sha256()
        with (
            path.open("wb") as out,
            progress.activity(f"pull {self.reference.repository} {digest[7:19]}", total=None, unit="bytes") as advance,
        ):
            for attempt in range(1, _ATTEMPTS + 1):
                try:
                    for chunk in self._blob_from(digest, out.tell()):
                        out.write(chunk)
                        hashing.update(chunk)
                        advance(len(chunk))
                    break
                except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
                    if attempt == _ATTEMPTS:
                        raise ResolveError(
                            f"layer {digest} of {self.reference} broke off {_ATTEMPTS} times: {error}",
                            hint="try again; finished layers are kept",
                        ) from error
                    self._sleep(attempt)
        if f"sha256:{hashing.hexdigest()}" != digest:
            raise VerificationError(
                f"layer {digest} of {self.reference}: sha256 is {hashing.hexdigest()}", hint="the registry is damaged"
            )

    def _blob_from(self, digest: str, offset: int) -> Iterator[bytes]:
        headers = {"Range": f"bytes={offset}-"} if offset else {}
        response = self._get(f"/blobs/{digest}", headers=headers, stream=True)
        with response:
            to_skip = offset if response.status_code != _PARTIAL else 0
            for chunk in response.iter_content(oci.CHUNK_BYTES):
                skipped = min(to_skip, len(chunk))
                to_skip -= skipped
                if skipped < len(chunk):
                    yield chunk[skipped:]

    def put_blob(self, digest: str, source: bytes | Path, progress: Progress) -> None:
        """Upload a blob that the registry lacks."""
        if self._request("HEAD", f"/blobs/{digest}", missing_is_fine=True) is not None:
            return
        location = self._send("POST", "/blobs/uploads/").headers["Location"]
        url = requests.compat.urljoin(self.reference.base_url, location)
        url += ("&" if "?" in url else "?") + f"digest={digest}"
        size = len(source) if isinstance(source, bytes) else source.stat().st_size
        with (
            progress.activity(f"push {self.reference.repository} {digest[7:19]}", total=size, unit="bytes") as advance,
            contextlib.ExitStack() as stack,
        ):
            body = source if isinstance(source, bytes) else stack.enter_context(source.open("rb"))
            headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
            self._send("PUT", url, data=body, headers=headers)
            advance(size)

    def put_manifest(self, manifest: bytes) -> str:
        """Upload a manifest under the reference's tag (`latest` where it has none); returns its digest."""
        digest = oci.digest_of(manifest)
        self._send(
            "PUT", f"/manifests/{self.reference.target}", data=manifest, headers={"Content-Type": oci.MANIFEST_TYPE}
        )
        return digest

    def _manifest(self, target: str) -> bytes:
        content = self._get(f"/manifests/{target}").content
        if target.startswith("sha256:"):
            _check(content, target, name=f"manifest of {self.reference}")
        return content

    def _get(self, path: str, **options: Any) -> requests.Response:
        return self._send("GET", path, **options)

    def _send(self, method: str, path: str, **options: Any) -> requests.Response:
        response = self._request(method, path, **options)
        if response is None:
            raise AssertionError("only what may be missing gives None")
        return response

    def _request(
        self, method: str, path: str, *, missing_is_fine: bool = False, **options: Any
    ) -> requests.Response | None:
        url = path if "://" in path else self.reference.base_url + path
        response = self._once(method, url, options)
        if response.status_code == _UNAUTHORIZED:
            self._authorization = self._authorize(response)
            response = self._once(method, url, options)
        if response.status_code == _NOT_FOUND and missing_is_fine:
            return None
        if not response.ok:
            denied = response.status_code in {_UNAUTHORIZED, 403}
            raise self._failure(
                f"{self.reference}: the registry answered {response.status_code} {response.reason}"
                f" to {method}: {_detail(response)}",
                hint=f"docker login {self.reference.host}" if denied else "check the name and the registry's log",
            )
        return response

    def _once(self, method: str, url: str, options: Mapping[str, Any]) -> requests.Response:
        """Ask; what may pass (429, 503, …) is asked again, after the time that the registry wants."""
        for attempt in range(1, _ATTEMPTS):
            response = self._ask(method, url, options)
            if response.status_code not in PASSING:
                return response
            response.close()
            wanted = asked_wait(response)
            self._sleep(2.0**attempt if wanted is None else wanted)
        return self._ask(method, url, options)

    def _ask(self, method: str, url: str, options: Mapping[str, Any]) -> requests.Response:
        headers = {"Accept": _ACCEPT} | options.get("headers", {})
        if self._authorization:
            headers["Authorization"] = self._authorization
        if hasattr(options.get("data"), "seek"):
            options["data"].seek(0)
        try:
            return self._session.request(
                method, url, **{**options, "headers": headers}, timeout=_TIMEOUT_SECONDS, allow_redirects=True
            )
        except requests.RequestException as error:
            raise self._failure(
                f"the registry {self.reference.host} does not answer: {_reason(error)}",
                hint="check the host name, that the registry runs, and the network",
            ) from error

    def _authorize(self, response: requests.Response) -> str | None:
        """Answer a challenge: basic, or a token from the realm that the registry names."""
        challenge = response.headers.get("WWW-Authenticate", "")
        user = _credentials(self.reference.host, self._environ)
        if challenge.lower().startswith("basic"):
            return requests.auth._basic_auth_str(*user) if user else None  # noqa: SLF001 - the one encoder there is
        fields = dict(_CHALLENGE.findall(challenge))
        if "realm" not in fields:
            return None
        scope = f"repository:{self.reference.repository}:pull"
        query = {"service": fields.get("service", ""), "scope": fields.get("scope", scope)}
        try:
            answer = self._session.get(fields["realm"], params=query, auth=user, timeout=_TIMEOUT_SECONDS)
            body = answer.json() if answer.ok else {}
        except (requests.RequestException, ValueError) as error:
            raise self._failure(
                f"{self.reference.host}: no token: {_reason(error)}", hint=f"docker login {self.reference.host}"
            ) from error
        token = body.get("token") or body.get("access_token")
        return f"Bearer {token}" if token else None


def push(
    reference: str,
    manifest: bytes,
    config: bytes,
    layers: Sequence[tuple[str, Path]],
    *,
    environ: Mapping[str, str],
    progress: Progress,
) -> str:
    """Push an image, (digest, uncompressed tar) a layer; returns `host/repository@digest`."""
    target = Reference.parse(reference)
    if target.digest is not None:
        raise UsageError(f"{reference} names a digest; push to a tag", hint="leave out @sha256:…")
    registry = Registry(target, environ=environ, failure=ImageError)
    for digest, path in layers:
        registry.put_blob(digest, path, progress)
    registry.put_blob(oci.digest_of(config), config, progress)
    return f"{target.host}/{target.repository}@{registry.put_manifest(manifest)}"


def _check(data: bytes, digest: str, *, name: str) -> None:
    if oci.digest_of(data) != digest:
        raise VerificationError(f"{name}: digest is {oci.digest_of(data)}, expected {digest}", hint="try again")


def _credentials(host: str, environ: Mapping[str, str]) -> tuple[str, str] | None:
    folder = environ.get("DOCKER_CONFIG") or str(Path(environ.get("HOME", "/")) / ".docker")
    path = Path(folder) / "config.json"
    if not path.is_file():
        return None
    try:
        found = docker.auth.load_config(str(path), credstore_env=dict(environ)).resolve_authconfig(host)
    except docker.errors.DockerException as error:
        raise ResolveError(f"no credentials for {host}: {error}", hint=f"mend {path}") from error
    lower = {key.lower(): value for key, value in (found or {}).items()}
    return (lower["username"], lower["password"]) if lower.get("username") and lower.get("password") else None


def _detail(response: requests.Response) -> str:
    try:
        return "; ".join(f"{entry.get('code')}: {entry.get('message')}" for entry in response.json()["errors"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200].strip() or "no detail"


def _reason(error: Exception) -> str:
    """The innermost cause: requests wraps it several times."""
    inner: BaseException = error
    while inner.__context__ is not None:
        inner = inner.__context__
    return str(inner) or type(inner).__name__
