"""Step 5: run directories on disk: their names, making one, listing them.

`runs/<name>-<UTC time>-<6 hex>/`. The container writes as the caller's uid, or as `GUEST_UID` after root gave it the
directory, so a directory of somebody else's is refused before an image is started.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from kitbuild.archive.models import exact_float
from kitbuild.archive.read import Archive, read
from kitbuild.errors import KitbuildError, RunError
from kitbuild.guest_files import GUEST_UID

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ENTROPY_BYTES = 3


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A run at a glance.

    `problem` is set where the archive could not be read or does not verify; `error` and `hint` where the run itself
    failed or was stopped, as the run said it. `loss_before` and `loss_after` are held-out, around training.
    """

    name: str
    path: str
    state: str
    problem: str | None = None
    error: str | None = None
    hint: str | None = None
    started: str | None = None
    finished: str | None = None
    steps: int | None = None
    loss_first: float | None = None
    loss_last: float | None = None
    loss_before: float | None = None
    loss_after: float | None = None
    exact_match_before: float | None = None
    exact_match_after: float | None = None
    tensors: int | None = None
    device: str | None = None
    seed: int | None = None
    environment_locked: bool | None = None
    lock_sha256: str | None = None
    archive_sha256: str | None = None

    def as_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


def run_name(name: str, now: datetime, entropy: bytes) -> str:
    """`<name>-<UTC time>-<6 hex>`."""
    return f"{name}-{now.astimezone(UTC):%Y%m%dT%H%M%SZ}-{entropy[:ENTROPY_BYTES].hex()}"


def utc_now() -> datetime:
    """The clock outside tests."""
    return datetime.now(UTC)


def new_run_dir(
    root: Path, name: str, clock: Callable[[], datetime] = utc_now, entropy: Callable[[int], bytes] = os.urandom
) -> Path:
    """Make an empty run directory below `root`, whatever the umask; exit 6 where that is not possible."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        path = root / run_name(name, clock(), entropy(ENTROPY_BYTES))
        path.mkdir()
        path.chmod(0o755)
    except OSError as error:
        raise RunError(
            f"no run directory can be made in {root}: {error.strerror}{_owner_note(root)}",
            hint="choose a place that you own with --out DIR",
        ) from error
    return path


def claim_run_dir(path: Path, *, resume: bool = False, uid: int | None = None) -> Path:
    """Take a directory that the user named: made, or empty and ours; with `resume`, ours. Exit 6 otherwise."""
    me = os.geteuid() if uid is None else uid
    try:
        path.mkdir(parents=True, exist_ok=True)
        owner = path.stat().st_uid
        empty = not any(path.iterdir())
    except OSError as error:
        raise RunError(
            f"the run directory {path} cannot be used: {error.strerror}{_owner_note(path)}",
            hint="choose a directory that you own with --out DIR",
        ) from error
    if owner not in ({0, GUEST_UID} if me == 0 else {me}):
        raise RunError(
            f"the run directory {path} belongs to uid {owner}, not to you (uid {me})",
            hint=f"choose another with --out DIR, or give it away first: chown {me} {path}",
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise RunError(
            f"the run directory {path} is not writable", hint=f"chmod u+rwx {path}, or choose another with --out DIR"
        )
    if not empty and not resume:
        raise RunError(
            f"the run directory {path} is not empty",
            hint="choose a new one with --out DIR, or continue it with --resume",
        )
    return path


def show(archive: Archive) -> Summary:
    """The plain facts of one run."""
    manifest, metrics = archive.manifest, archive.metrics
    ended = archive.exit if archive.exit and archive.exit.exit_code else None
    evaluate = manifest.results.evaluate or {}
    return Summary(
        name=archive.path.name,
        path=str(archive.path),
        state=_state(archive),
        problem=str(archive.problems[0]) if archive.problems else None,
        error=ended.message if ended else None,
        hint=ended.hint if ended else None,
        started=manifest.started,
        finished=manifest.finished,
        steps=len(metrics),
        loss_first=float.fromhex(metrics[0].loss) if metrics else None,
        loss_last=float.fromhex(metrics[-1].loss) if metrics else None,
        loss_before=_loss(evaluate.get("before")),
        loss_after=_loss(evaluate.get("after")),
        exact_match_before=_exact_match(evaluate.get("before")),
        exact_match_after=_exact_match(evaluate.get("after")),
        tensors=len(manifest.weights),
        device=manifest.device.name or _cpu_name(manifest.device.cpu) or manifest.device.kind,
        seed=manifest.seed,
        environment_locked=manifest.environment.locked if archive.manifest_found else None,
        lock_sha256=manifest.lock_sha256,
        archive_sha256=archive.sha256,
    )


def list_runs(root: Path) -> tuple[Summary, ...]:
    """Every run directory and `.kit.tar` directly below `root`, by name; a damaged one is listed with its problem."""
    if not root.is_dir():
        return ()
    found = (path for path in sorted(root.iterdir()) if not path.name.startswith(".") and _is_run(path))
    return tuple(_summary(path) for path in found)


def _is_run(path: Path) -> bool:
    if path.is_dir():
        return any((path / name).exists() for name in ("manifest.json", "lock.json"))
    return path.name.endswith(".kit.tar")


def _summary(path: Path) -> Summary:
    try:
        return show(read(path))
    except KitbuildError as error:
        return Summary(name=path.name, path=str(path), state="unreadable", problem=error.message)


def _state(archive: Archive) -> str:
    if archive.finished:
        return "complete"
    if not archive.manifest_found and archive.exit is None:
        return "unfinished"
    code = archive.exit.exit_code if archive.exit else None
    return {10: "stopped", 0: "unfinished", None: "unfinished"}.get(code, "failed")


def _loss(part: object) -> float | None:
    match part:
        case {"loss": str(text)}:
            with contextlib.suppress(ValueError):
                return exact_float(text)
    return None


def _exact_match(part: object) -> float | None:
    match part:
        case {"exact_match": int() | float() as value}:
            return float(value)
        case _:
            return None


def _cpu_name(cpu: dict[str, Any]) -> str | None:
    name = cpu.get("model_name")
    return name if isinstance(name, str) else None


def _owner_note(path: Path) -> str:
    """Who owns the nearest existing directory, when it is somebody else."""
    for place in (path, *path.parents):
        try:
            owner = place.stat().st_uid
        except OSError:
            continue
        return "" if owner == os.geteuid() else f" ({place} belongs to uid {owner})"
    return ""
