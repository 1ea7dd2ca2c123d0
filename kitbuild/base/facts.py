"""What a base image holds, read from its configuration and layers without an engine."""

from __future__ import annotations

import json
import posixpath
import re
import tarfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kitbuild.base import oci
from kitbuild.base.models import LockedBase, SystemPackage, Upstream
from kitbuild.errors import ImageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

PACKAGES_PATH = "usr/share/kitbuild/packages.json"
LABEL_CUDA = "org.kitbuild.base.cuda"
LABEL_UPSTREAM = "org.kitbuild.base.upstream"
LABEL_UPSTREAM_DIGEST = "org.kitbuild.base.upstream.digest"
LABEL_DOCKERFILE = "org.kitbuild.base.dockerfile.sha256"

_STATUS = "var/lib/dpkg/status"
_TEXTS = re.compile(
    rf"^({re.escape(_STATUS)}|{re.escape(PACKAGES_PATH)}|usr/(local/)?include/python3\.\d+/patchlevel\.h)$"
)
_INTERPRETER = re.compile(r"^usr/(local/)?bin/python3(\.\d+)?$")
_PY_VERSION = re.compile(r'^#define\s+PY_VERSION\s+"([^"]+)"', re.MULTILINE)
_UPSTREAM_VERSION = re.compile(r"^(?:\d+:)?(\d+(?:\.\d+)*)")
_FINISHED = "a finished base has python3, its headers and g++; build one with `kitbuild base build`"


@dataclass
class _Tree:
    """The few files of the flattened layers that facts are read from, and where links lead."""

    texts: dict[str, bytes] = field(default_factory=dict)
    interpreters: dict[str, str | None] = field(default_factory=dict)

    def apply(self, layer: Path) -> None:
        """Put one layer on top: whiteouts first, as image-spec's layer.md has it."""
        with tarfile.open(layer, mode="r:") as archive:
            members = [(posixpath.normpath(member.name).lstrip("/"), member) for member in archive]
            for name, _member in members:
                self._white_out(name)
            for name, member in members:
                if _TEXTS.match(name) and (stream := archive.extractfile(member)):
                    self.texts[name] = stream.read()
                elif _INTERPRETER.match(name):
                    self.interpreters[name] = posixpath.basename(member.linkname) if member.issym() else None

    def _white_out(self, name: str) -> None:
        folder, base = posixpath.split(name)
        if not base.startswith(".wh."):
            return
        gone = folder if base == ".wh..wh..opq" else posixpath.join(folder, base.removeprefix(".wh."))
        for files in (self.texts, self.interpreters):
            for path in [path for path in files if path == gone or path.startswith(f"{gone}/")]:
                files.pop(path)


def read_facts(*, name: str, config: bytes, layers: Sequence[Path], origin: Upstream | None = None) -> LockedBase:
    """The facts of an image, whose layers are uncompressed tars, bottom first.

    `origin`: where it was found, for an image whose labels do not tell what it was built from.
    """
    document = json.loads(config)
    run = document.get("config") or {}
    labels: dict[str, str] = run.get("Labels") or {}
    tree = _Tree()
    for layer in layers:
        tree.apply(layer)
    packages = _packages(tree)
    versions = {package.name: package.version for package in packages}
    interpreter, python = _python(tree, versions, name)
    glibc = _upstream_version(versions.get("libc6"))
    if glibc is None:
        raise ImageError(f"{name} has no libc6 package", hint="a base is a Debian or Ubuntu image: " + _FINISHED)
    if document.get("architecture") not in {"amd64", "arm64"}:
        raise ImageError(f"{name} is for {document.get('architecture')}", hint="bases are for amd64 or arm64")
    sizes = [(digest, path.stat().st_size) for digest, path in zip(document["rootfs"]["diff_ids"], layers, strict=True)]
    manifest_digest = oci.digest_of(oci.manifest_bytes(config, sizes))
    if origin is not None and origin.digest == manifest_digest:
        origin = None  # found by its own digest: that says all
    return LockedBase(
        name=name,
        manifest_digest=manifest_digest,
        config_digest=oci.digest_of(config),
        diff_ids=tuple(document["rootfs"]["diff_ids"]),
        dockerfile_sha256=labels.get(LABEL_DOCKERFILE),
        upstream=_upstream(labels) or origin,
        python=python,
        interpreter=interpreter,
        glibc=glibc,
        architecture=document["architecture"],
        cuda=_cuda(labels, run.get("Env") or ()),
        packages=packages,
    )


def _upstream(labels: Mapping[str, str]) -> Upstream | None:
    name = labels.get(LABEL_UPSTREAM)
    return Upstream(name=name, digest=labels.get(LABEL_UPSTREAM_DIGEST) or None) if name else None


def _cuda(labels: Mapping[str, str], env: Iterable[str]) -> str | None:
    """Major and minor: the label, else what NVIDIA's images set (CUDA_VERSION=12.9.1)."""
    variables = dict(entry.partition("=")[::2] for entry in env)
    version = labels.get(LABEL_CUDA) or variables.get("CUDA_VERSION") or ""
    return ".".join(version.split(".")[:2]) or None


def _packages(tree: _Tree) -> tuple[SystemPackage, ...]:
    """Installed packages from dpkg's own record, with digests where the base recorded them."""
    recorded: list[dict[str, Any]] = json.loads(tree.texts.get(PACKAGES_PATH, b"[]"))
    sums = {(entry["name"], entry["version"], entry["architecture"]): entry.get("sha256") for entry in recorded}
    found = []
    for fields in parse_control(tree.texts.get(_STATUS, b"").decode(errors="replace")):
        if fields.get("Status", "").endswith(" installed"):
            key = (fields["Package"], fields["Version"], fields["Architecture"])
            found.append(SystemPackage(name=key[0], version=key[1], architecture=key[2], sha256=sums.get(key)))
    return tuple(sorted(found, key=lambda package: (package.name, package.architecture)))


def parse_control(text: str) -> Iterable[dict[str, str]]:
    """Debian's record format: one dictionary a paragraph, first lines of fields only."""
    for paragraph in text.split("\n\n"):
        lines = [line for line in paragraph.splitlines() if line and not line[0].isspace()]
        if fields := dict(line.split(": ", 1) for line in lines if ": " in line):
            yield fields


def _python(tree: _Tree, versions: Mapping[str, str], name: str) -> tuple[str, str]:
    """The path of `python3.X` that `python3` is, /usr/local first as on PATH, and its full version."""
    for folder in ("usr/local", "usr"):
        minor = tree.interpreters.get(f"{folder}/bin/python3") or ""
        path = f"{folder}/bin/{minor}"
        if path not in tree.interpreters:
            continue
        header = tree.texts.get(f"{folder}/include/{minor}/patchlevel.h", b"").decode(errors="replace")
        match = _PY_VERSION.search(header)
        version = match[1].rstrip("+") if match else _upstream_version(versions.get(f"{minor}-minimal"))
        if version is None:
            raise ImageError(f"{name} does not tell its Python's version: no headers of {minor}", hint=_FINISHED)
        return f"/{path}", version
    raise ImageError(f"{name} has no /usr/bin/python3 nor /usr/local/bin/python3", hint=_FINISHED)


def _upstream_version(debian: str | None) -> str | None:
    match = _UPSTREAM_VERSION.match(debian or "")
    return match[1] if match else None
