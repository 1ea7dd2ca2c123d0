"""Step 2: `build/<variant>/metadata.json` of a Hub kernel, and what its digest and signature say. No network but sigstore's.

https://github.com/huggingface/kernels: kernels-data, `Metadata`. Unknown fields are left alone: the format grows.
"""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Annotated

from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from kitbuild.errors import ResolveError, VerificationError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kitbuild.lock.models import LockedFile

METADATA = "metadata.json"
SIGNATURE = "metadata.json.sigstore"


def _version(text: str) -> str:
    try:
        Version(text)
    except InvalidVersion as error:
        raise ValueError(str(error)) from error
    return text


class _Open(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, populate_by_name=True)


class Backend(_Open):
    """What a build runs on."""

    type: str = "cpu"
    archs: tuple[str, ...] | None = None


class Dependency(_Open):
    """Another kernel, by version branch or by revision; the Hub's default branch where it says neither."""

    repo: str = Field(alias="repo-id")
    version: int | None = None
    revision: str | None = None

    @property
    def wanted(self) -> str:
        """The revision to resolve."""
        return f"v{self.version}" if self.version is not None else self.revision or "main"


class FileDigests(_Open):
    """Digests, base64, of every file of the variant but this one and its signature."""

    algorithm: str
    files: dict[str, str]


class Metadata(_Open):
    """As much of metadata.json as a lock needs."""

    version: int | None = None
    minimum_kernels: Annotated[str, AfterValidator(_version)] | None = Field(default=None, alias="kernels-minver")
    python_depends: tuple[str, ...] = Field(default=(), alias="python-depends")
    kernel_depends: tuple[Dependency, ...] = Field(default=(), alias="kernel-depends")
    backend: Backend = Backend()
    digest: FileDigests | None = None

    @model_validator(mode="before")
    @classmethod
    def _nothing_is_nothing(cls, value: object) -> object:
        return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value


def parse_metadata(data: bytes, *, name: str) -> Metadata:
    """From its bytes; what `kernels` could not have written is exit 4."""
    try:
        return Metadata.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ResolveError(
            f"{name}: metadata.json cannot be read: {place + ': ' if place else ''}{first['msg']}",
            hint="the build is damaged; take another revision, and tell its publisher",
        ) from error


def check_digest(metadata: Metadata, files: Iterable[LockedFile], *, folder: str, name: str) -> None:
    """Check a variant's files against the digest in its own metadata, which nothing does at load (kernels#745)."""
    if metadata.digest is None:
        return
    if metadata.digest.algorithm != "sha256":
        raise ResolveError(
            f"{name}: its digest is {metadata.digest.algorithm}, which the Hub's file lists cannot be checked against",
            hint="take a revision whose digest is sha256",
        )
    told = {path: _hex(text) for path, text in metadata.digest.files.items()}
    # metadata.json holds the digest, and a signature is of metadata.json: neither can be in it.
    left_out = {f"{folder}{METADATA}", f"{folder}{SIGNATURE}"}
    found = {file.path.removeprefix(folder): file.sha256 for file in files if file.path not in left_out}
    wrong = sorted(path for path in told.keys() | found.keys() if told.get(path) != found.get(path))
    if wrong:
        raise VerificationError(
            f"{name} does not match its own metadata: {', '.join(wrong)}",
            hint="the build was changed after it was made; do not use it, tell its publisher",
        )


def check_signature(metadata: bytes, signature: bytes, *, name: str) -> None:
    """Check the signature of metadata.json against the publishers that `kernels` trusts; exit 7 where it is not theirs.

    Sigstore's trust root comes from the network (https://docs.sigstore.dev/about/security/): exit 4 without it.
    """
    from kernels.verify import DEFAULT_POLICIES  # noqa: PLC0415 - a second, and only where signatures are asked for
    from sigstore import errors  # noqa: PLC0415
    from sigstore.models import Bundle, InvalidBundle  # noqa: PLC0415
    from sigstore.verify import Verifier, policy  # noqa: PLC0415

    try:
        bundle = Bundle.from_json(signature)
    except InvalidBundle as error:
        raise VerificationError(
            f"{name}: {SIGNATURE} is no signature: {error}", hint="do not use this build"
        ) from error
    try:
        verifier = Verifier.production()
    except Exception as error:  # its client for the trust root has no error family of its own
        raise ResolveError(
            f"{name}: the signature cannot be checked: sigstore's trust root is out of reach",
            hint="lock where the network is, or leave policy.require_signatures out",
        ) from error
    try:
        verifier.verify_artifact(metadata, bundle, policy.AnyOf(DEFAULT_POLICIES))
    except errors.VerificationError as error:
        raise VerificationError(
            f"{name}: the signature is not of a trusted publisher: {error}", hint="do not use this build"
        ) from error


def _hex(text: str) -> str:
    try:
        return base64.b64decode(text, validate=True).hex()
    except (binascii.Error, ValueError):
        return f"not base64: {text}"
