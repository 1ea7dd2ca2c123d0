"""Step 2: the run manifest as resolved. Pure data, and the two digests that name it.

No URL, host, time or machine fact is in it: a mirror serves as well as the origin.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints

from kitbuild.base.models import Closed, Digest, LockedBase, Sha256, SystemPackage, Upstream

__all__ = [
    "LOCK_VERSION",
    "Argument",
    "Built",
    "Closed",
    "CommitSha",
    "Defaults",
    "Digest",
    "Lock",
    "LockedBase",
    "LockedDataset",
    "LockedFile",
    "LockedKernel",
    "LockedModel",
    "LockedTree",
    "LockedWheel",
    "Maker",
    "MetAdvisory",
    "Moved",
    "PackageSet",
    "RejectedVariant",
    "Sha256",
    "SystemPackage",
    "Upstream",
    "canonical",
]

LOCK_VERSION = 1
OF_THE_WORLD = (
    "gradient_accumulation_steps",
    "ddp_backend",
    "save_on_each_node",
)  # arguments that follow from the number of processes
CommitSha = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]
Size = Annotated[int, Field(ge=0)]


def _inside(path: str) -> str:
    """A lock may come from a stranger: what it names is written below its owner's folder and nowhere else."""
    if any(part in {"", ".", ".."} for part in path.split("/")) or "\0" in path:
        raise ValueError(f"{path!r} points outside of its owner")
    return path


def _all_inside(files: tuple[LockedFile, ...]) -> tuple[LockedFile, ...]:
    for file in files:
        _inside(file.path)
    return files


def _file_name(name: str) -> str:
    if "/" in name:
        raise ValueError(f"{name!r} is no file name")
    return _inside(name)


InsidePath = Annotated[str, AfterValidator(_inside)]
FileName = Annotated[str, AfterValidator(_file_name)]


class LockedFile(Closed):
    """One file: POSIX path inside its owner (a chat template, a pylock: as the recipe has it), bytes, sha256."""

    path: str
    size: Size
    sha256: Sha256


InsideFiles = Annotated[tuple[LockedFile, ...], AfterValidator(_all_inside)]


class Maker(Closed):
    """The kitbuild that wrote the lock: another one would assemble another image."""

    version: str
    guest_sha256: Sha256
    layout: int


class Built(Closed):
    """What decides the bytes of a wheel built from an sdist; `python` is its tag, for any of them builds the same."""

    sdist_sha256: Sha256
    python: str
    requires: tuple[str, ...]
    env: dict[str, str]


class LockedWheel(Closed):
    """One wheel; `index` is a name, never a URL."""

    name: str
    version: str
    file: FileName
    size: Size
    sha256: Sha256
    index: str
    built: Built | None = None


class LockedTree(Closed):
    """Files of a model, tokenizer or dataset: from a Hub commit (`repo`) or from disk (`path`, as the recipe has it)."""

    repo: str | None = None
    revision: str | None = None
    commit: CommitSha | None = None
    path: str | None = None
    files: InsideFiles


class LockedModel(Closed):
    """Exactly one of `weights` (a checkpoint) and `config` (random init from the seed)."""

    weights: LockedTree | None
    config: dict[str, Any] | None
    tokenizer: LockedTree | None
    chat_template: LockedFile | None


class LockedDataset(Closed):
    """One dataset; `format` tells the guest how to read `tree` (jsonl, parquet, …)."""

    tree: LockedTree
    format: Literal["json", "parquet", "csv", "text", "arrow"]
    config: str | None
    split: str
    data_files: tuple[InsidePath, ...]
    weight: float | None = None


class RejectedVariant(Closed):
    """A build variant that was not taken, and why."""

    variant: str
    reason: str


class Moved(Closed):
    """A place that was asked and sent on to another: by a rename, or by its `kernel-status.toml` at this commit."""

    repo: str
    revision: str
    commit: CommitSha


class LockedKernel(Closed):
    """One Hub kernel: exactly one build variant of one commit.

    `redirects` are the places on the way from the recipe's name to `repo`, the first of them the recipe's own.
    `role` says who calls it; `layers` maps a module class to the layer that replaces it.
    `files` are paths in the repository (`build/<variant>/…`). `metadata_sha256` is of `metadata.json`.
    """

    role: Literal["attention", "layers", "dependency"]
    repo: InsidePath
    revision: InsidePath
    commit: CommitSha
    redirects: tuple[Moved, ...] = ()
    member: str | None
    layers: dict[str, str]
    variant: FileName
    rejected: tuple[RejectedVariant, ...]
    kernel_version: int | None
    files: InsideFiles
    metadata_sha256: Sha256
    metadata_digest: str | None
    dependencies: tuple[str, ...]
    publisher: str
    trusted: bool
    signature: Literal["absent", "present", "verified"]


class Argument(Closed):
    """A value in force and where it comes from."""

    value: Any
    origin: Literal["recipe", "kitbuild", "library"]


class Defaults(Closed):
    """Declared defaults of the locked libraries, read from their source, and every value in force.

    `declared` maps a class (`trl.SFTConfig`) to field to default (as source text where it is not a literal).
    `device_dependent` names arguments that the libraries decide from the device.
    """

    declared: dict[str, dict[str, Any]]
    arguments: dict[str, Argument]
    device_dependent: tuple[str, ...]


class MetAdvisory(Closed):
    """An advisory whose condition holds for this lock."""

    id: str
    severity: Literal["info", "warning", "error"]


class PackageSet(Closed):
    """The tested package set that the wheels were resolved from, or the recipe's own pylock.toml in its place."""

    target: str
    sha256: Sha256
    pylock: LockedFile | None = None


class Lock(Closed):
    """A whole lock. `recipe` is the recipe as parsed, less its name: the guest reads all settings from here."""

    version: Literal[1]
    name: FileName
    recipe_sha256: Sha256
    kitbuild: Maker
    target: str
    package_set: PackageSet
    base: LockedBase
    wheels: tuple[LockedWheel, ...]
    model: LockedModel
    datasets: tuple[LockedDataset, ...]
    evaluate: LockedDataset | None
    kernels: tuple[LockedKernel, ...]
    defaults: Defaults
    launch: dict[str, Any]
    recipe: dict[str, Any]
    advisories: tuple[MetAdvisory, ...]

    @property
    def content_sha256(self) -> str:
        """Digest of everything but `recipe_sha256` and `name`: an edited comment changes no verdict."""
        body = self.model_dump(mode="json", exclude={"recipe_sha256", "name"})
        return hashlib.sha256(canonical(body)).hexdigest()

    @property
    def identity_sha256(self) -> str:
        """What a run that goes on must share with what it was: with virtual ranks, all but the number of processes.

        `kitbuild.guest.identity` is the same, where the lock is only JSON.
        """
        given = self.recipe.get("determinism")
        if not isinstance(given, dict) or not given.get("virtual_ranks"):
            return self.content_sha256
        launch = {**self.recipe["launch"], "nodes": None, "processes_per_node": None}
        arguments = {name: item for name, item in self.defaults.arguments.items() if name not in OF_THE_WORLD}
        changes = {
            "recipe": {**self.recipe, "launch": launch},
            "defaults": self.defaults.model_copy(update={"arguments": arguments}).model_dump(mode="json"),
            "launch": None,
        }
        body = self.model_dump(mode="json", exclude={"recipe_sha256", "name", *changes}) | changes
        return hashlib.sha256(canonical(body)).hexdigest()

    def to_bytes(self) -> bytes:
        """The bytes of the lock file; `sha256` of them is `lock_sha256`."""
        body = self.model_dump(mode="json") | {"content_sha256": self.content_sha256}
        return (json.dumps(body, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()

    @property
    def sha256(self) -> str:
        """`lock_sha256`: names the image."""
        return hashlib.sha256(self.to_bytes()).hexdigest()


def canonical(value: object) -> bytes:
    """JSON with sorted keys and no spaces, UTF-8: the one serialisation that digests are taken of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
