"""Make a base from Debian packages, the same bytes every time (`images/cpu/bootstrap.toml`).

mmdebstrap unpacks the packages; its tar is then rewritten in Python, so that neither the machine nor the versions
of mmdebstrap and tar enter: sorted, numeric owners, clamped times, and nothing of what `drop` lists.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import io
import os
import platform
import posixpath
import shutil
import subprocess
import tarfile
from collections import deque
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from kitbuild.base import bases, facts, oci
from kitbuild.base.targets import Bootstrap, load_bootstrap, load_target
from kitbuild.errors import ImageError, ResolveError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kitbuild.base.models import LockedBase
    from kitbuild.progress import Progress
    from kitbuild.store import Store

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_MERGED_USR = Path("/usr/share/mmdebstrap/hooks/merged-usr")
ROOM_BYTES = 1_500_000_000
"""The system as a tree, as mmdebstrap's tar and as our layer, at once."""
_LAST_LINES = 12
_STAGES = ("running apt-get", "downloading", "extracting", "installing", "creating")
# Inside the chroot, before apt's lists are deleted: every available package with the digest of its archive.
_AVAILABLE = (
    'chroot "$1" sh -c '
    "'for list in /var/lib/apt/lists/*_Packages*; do /usr/lib/apt/apt-helper cat-file $list; echo; done"
    " > /tmp/available'"
)


def bootstrap(target: str = "cpu", *, store: Store, progress: Progress, environ: Mapping[str, str]) -> LockedBase:
    """Make the base of `target`, put it into the store under its default name."""
    how = load_bootstrap(target)
    name = load_target(target).base
    _require_mmdebstrap(environ)
    free = shutil.disk_usage(store.root).free
    if free < ROOM_BYTES:
        raise ResolveError(
            f"the store {store.root} has {free / 1e9:.1f} GB free, bootstrapping a base takes {ROOM_BYTES / 1e9:.1f} GB",
            hint="free some space (`kitbuild store gc`) or set KITBUILD_HOME to another disk",
        )
    with store.making(f"bootstrap {target}"), store.scratch() as folder:
        raw, available = folder / "raw.tar", folder / "available"
        _mmdebstrap(how, raw=raw, available=available, progress=progress, environ=environ)
        layer = folder / "layer.tar"
        progress.note(f"writing {name} as one layer")
        digest = rewrite(raw, layer, how=how, available=available)
        store.adopt(layer, sha256=digest, name=f"layer of {name}")
        base = bases.add(
            store,
            name=name,
            config=_config(target, how, digest),
            openers=[lambda: store.path(digest).open("rb")],
            progress=progress,
        )
    bases.remember_name(store, base, definition=how.sha256)
    progress.note(f"base {name} @ {base.manifest_digest} (bootstrapped: {how.suite}, {len(base.packages)} packages)")
    return base


def rewrite(raw: Path, layer: Path, *, how: Bootstrap, available: Path) -> str:
    """Turn mmdebstrap's tar into the layer; returns its sha256."""
    with tarfile.open(raw, mode="r:") as source, layer.open("wb") as stream:
        hashing = _Hashing(stream)
        with tarfile.open(fileobj=hashing, mode="w|", format=tarfile.PAX_FORMAT) as out:  # type: ignore[call-overload]
            _copy(source, out, how)
            _add_packages(source, out, available.read_text(errors="replace"))
    return hashing.hexdigest()


class _Hashing:
    """A file to write to that knows its sha256."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._digest = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self._digest.update(data)
        return self._stream.write(data)

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def _copy(source: tarfile.TarFile, out: tarfile.TarFile, how: Bootstrap) -> None:
    """Members by name; the first name of a hard-linked file carries its content."""
    first: dict[str, str] = {}
    for name, member in sorted((posixpath.normpath(member.name), member) for member in source):
        if name == "." or _dropped(name, how):
            continue
        info = tarfile.TarInfo(name)
        info.type, info.mode, info.uid, info.gid = member.type, member.mode, member.uid, member.gid
        info.mtime = min(int(member.mtime), how.source_date_epoch)
        content = None
        if member.issym():
            info.linkname = member.linkname
        elif member.isreg() or member.islnk():
            inode = posixpath.normpath(member.linkname) if member.islnk() else name
            if inode in first:
                info.type, info.linkname = tarfile.LNKTYPE, first[inode]
            else:
                first[inode] = name
                content = source.extractfile(member)
                info.type, info.size = tarfile.REGTYPE, _size(source, member)
        out.addfile(info, content)


def _size(source: tarfile.TarFile, member: tarfile.TarInfo) -> int:
    return source.getmember(member.linkname).size if member.islnk() else member.size


def _dropped(name: str, how: Bootstrap) -> bool:
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in how.keep):
        return False
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in how.drop)


def _add_packages(source: tarfile.TarFile, out: tarfile.TarFile, available: str) -> None:
    """Each installed package with the sha256 of its archive, as a file in the image."""
    sums = {
        (fields["Package"], fields["Version"], fields["Architecture"]): fields["SHA256"]
        for fields in facts.parse_control(available)
        if "SHA256" in fields
    }
    status = source.extractfile("./var/lib/dpkg/status")
    if status is None:
        raise ImageError("mmdebstrap left no package record", hint="run it again with a current mmdebstrap")
    packages: list[dict[str, Any]] = []
    for fields in facts.parse_control(status.read().decode(errors="replace")):
        key = (fields["Package"], fields["Version"], fields["Architecture"])
        packages.append({"name": key[0], "version": key[1], "architecture": key[2], "sha256": sums.get(key)})
    data = oci.canonical(sorted(packages, key=lambda entry: (entry["name"], entry["architecture"])))
    folder = tarfile.TarInfo(posixpath.dirname(facts.PACKAGES_PATH))
    folder.type, folder.mode = tarfile.DIRTYPE, 0o755
    out.addfile(folder)
    info = tarfile.TarInfo(facts.PACKAGES_PATH)
    info.mode, info.size = 0o644, len(data)
    out.addfile(info, io.BytesIO(data))


def _config(target: str, how: Bootstrap, layer_sha256: str) -> bytes:
    return oci.config_bytes(
        architecture=host_architecture(),
        diff_ids=[f"sha256:{layer_sha256}"],
        config={
            "Cmd": ["python3"],
            "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8"],
            "Labels": {
                "org.kitbuild.base.target": target,
                facts.LABEL_UPSTREAM: f"debian:{how.suite}",
            },
        },
        history=[{"created": "1970-01-01T00:00:00Z", "created_by": f"kitbuild base bootstrap {target}"}],
    )


def host_architecture() -> str:
    """The architecture of this machine, as images name it."""
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise ImageError(f"no base for {machine}", hint="bases are for x86_64 or aarch64")
    return _ARCHITECTURES[machine]


def _require_mmdebstrap(environ: Mapping[str, str]) -> None:
    if shutil.which("mmdebstrap", path=environ.get("PATH")) is None:
        raise ImageError(
            "mmdebstrap is not installed: the CPU base cannot be made from Debian packages",
            hint="apt-get install mmdebstrap debian-archive-keyring; or take a base by KITBUILD_BASE_REGISTRY",
        )


def _command(how: Bootstrap, *, raw: Path, available: Path, mirrors: str) -> list[str]:
    # Debian's dummy stands in for the package usrmerge, which would bring all of perl.
    merged = [f"--hook-dir={_MERGED_USR}", "--include=usr-is-merged"] if _MERGED_USR.is_dir() else []
    return [
        "mmdebstrap",
        "--variant=minbase",
        "--format=tar",
        f"--include={','.join(how.include)}",
        *merged,
        "--dpkgopt=force-unsafe-io",
        f"--customize-hook={_AVAILABLE}",
        f"--customize-hook=download /tmp/available {available}",
        how.suite,
        str(raw),
        *mirrors.split(),
    ]


def _mmdebstrap(how: Bootstrap, *, raw: Path, available: Path, progress: Progress, environ: Mapping[str, str]) -> None:
    env = {**environ, "SOURCE_DATE_EPOCH": str(how.source_date_epoch), "LC_ALL": "C.UTF-8", "TZ": "UTC"}
    if os.geteuid() == 0:
        env["TMPDIR"] = str(raw.parent)  # otherwise another uid, which cannot enter our folder, unpacks there
    command = _command(how, raw=raw, available=available, mirrors=environ.get("KITBUILD_DEBIAN_MIRROR", ""))
    last: deque[str] = deque(maxlen=_LAST_LINES)
    old_umask = os.umask(0o022)
    try:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
    finally:
        os.umask(old_umask)
    with (
        _stopped_with_us(process),
        progress.activity(f"bootstrap {how.suite}", total=None, unit="steps") as advance,
    ):
        for line in process.stderr or ():
            last.append(line.rstrip())
            if line.startswith("I: "):
                advance(1)
                if line[3:].startswith(_STAGES):
                    progress.note(f"bootstrap: {line[3:].strip()}")
    if process.returncode != 0:
        raise ImageError(
            f"mmdebstrap failed with exit code {process.returncode}:\n" + "\n".join(last),
            hint="the lines above tell why: no network to a Debian mirror (KITBUILD_DEBIAN_MIRROR names another), "
            "no debian-archive-keyring, no space, or, without root, no user namespaces",
        )


@contextlib.contextmanager
def _stopped_with_us(process: subprocess.Popen[str]) -> Iterator[None]:
    """Wait for it; when we are interrupted it cleans up behind itself first."""
    try:
        yield
        process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
        if process.stderr is not None:
            process.stderr.close()
