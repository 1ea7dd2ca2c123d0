"""Step 2: wheels as `pylock.toml` has them: read in place of resolving, written for other tools.

https://packaging.python.org/en/latest/specifications/pylock-toml/
"""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from packaging.pylock import Pylock, PylockValidationError, is_valid_pylock_path
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from kitbuild.errors import Problem, RecipeError, UsageError
from kitbuild.lock.models import LockedFile
from kitbuild.recipe.kinds import PACKAGE
from kitbuild.store import sha256_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from packaging.pylock import Package, PackageWheel

    from kitbuild.lock.models import Lock, LockedWheel
    from kitbuild.recipe import LoadedRecipe

KEY = "image.pylock"
MOST_BYTES = 16 << 20


def given_pylock(loaded: LoadedRecipe) -> tuple[LockedFile | None, Pylock | None]:
    """The file that a recipe takes its wheels from, by content and as read; None where it takes the tested set."""
    name = loaded.recipe.image.pylock
    if name is None:
        return None, None
    found = read_pylock(loaded.directory / name)
    sha256, size = sha256_file(loaded.directory / name)
    return LockedFile(path=name, size=size, sha256=sha256), found


def read_pylock(path: Path) -> Pylock:
    """A recipe's pylock.toml, every wheel with an absolute address. RecipeError (2) with all that is wrong with it."""
    try:
        with path.open("rb") as stream:
            data = stream.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise _unusable(path, [f"is larger than {MOST_BYTES >> 20} MiB"])
        parsed = Pylock.from_dict(tomllib.loads(data.decode()))
    except OSError as error:
        raise _unusable(path, [f"cannot be read: {error.strerror}"]) from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise _unusable(path, [f"is not TOML: {error}"]) from error
    except PylockValidationError as error:
        raise _unusable(path, [f"does not follow the standard: {error}"]) from error
    wrong = [text for package in parsed.packages for text in _wrong(package)]
    if wrong:
        raise _unusable(path, wrong)
    return replace(parsed, packages=[_absolute(package, path.parent) for package in parsed.packages])


def versions_of(pylock: Pylock) -> dict[str, str]:
    """Versions by name; a name that markers give several versions is left out."""
    found: dict[str, set[str]] = {}
    for package in pylock.packages:
        found.setdefault(package.name, set()).add(str(package.version))
    return {name: next(iter(versions)) for name, versions in found.items() if len(versions) == 1}


def check_versions(given: Pylock, wanted: Iterable[str], own: Mapping[str, str], *, path: str) -> None:
    """What the recipe needs is there (`wanted`), and its own versions (`own`) are those; all that is wrong at once."""
    names, found = {str(package.name) for package in given.packages}, versions_of(given)
    problems = [
        Problem(
            key=KEY, message=f"{path} has no {name}, which this recipe needs", hint="add it, and lock that file anew"
        )
        for name in sorted(wanted)
        if name not in names
    ]
    for name, version in sorted(own.items()):
        here = found.get(str(canonicalize_name(name)))
        if here is not None and not _same(here, version):
            message = f"{name} is {version} here, and {here} in {path}"
            problems.append(Problem(key=f"image.packages.{name}", message=message, hint="remove one of the two"))
    if problems:
        raise RecipeError(f"{path} does not fit the recipe", problems=problems)


def index_of(package: Package) -> str:
    """The index by name, where kitbuild wrote the file."""
    ours = (package.tool or {}).get("kitbuild")
    name = ours.get("index") if isinstance(ours, dict) else None
    return name if isinstance(name, str) and re.fullmatch(PACKAGE, name) else "pylock"


def addresses_of(pylock: Pylock) -> dict[str, str]:
    """Where its wheels are, by digest."""
    return {
        wheel.hashes["sha256"]: str(wheel.url)
        for package in pylock.packages
        for wheel in package.wheels or ()
        if wheel.url is not None
    }


def check_name(path: Path) -> None:
    """Other tools know such a file by its name alone."""
    if not is_valid_pylock_path(path):
        raise UsageError(
            f"{path.name} cannot name a pylock file", hint="pylock.toml, or pylock.NAME.toml with no other dot"
        )


def pylock_text(lock: Lock, addresses: Mapping[str, str]) -> str:
    """The lock's wheels; `addresses` by digest, a relative one being a path beside the file that is written."""
    major, minor = lock.base.python.split(".")[:2]
    machine = {"amd64": "x86_64", "arm64": "aarch64"}[lock.base.architecture]
    marker = f"sys_platform == 'linux' and platform_machine == '{machine}' and implementation_name == 'cpython'"
    lines = [
        'lock-version = "1.0"',
        f"environments = [{json.dumps(marker)}]",
        f'requires-python = "=={major}.{minor}.*"',
        'created-by = "kitbuild"',
        *(line for wheel in lock.wheels for line in _entry(wheel, addresses[wheel.sha256])),
        "",
        "[tool.kitbuild]",
        f'lock-sha256 = "{lock.sha256}"',
    ]
    return "\n".join(lines) + "\n"


def _entry(wheel: LockedWheel, address: str) -> Iterator[str]:
    place = "url" if urlsplit(address).scheme else "path"
    yield from ("", "[[packages]]", f"name = {json.dumps(wheel.name)}", f"version = {json.dumps(wheel.version)}")
    fields = f"name = {json.dumps(wheel.file)}, {place} = {json.dumps(address)}, size = {wheel.size}"
    yield f'wheels = [{{ {fields}, hashes = {{ sha256 = "{wheel.sha256}" }} }}]'
    if not wheel.built:
        yield f"tool = {{ kitbuild = {{ index = {json.dumps(wheel.index)} }} }}"


def _wrong(package: Package) -> Iterator[str]:
    what = f"{package.name} {package.version or ''}".strip()
    if package.version is None or (not package.wheels and package.sdist is None):
        yield f"{what} is no release with wheels"
    for wheel in package.wheels or ():
        if "sha256" not in wheel.hashes:
            yield f"{wheel.filename} has no sha256"
        if wheel.url and urlsplit(wheel.url).username:
            yield f"{wheel.filename}: its address has a user or password in it; put that into ~/.netrc"


def _absolute(package: Package, folder: Path) -> Package:
    wheels = [_with_url(wheel, folder) for wheel in package.wheels] if package.wheels is not None else None
    return replace(package, wheels=wheels)


def _with_url(wheel: PackageWheel, folder: Path) -> PackageWheel:
    """A path is relative to the file, and in POSIX form."""
    if wheel.url is not None or wheel.path is None:
        return wheel
    return replace(wheel, url=(folder / PurePosixPath(wheel.path)).absolute().as_uri())


def _same(one: str, other: str) -> bool:
    try:
        return Version(one) == Version(other)
    except InvalidVersion:
        return one == other


def _unusable(path: Path, texts: list[str]) -> RecipeError:
    problems = [Problem(file=str(path), key=KEY, message=text) for text in texts]
    return RecipeError(f"{path} cannot be used", problems=problems)
