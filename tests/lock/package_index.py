"""A package index of hand-made wheels: a folder that a web server shows, and the same as find-links."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import html
import io
import zipfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.web_server import Handler, running

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator, Mapping
    from pathlib import Path

ANY = "py3-none-any"
LINUX = "cp311-cp311-manylinux_2_28_x86_64"


def wheel_bytes(
    name: str, version: str, *, tag: str = ANY, requires: tuple[str, ...] = (), files: Mapping[str, str] | None = None
) -> bytes:
    """A wheel with METADATA, and `files` beside an empty module."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    contents = {
        f"{module}/__init__.py": "",
        **(files or {}),
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: {tag}\n",
        f"{info}/RECORD": "",
    }
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for path, text in contents.items():
            archive.writestr(zipfile.ZipInfo(path), text)
    return stream.getvalue()


@dataclass
class PackageIndex:
    """Files by project; `yanked` files carry the reason; `hashes` off leaves digests out; `login` is wanted if set."""

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    yanked: dict[str, str] = field(default_factory=dict)
    hashes: bool = True
    login: str = ""
    seen: list[str] = field(default_factory=list)
    port: int = 0
    scheme: str = "http"

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}/simple"

    def wheel(
        self,
        name: str,
        version: str,
        *,
        tag: str = ANY,
        requires: tuple[str, ...] = (),
        files: Mapping[str, str] | None = None,
    ) -> str:
        """Publish a wheel; its sha256."""
        data = wheel_bytes(name, version, tag=tag, requires=requires, files=files)
        return self.publish(name, f"{name.replace('-', '_')}-{version}-{tag}.whl", data)

    def publish(self, name: str, file: str, data: bytes) -> str:
        self.files.setdefault(name, {})[file] = data
        return hashlib.sha256(data).hexdigest()

    def save(self, folder: Path) -> None:
        """The files as a folder for find-links."""
        folder.mkdir(parents=True, exist_ok=True)
        for files in self.files.values():
            for file, data in files.items():
                (folder / file).write_bytes(data)

    def page(self, name: str) -> bytes | None:
        if name not in self.files:
            return None
        lines = []
        for file, data in self.files[name].items():
            digest = f"#sha256={hashlib.sha256(data).hexdigest()}" if self.hashes else ""
            yanked = f' data-yanked="{html.escape(self.yanked[file])}"' if file in self.yanked else ""
            address = f"/files/{name}/{file}".replace("+", "%2B")
            lines.append(f'<a href="{address}{digest}"{yanked}>{file}</a><br>')
        return f"<!DOCTYPE html><html><body>{''.join(lines)}</body></html>".encode()


class _Handler(Handler):
    state: PackageIndex

    def do_HEAD(self) -> None:  # noqa: N802 - the name is http.server's
        self._answer(with_body=False)

    def do_GET(self) -> None:  # noqa: N802 - the name is http.server's
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        self.state.seen.append(f"{self.command} {self.path}")
        expected = "Basic " + base64.b64encode(self.state.login.encode()).decode()
        if self.state.login and self.headers.get("Authorization") != expected:
            self._send(401, b"", "text/plain", with_body=with_body)
            return
        parts = self.path.replace("%2B", "+").strip("/").split("/")
        body: bytes | None = None
        kind = "application/octet-stream"
        if parts[0] == "simple" and len(parts) == 2:
            body, kind = self.state.page(parts[1]), "text/html"
        elif parts[0] == "files" and len(parts) == 3:
            body = self.state.files.get(parts[1], {}).get(parts[2])
        self._send(404 if body is None else 200, body or b"", kind, with_body=with_body)

    def _send(self, status: int, body: bytes, kind: str, *, with_body: bool) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if status == 401:
            self.send_header("WWW-Authenticate", 'Basic realm="index"')
        self.end_headers()
        if with_body:
            self.wfile.write(body)


@contextlib.contextmanager
def serving(*, tls: ssl.SSLContext | None = None) -> Iterator[PackageIndex]:
    """An index on a free local port, stopped at the end."""
    state = PackageIndex(scheme="https" if tls else "http")
    with running(_Handler, state, tls=tls) as state.port:
        yield state
