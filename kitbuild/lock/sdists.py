"""Step 2: wheels of packages that are published only as source, built once and then locked as wheels.

A build is repeatable: pinned build requirements in an environment of their own, cleared variables with a fixed time
and hash seed (deepspeed's setup.py makes the list of its extra `all` from a set), and the archive written again by
`plain_wheel`. Nothing is compiled: the wheel is pure Python, the same from each Python that builds it, so the lock does
not say which one did. The built file is carried or rebuilt identically, never replaced.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from uv import find_uv_bin

from kitbuild.errors import ResolveError, VerificationError
from kitbuild.lock.models import Built, LockedWheel
from kitbuild.lock.plain_wheel import plain
from kitbuild.lock.uv import compile_pylock, hosts_only
from kitbuild.store.download import Download, fetch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from kitbuild.lock.platform import Platform
    from kitbuild.lock.uv import Sources
    from kitbuild.progress import Progress
    from kitbuild.store import Store

RECORDS = "built-wheels"
_TIMEOUT_SECONDS = 600
_FIXED = {
    "LC_ALL": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "SOURCE_DATE_EPOCH": "315532800",
    "TZ": "UTC",
}


@dataclass(frozen=True, kw_only=True)
class Build:
    """How one package is built: pinned build requirements, variables over the fixed ones, the Pythons it is then for."""

    requires: tuple[str, ...]
    env: Mapping[str, str]
    python: str = "py3"


BUILDS: Mapping[str, Build] = {
    # No op is compiled, so the wheel needs no torch to build; its setup still asks for an accelerator by name, which
    # it compares only for compiled ops.
    "deepspeed": Build(
        requires=("packaging==26.0", "psutil==7.1.3", "py-cpuinfo==9.0.0", "setuptools==80.9.0", "wheel==0.45.1"),
        env={"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu", "DS_ENABLE_NINJA": ""},
    ),
}


@contextlib.contextmanager
def build_sdists(
    wanted: Mapping[str, str], *, platform: Platform, sources: Sources, store: Store, progress: Progress
) -> Iterator[tuple[Path | None, dict[str, LockedWheel]]]:
    """Build what of `wanted` (exact versions) is known to `BUILDS` and has no wheel.

    Yields a folder with the built wheels, for resolving, and what they are locked as.
    """
    asked = {name: version for name, version in sorted(wanted.items()) if name in BUILDS}
    if not asked:
        yield None, {}
        return
    with store.scratch() as folder:
        built: dict[str, LockedWheel] = {}
        for name, version in asked.items():
            sdist = _sdist(name, version, platform=platform, sources=sources, store=store, progress=progress)
            if sdist is not None:
                built[name] = _build(name, sdist, folder=folder, sources=sources, store=store, progress=progress)
                shutil.copyfile(store.path(built[name].sha256), folder / built[name].file)
        yield folder, built


def _sdist(
    name: str, version: str, *, platform: Platform, sources: Sources, store: Store, progress: Progress
) -> Download | None:
    pylock = compile_pylock(
        [f"{name}=={version}"],
        platform=platform,
        sources=sources,
        store=store,
        progress=progress,
        dependencies=False,
        source_too=True,
    )
    package = next(package for package in pylock.packages if package.name == name)
    if package.wheels or package.sdist is None:
        return None
    url, sha256 = package.sdist.url, package.sdist.hashes.get("sha256")
    if url is None or sha256 is None:
        raise ResolveError(f"the index gives no address and sha256 of the source of {name} {version}")
    return Download(name=package.sdist.filename, url=url, sha256=sha256, headers=sources.headers(url))


def _build(
    name: str, sdist: Download, *, folder: Path, sources: Sources, store: Store, progress: Progress
) -> LockedWheel:
    build = BUILDS[name]
    assert sdist.sha256 is not None  # noqa: S101 - _sdist gives one
    facts = Built(
        sdist_sha256=sdist.sha256,
        python=build.python,
        requires=build.requires,
        env=dict(sorted({**_FIXED, **build.env}.items())),
    )
    with store.making(f"build {name} {sdist.sha256}"):
        record = store.record(RECORDS, f"{name}-{sdist.sha256}")
        if record is not None and record["built"] == facts.model_dump(mode="json") and store.has(record["sha256"]):
            return LockedWheel(**record)
        progress.note(f"packages: {sdist.name} has no wheel; building it")
        fetch(store, [sdist], progress=progress, environ=sources.trusting)
        wheel = _run(name, sdist, facts, folder=folder, sources=sources, store=store)
        _, version, _, tags = parse_wheel_filename(wheel.name)
        if any(tag.platform != "any" or tag.interpreter != build.python for tag in tags):
            raise ResolveError(f"{wheel.name} is built for this machine's processor or Python and cannot be locked")
        data = plain(wheel.read_bytes())
        locked = LockedWheel(
            name=name,
            version=str(version),
            file=wheel.name,
            size=len(data),
            sha256=store.add_bytes(data),
            index="built",
            built=facts,
        )
        store.write_record(RECORDS, f"{name}-{sdist.sha256}", locked.model_dump(mode="json"))
        return locked


def rebuild(locked: LockedWheel, *, platform: Platform, sources: Sources, store: Store, progress: Progress) -> None:
    """Build again what a lock names; other bytes are a VerificationError (7)."""
    sdist = _sdist(locked.name, locked.version, platform=platform, sources=sources, store=store, progress=progress)
    carry = "take it from a bundle: kitbuild fetch RECIPE --from BUNDLE"
    if locked.built is None or sdist is None or sdist.sha256 != locked.built.sdist_sha256:
        raise ResolveError(f"no package index offers the locked source of {locked.file}", hint=carry)
    with store.scratch() as folder:
        found = _build(locked.name, sdist, folder=folder, sources=sources, store=store, progress=progress)
    if found.sha256 != locked.sha256:
        raise VerificationError(
            f"{locked.file}: built again it has sha256 {found.sha256}, expected {locked.sha256}", hint=carry
        )


def _run(name: str, sdist: Download, facts: Built, *, folder: Path, sources: Sources, store: Store) -> Path:
    source, home, output = (folder / f"{part}-{name}" for part in ("source", "home", "output"))
    for path in (source, home):
        path.mkdir()
    shutil.copyfile(store.require(facts.sdist_sha256, name=sdist.name), source / sdist.name)
    uv, venv = find_uv_bin(), folder / f"venv-{name}"
    network = sources.variables(spare=False)
    _external([uv, "venv", "--quiet", "--python", sys.executable, str(venv)], env=network, what=sdist.name)
    install = [uv, "pip", "install", "--quiet", "--python", str(venv / "bin" / "python"), *facts.requires]
    if facts.requires:
        _external(install, env=network, what=sdist.name)
    # The directory of the source is under a random name; the built wheel holds no path of it.
    build = [uv, "build", "--quiet", "--wheel", "--no-build-isolation", "--offline", "--no-config"]
    build += ["--python", str(venv / "bin" / "python"), "--out-dir", str(output), str(source / sdist.name)]
    search = f"{venv / 'bin'}{os.pathsep}/usr/bin{os.pathsep}/bin"
    _external(build, env={**facts.env, "PATH": search, "HOME": str(home)}, what=sdist.name)
    wheels = sorted(output.glob("*.whl"))
    if len(wheels) != 1:
        raise ResolveError(f"{sdist.name} did not build into one wheel")
    try:
        parse_wheel_filename(wheels[0].name)
    except InvalidWheelFilename as error:
        raise ResolveError(f"{sdist.name} built into {wheels[0].name}, which is no wheel") from error
    return wheels[0]


def _external(command: list[str], *, env: Mapping[str, str], what: str) -> None:
    try:
        done = subprocess.run(
            command,
            env=dict(env),
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
            timeout=_TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise ResolveError(f"{what} cannot be built: no end after {_TIMEOUT_SECONDS} s") from error
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise ResolveError(f"{what} cannot be built: {hosts_only(' '.join(lines[-3:]))}")
