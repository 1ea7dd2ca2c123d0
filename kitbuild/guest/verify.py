"""Phase 1: every locked byte, before anything is done with it. Standard library only.

Hashing runs in processes of its own, so that it overlaps with imports; the caller waits for the verdict.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kitbuild.errors import Problem, VerificationError
from kitbuild.guest.config import Config, cores

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

CHUNK_BYTES = 32 << 20
OVERRIDES = {
    # https://github.com/huggingface/kernels (load.py)
    "LOCAL_KERNELS": "would replace the locked kernels",
    # https://docs.python.org/3/using/cmdline.html#envvar-PYTHONPATH, https://man7.org/linux/man-pages/man8/ld.so.8.html
    "PYTHONPATH": "would put code that nobody locked before the locked packages",
    "LD_PRELOAD": "would put code that nobody locked into every process",
}


class Verification:
    """Hashing under way in other processes; `wait` raises one error with every difference."""

    def __init__(self, config: Config, environ: dict[str, str]) -> None:
        self._config = config
        self._early = list(_overrides(config, environ))
        expected, links, problems = expectations(config)
        self._early += problems
        self._early += list(_link_problems(config, links))
        self._early += list(_extra_files(config, expected, links))
        chunks = list(_chunks(expected))
        self._pool = multiprocessing.get_context("fork").Pool(max(1, min(cores(), len(chunks))))
        self._result = self._pool.map_async(_check_chunk, chunks, chunksize=1)
        self.files = len(expected)

    def wait(self) -> None:
        """Wait for the verdict; no process or thread of it is left."""
        found = [difference for chunk in self._result.get() for difference in chunk]
        self._pool.close()
        self._pool.join()
        places = self._config.places
        problems = self._early + [
            Problem(message=text, file=places.shown(Path(path)), hint="build the image or fetch the inputs again")
            for path, text in found
        ]
        if problems:
            names = ", ".join(problem.file or problem.message for problem in problems[:5])
            more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""  # noqa: PLR2004 - names shown
            raise VerificationError(
                f"{len(problems)} of {self.files} locked files differ: {names}{more}",
                hint="nothing was trained; build the image again, or fetch the inputs again",
                problems=problems,
            )

    def close(self) -> None:
        """Stop hashing."""
        self._pool.terminate()
        self._pool.join()


def expectations(config: Config) -> tuple[dict[str, tuple[int | None, str]], dict[str, str], list[Problem]]:
    """Path → (size, sha256) of every locked file, path → target of every link, and what cannot even be read."""
    expected: dict[str, tuple[int | None, str]] = {}
    links: dict[str, str] = {}
    problems: list[Problem] = []
    places = config.places
    listing = places.kit / "content.json"
    if listing.exists():
        try:
            content = json.loads(listing.read_bytes())
            files, links = content["files"], content.get("links", {})
        except (OSError, ValueError, KeyError) as error:
            problems.append(Problem(message=f"cannot be read: {error}", file=places.shown(listing)))
            files = {}
        expected |= {_below(places.root, name): (None, digest) for name, digest in files.items()}
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


def _overrides(config: Config, environ: dict[str, str]) -> Iterator[Problem]:
    """Variables that bring in what is not locked. Without a container, kitbuild itself starts the guest by a path."""
    in_image = config.locked and config.engine != "local"
    for name, what in OVERRIDES.items():
        if environ.get(name) and (in_image or name == "LOCAL_KERNELS"):
            yield Problem(message=f"{name} is set and {what}", key=name, hint=f"unset {name}")


def _link_problems(config: Config, links: dict[str, str]) -> Iterator[Problem]:
    for name, target in links.items():
        path = _below(config.places.root, name)
        found = os.readlink(path) if os.path.islink(path) else None  # noqa: PTH114, PTH115 - thousands of files
        if found != target:
            yield Problem(message=f"should link to {target}, not {found}", file=name)


def _extra_files(config: Config, expected: Iterable[str], links: dict[str, str]) -> Iterator[Problem]:
    """Files that nobody locked, in the places that only kitbuild fills."""
    places = config.places
    known = set(expected) | {_below(places.root, name) for name in links}
    known.add(str(places.kit / "content.json"))
    if not (places.kit / "content.json").exists():
        return
    # A library reads what lies beside a model: adapter_config.json, chat_template.jinja. It skips hidden files.
    inputs = [folder for folder, _ in _input_trees(config)]
    for top in (places.kit, places.root / "opt" / "kit", *inputs):
        for folder, below, names in os.walk(top):
            hidden = "." if top in inputs else "\0"
            below[:] = [name for name in below if not name.startswith(hidden)]
            for name in names:
                path = f"{folder}/{name}"
                if path not in known and not name.startswith(hidden):
                    yield Problem(message="is in no lock", file=places.shown(Path(path)), hint="build the image again")


def _chunks(expected: dict[str, tuple[int | None, str]]) -> Iterator[list[tuple[str, int | None, str]]]:
    """Lists of files of about the same number of bytes, the largest files first."""
    sized = []
    for path, (size, digest) in expected.items():
        try:
            actual = os.stat(path).st_size  # noqa: PTH116 - thousands of files
        except OSError:
            actual = 0
        sized.append((actual, path, size, digest))
    chunk: list[tuple[str, int | None, str]] = []
    held = 0
    for actual, path, size, digest in sorted(sized, reverse=True):
        chunk.append((path, size, digest))
        held += actual + 4096
        if held >= CHUNK_BYTES:
            yield chunk
            chunk, held = [], 0
    if chunk:
        yield chunk


def _check_chunk(chunk: list[tuple[str, int | None, str]]) -> list[tuple[str, str]]:
    buffer = bytearray(1 << 20)
    return [(path, text) for path, size, digest in chunk if (text := _difference(path, size, digest, buffer))]


def _difference(path: str, size: int | None, digest: str, buffer: bytearray) -> str | None:
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - thousands of files
            actual = os.fstat(file.fileno()).st_size
            if size is not None and actual != size:
                return f"has {actual} bytes, the lock says {size}"
            found = _sha256(file.readinto, buffer)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None if found == digest else f"sha256 is {found[:12]}…, the lock says {digest[:12]}…"


def _sha256(readinto: Callable[[bytearray], int | None], buffer: bytearray) -> str:
    digest, view = hashlib.sha256(), memoryview(buffer)
    while count := readinto(buffer):
        digest.update(view[:count])
    return digest.hexdigest()
