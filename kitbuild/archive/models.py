"""Step 5, the data: what the guest writes into a run directory, as frozen models.

`manifest.json` and `exit.json` may hold fields that this kitbuild does not know: a later guest of the same format
may record one more fact, and no verdict depends on the set of facts. A line of `metrics.jsonl` is closed: verdicts
are about exactly these quantities, so another set of keys is another format. A newer `format` is refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationInfo, field_validator

from kitbuild.lock.models import Digest, Lock, Sha256  # noqa: TC001 - pydantic resolves them when the module loads

MANIFEST_FORMAT = 1
MOST = 2**63 - 1


def exact_float(text: str) -> float:
    """The float of an exact hex string; only what `float.hex()` writes is taken."""
    try:
        value = float.fromhex(text)
    except (ValueError, OverflowError):
        value = None
    if value is None or value.hex() != text:
        raise ValueError(f"{text!r} is not a float as float.hex() writes it")
    return value


def _is_exact(text: str) -> str:
    exact_float(text)
    return text


class Open(BaseModel):
    """Frozen; unknown fields are left out."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class RankValues(BaseModel):
    """What one rank put into a step, before it was merged over the ranks."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    loss: str
    batch_sha256: Sha256

    _exact = field_validator("loss")(_is_exact)


class Metrics(BaseModel):
    """One optimizer step. Floats stay the strings that were written: equality is equality of bits.

    `ranks` is there where several processes trained.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    step: Annotated[int, Field(ge=1)]
    loss: str
    grad_norm: str
    learning_rate: str
    tokens: Annotated[int, Field(ge=0, le=MOST)]
    batch_sha256: Sha256
    seconds: str
    peak_memory_bytes: Annotated[int, Field(ge=0, le=MOST)] | None
    ranks: Annotated[tuple[RankValues, ...], Field(strict=False)] = ()

    _exact = field_validator("loss", "grad_norm", "learning_rate", "seconds")(_is_exact)


class ImageIdentity(Open):
    """The image that ran; all None for a local run."""

    config_digest: Digest | None = None
    manifest_digest: Digest | None = None
    engine_id: str | None = None
    content_sha256: Sha256 | None = None


class Environment(Open):
    """Where the guest ran; `locked` is False where the packages were merely found there."""

    locked: bool = False
    python: str | None = None
    packages: dict[str, str] = Field(default_factory=dict)
    variables: dict[str, str | None] = Field(default_factory=dict)
    hardening: dict[str, Any] = Field(default_factory=dict)


class Device(Open):
    """What computed."""

    kind: str | None = None
    name: str | None = None
    count: int | None = None
    compute_capability: str | None = None
    sm_count: int | None = None
    mig: str | bool | None = None
    memory_bytes: int | None = None
    cpu: dict[str, Any] = Field(default_factory=dict)
    threads: int | None = None

    @field_validator("compute_capability", mode="before")
    @classmethod
    def _major_minor(cls, value: object) -> object:
        return ".".join(str(part) for part in value) if isinstance(value, list | tuple) else value


class KernelUse(Open):
    """A Hub kernel that was loaded, and how often each rank called it."""

    role: str
    repo: str
    commit: str | None = None
    variant: str | None = None
    member: str | None = None
    calls: dict[str, int] = Field(default_factory=dict)

    @property
    def used(self) -> bool:
        """Whether every rank called it."""
        return bool(self.calls) and all(count > 0 for count in self.calls.values())


class Attention(Open):
    """The attention path asked for and the one taken; `calls` by rank and path, where they were counted."""

    requested: str | None = None
    used: str | None = None
    calls: dict[str, dict[str, int]] = Field(default_factory=dict)


class Data(Open):
    """`fingerprint` covers the batch digests of all steps in order."""

    fingerprint: Sha256 | None = None
    rows: int | None = None
    steps: int | None = None


class Results(Open):
    """What came out; losses are exact hex strings."""

    steps: int | None = None
    loss_first: str | None = None
    loss_last: str | None = None
    evaluate: dict[str, Any] | None = None
    seconds: dict[str, float | str | None] = Field(default_factory=dict)
    tokens: int | None = None
    metrics_sha256: str | None = None
    measured: dict[str, Any] | None = None
    """A benchmark's own: peak bytes, rate of matrix products. Such a run saves no weights."""


class Tensor(Open):
    """One tensor of the trained weights; `sha256` of its bytes as safetensors stores them."""

    dtype: str
    shape: tuple[int, ...]
    sha256: Sha256


class Manifest(Open):
    """A whole manifest. A run that failed or was stopped has only what was known by then."""

    format: Literal[1]
    files: Literal["archive.json"] | None = None
    """Where the list of the archive's files is; None for a run that an older kitbuild made."""
    name: str
    lock: Lock
    lock_sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    content_sha256: str
    image: ImageIdentity = ImageIdentity()
    engine: str | None = None
    environment: Environment = Environment()
    device: Device = Device()
    driver: str | None = None
    build: dict[str, Any] = Field(default_factory=dict)
    launch: dict[str, Any] = Field(default_factory=dict)
    arguments: dict[str, Any] = Field(default_factory=dict)
    attention: Attention = Attention()
    kernels: tuple[KernelUse, ...] = ()
    liger: dict[str, Any] = Field(default_factory=dict)
    determinism: dict[str, Any] = Field(default_factory=dict)
    data: Data = Data()
    results: Results = Results()
    weights: dict[str, Tensor] = Field(default_factory=dict)
    seed: int | None = None
    resumed: tuple[int, ...] = ()
    """The steps after which the run was stopped and taken up again."""
    started: str | None = None
    finished: str | None = None
    complete: bool = False

    @field_validator(
        "image", "environment", "device", "build", "launch", "arguments", "attention", "kernels", "liger", "data",
        "results", "weights", "resumed", "determinism", mode="before",
    )  # fmt: skip
    @classmethod
    def _unknown_by_then(cls, value: object, info: ValidationInfo) -> object:
        name = info.field_name or ""
        return cls.model_fields[name].get_default(call_default_factory=True) if value is None else value


class Exit(Open):
    """How the guest ended."""

    exit_code: int
    code: str | None = None
    phase: str | None = None
    message: str | None = None
    hint: str | None = None
    steps_done: int | None = None
    steps: int | None = None
