"""Phase 1: every locked byte, before anything is done with it. Standard library only.

Hashing runs in processes of its own, so that it overlaps with imports; the caller waits for the verdict.
"""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kitbuild.errors import Problem, VerificationError
from kitbuild.guest import surroundings
from kitbuild.guest.config import Config, cores
from kitbuild.guest.listing import read_listing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from io import FileIO

CHUNK_BYTES = 32 << 20
BUFFER_BYTES = 1 << 20
AHEAD_BYTES = 16 << 20
AGAIN = "build the image again, or fetch the inputs again"
UNLOCKED = "is in no lock"


class Verification:
    """Hashing under way in other processes; `wait` raises one error with every difference."""

    def __init__(self, config: Config, environ: Mapping[str, str]) -> None:
        self._config, self._environ = config, environ
        expected, links, problems = expectations(config)
        # Without a container, this one file is a link that kitbuild made.
        linked = str(config.places.inputs / "chat_template.jinja") if config.engine == "local" else None
        shared = list(chunks(expected, linked))
        self._pool = multiprocessing.get_context("fork").Pool(max(1, min(cores(), len(shared))))
        self._result = self._pool.map_async(check_chunk, shared, chunksize=1)
        self._problems = [*problems, *_link_problems(config, links), *_extra_files(config, {*expected, *links})]
        self._around = list(surroundings.problems(config, environ))
        self.files = len(expected)

    @property
    def refused(self) -> bool:
        """Whether the verdict is known before the bytes are: then nothing is imported while they are hashed."""
        return bool(self._problems or self._around)

    def wait(self) -> None:
        """Wait for the verdict; no process or thread of it is left."""
        found = [difference for chunk in self._result.get() for difference in chunk]
        self._pool.close()
        self._pool.join()
        # Imports may be going on beside: what they brought is looked at here, not before.
        around = [*self._around, *surroundings.imported(self._config)]
        shown = self._config.places.shown
        wrong = [*self._problems, *(Problem(message=text, file=shown(Path(path)), hint=AGAIN) for path, text in found)]
        if wrong or around:
            told = [f"{len(wrong)} of {self.files} locked files differ: {_some(wrong)}"] if wrong else []
            told += [f"what was set or mounted here changes what runs: {_some(around)}"] if around else []
            hint = next((problem.hint for problem in around if not wrong), AGAIN)
            raise VerificationError("; ".join(told), hint=f"nothing was trained; {hint}", problems=[*wrong, *around])

    def close(self) -> None:
        """Stop hashing."""
        self._pool.terminate()
        self._pool.join()


def _some(problems: list[Problem], limit: int = 5) -> str:
    names = ", ".join(problem.file or problem.key or problem.message for problem in problems[:limit])
    return names + (f" and {len(problems) - limit} more" if len(problems) > limit else "")


def expectations(config: Config) -> tuple[dict[str, tuple[int | None, str]], dict[str, str], list[Problem]]:
    """Path → (size, sha256) of every locked file, path → target of every link, and what cannot even be read."""
    expected: dict[str, tuple[int | None, str]] = {}
    links: dict[str, str] = {}
    problems: list[Problem] = []
    places = config.places
    listing = places.kit / "content.json"
    if listing.exists() or listing.is_symlink():
        try:
            files, links = read_listing(listing, config.image.get("content_sha256"))
        except (OSError, ValueError) as error:
            problems.append(Problem(message=f"cannot be read: {error}", file=places.shown(listing), hint=AGAIN))
            files = {}
        expected |= {_below(places.root, name): (None, digest) for name, digest in files.items()}
        links = {_below(places.root, name): target for name, target in links.items()}
    elif config.locked:
        problems.append(Problem(message="is missing", file=places.shown(listing), hint="build the image again"))
    for folder, item in _locked_files(config):
        path = str(folder / item["path"])
        known = expected.get(path)
        if known is not None and known[1] != item["sha256"]:
            problems.append(Problem(message="content.json and the lock disagree", file=places.shown(Path(path))))
        expected[path] = (item["size"], item["sha256"])
    return expected, links, problems


def _below(root: Path, name: str) -> str:
    return name if str(root) == "/" else f"{root}{name}"


def _input_trees(config: Config) -> Iterator[tuple[Path, list[dict[str, Any]]]]:
    """Folder and locked files of each input."""
    raw, model = config.raw, config.raw["model"]
    trees = [("model", model["weights"]), ("tokenizer", model["tokenizer"]), ("evaluate", raw.get("evaluate"))]
    trees += [(f"data/{index}", item) for index, item in enumerate(raw["datasets"])]
    for name, held in trees:
        if held:
            yield config.places.inputs / name, held.get("tree", held)["files"]


def _locked_files(config: Config) -> Iterator[tuple[Path, dict[str, Any]]]:
    inputs, raw = config.places.inputs, config.raw
    model = raw["model"]
    for folder, items in _input_trees(config):
        for item in items:
            yield folder, item
    if model["chat_template"]:
        yield inputs, {**model["chat_template"], "path": "chat_template.jinja"}
    for kernel, item in zip(config.kernels, raw["kernels"], strict=True):
        for file in item["files"]:
            yield config.places.kernels / kernel.snapshot, file


def _link_problems(config: Config, links: dict[str, str]) -> Iterator[Problem]:
    for path, target in links.items():
        found = os.readlink(path) if os.path.islink(path) else None  # noqa: PTH114, PTH115 - thousands of files
        if found != target:
            name = config.places.shown(Path(path))
            yield Problem(message=f"should link to {target}, not {found}", file=name, hint=AGAIN)


def _extra_files(config: Config, known: set[str]) -> Iterator[Problem]:
    """What nobody locked, in the places that only kitbuild fills."""
    places = config.places
    known.add(str(places.kit / "content.json"))
    if (places.kit / "content.json").exists():
        for path in (*_walk(str(places.kit)), *_walk(str(places.root / "opt" / "kit"))):
            if path not in known:
                yield _extra(config, path)
    # A library reads what lies beside a model: adapter_config.json, chat_template.jinja. It skips hidden files.
    trees = {str(folder) for folder, _ in _input_trees(config)}
    for path in (*sorted(trees), *_around_trees(places.inputs, trees)):
        for inner in _walk(path, skip=".") if path in trees else (path,):
            if inner not in known:
                yield _extra(config, inner)


def _extra(config: Config, path: str) -> Problem:
    kind = "a link, and " if os.path.islink(path) else ""  # noqa: PTH114 - as strings, like the rest
    return Problem(message=f"{kind}{UNLOCKED}", file=config.places.shown(Path(path)), hint="remove it, or lock again")


def _walk(top: str, *, skip: str = "\0") -> Iterator[str]:
    """Everything below `top` that is not a directory; a link to a directory is a link."""
    try:
        held = list(os.scandir(top))
    except OSError:
        return
    for entry in held:
        if entry.name.startswith(skip):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(entry.path, skip=skip)
        else:
            yield entry.path


def _around_trees(inputs: Path, trees: set[str]) -> Iterator[str]:
    """What lies beside the locked inputs: /inputs/chat_template.jinja would be taken for the model's."""
    for folder in (inputs, inputs / "data"):
        for path in folder.iterdir() if folder.is_dir() else ():
            if str(path) not in {*trees, str(inputs / "data")} and not path.name.startswith("."):
                yield str(path)


Chunk = list[tuple[str, int | None, str, int]]


def chunks(expected: dict[str, tuple[int | None, str]], linked: str | None = None) -> Iterator[Chunk]:
    """Lists of files of about the same number of bytes, the largest files first; `linked` may be a link."""
    sized = []
    for path, (size, digest) in expected.items():
        try:
            actual = os.stat(path).st_size  # noqa: PTH116 - thousands of files
        except OSError:
            actual = 0
        sized.append((actual, path, size, digest, 0 if path == linked else os.O_NOFOLLOW))
    chunk: Chunk = []
    held = 0
    for actual, path, size, digest, flags in sorted(sized, key=lambda item: item[:2], reverse=True):
        chunk.append((path, size, digest, flags))
        held += actual + 4096
        if held >= CHUNK_BYTES:
            yield chunk
            chunk, held = [], 0
    if chunk:
        yield chunk


def check_chunk(chunk: Chunk) -> list[tuple[str, str]]:
    """Path and difference of each file that is not as it should be."""
    buffer = bytearray(BUFFER_BYTES)
    return [(item[0], text) for item in chunk if (text := _difference(*item, buffer))]


def _difference(path: str, size: int | None, digest: str, flags: int, buffer: bytearray) -> str | None:
    try:
        # A pipe in a file's place would wait for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
        with open(descriptor, "rb", buffering=0) as file:  # noqa: PTH123 - thousands of files
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                return "is not a regular file"
            if size is not None and facts.st_size != size:
                return f"has {facts.st_size} bytes, the lock says {size}"
            found = _sha256(file, buffer)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        if error.errno == errno.ELOOP:
            return "is a link, and the lock says a file"
        return f"cannot be read: {error.strerror}"
    return None if found == digest else f"sha256 is {found[:12]}…, the lock says {digest[:12]}…"


def _sha256(file: FileIO, buffer: bytearray) -> str:
    digest, view = hashlib.sha256(), memoryview(buffer)
    place, asked = 0, 0
    while True:
        if place >= asked:  # The disk works while this process computes.
            os.posix_fadvise(file.fileno(), place, 2 * AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
            asked = place + AHEAD_BYTES
        count = file.readinto(buffer)
        if not count:
            return digest.hexdigest()
        digest.update(view[:count])
        place += count
