"""Step 4, without a container engine: the same guest, from the same locked files, on this host's Python."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from kitbuild.errors import RunError
from kitbuild.run.container import guest_environment, input_mounts
from kitbuild.run.follow import Stop, follow, followed, keep_printed, raise_for

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kitbuild.lock.models import Lock
    from kitbuild.progress import Progress
    from kitbuild.store import Store

KEPT = ("PATH", "LANG", "LC_ALL", "TZ", "TMPDIR", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "NVIDIA_VISIBLE_DEVICES")
"""What of the user's environment reaches a local run: the rest could change what is trained."""

RENDEZVOUS = ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""With several nodes, where they meet: who starts one kitbuild on each (`kitbuild render slurm`) says so."""


class LocalProcess:
    """A started guest process as `follow` sees it; it leads its own process group."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def exit_code(self) -> int | None:
        """None while it runs; 128 + signal when a signal ended it, as a shell tells it."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def stop(self) -> None:
        """SIGTERM: the guest saves a checkpoint and ends with exit code 10."""
        self._process.terminate()

    def kill(self) -> None:
        """SIGKILL to the whole group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def out_of_memory(self) -> bool:
        """The guest tells by itself; a killed parent cannot be told from another kill."""
        return False


def run_local(
    lock: Lock,
    *,
    root: Path,
    python: Path,
    locked: bool,
    run_dir: Path,
    store: Store,
    environ: Mapping[str, str],
    resume: bool,
    measure: bool = False,
    progress: Progress,
    stop: Stop,
) -> None:
    """Run the guest below `root` (from `image.materialise`) with `python`. Raises what the guest says went wrong."""
    with followed(run_dir) as held, store.scratch() as scratch:
        joined = scratch / "root"
        _join(joined, root, lock, store)
        (scratch / "cache").mkdir()
        environment = _environment(
            joined, scratch / "cache", run_dir, environ, locked=locked, resume=resume, measure=measure
        )
        if int((lock.recipe.get("launch") or {}).get("nodes", 1)) > 1:
            environment |= {key: environ[key] for key in RENDEZVOUS if key in environ}
            _share_checkpoints(run_dir, environ)
            environment.setdefault("KIT_RESUME", "auto")  # the shared folder may hold what another node has saved
        printed = scratch / "printed"
        process = _start(python, environment=environment, printed=printed, held=held)
        guest = LocalProcess(process)
        try:
            code = follow(guest, run_dir, progress=progress, stop=stop)
        finally:
            guest.kill()
            process.wait()
        keep_printed(printed.read_bytes(), run_dir)
    raise_for(code, guest, run_dir, stop=stop)


def _join(joined: Path, root: Path, lock: Lock, store: Store) -> None:
    """One root with the image's files and this run's inputs."""
    joined.mkdir()
    for entry in root.iterdir():
        (joined / entry.name).symlink_to(entry)
    for host, place in input_mounts(lock, store, baked=frozenset()):
        target = joined / place.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(host)


def _share_checkpoints(run_dir: Path, environ: Mapping[str, str]) -> None:
    """KIT_CHECKPOINTS: one folder for all nodes of a job, each of which has a run directory of its own."""
    if shared := environ.get("KIT_CHECKPOINTS"):
        Path(shared).mkdir(parents=True, exist_ok=True)
        if not (run_dir / "checkpoints").exists():
            (run_dir / "checkpoints").symlink_to(Path(shared).absolute())


def _environment(
    joined: Path, cache: Path, run_dir: Path, environ: Mapping[str, str], *, locked: bool, resume: bool, measure: bool
) -> dict[str, str]:
    site = next((joined / "opt/kit/lib").glob("python3*/site-packages"), None)
    told = guest_environment(engine="local", locked=locked, image=None, resume=resume, measure=measure)
    return {
        **{key: environ[key] for key in KEPT if key in environ},
        **told,
        "KIT_ROOT": str(joined),
        "KIT_OUT": str(run_dir),
        "KIT_CACHE": str(cache),
        "HOME": str(cache),
        "USER": "kit",
        "PYTHONPATH": str(site) if site else "",
        "PYTHONNOUSERSITE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        # `-m` would search the caller's directory before the locked packages.
        "PYTHONSAFEPATH": "1",
    }


def _start(python: Path, *, environment: Mapping[str, str], printed: Path, held: int) -> subprocess.Popen[bytes]:
    """`held` goes to the guest: where we are killed and it trains on, nobody else writes in its run directory."""
    try:
        with printed.open("wb") as stream:
            return subprocess.Popen(
                [python, "-m", "kitbuild.guest", "train"],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(held,),
            )
    except OSError as error:
        raise RunError(
            f"{python} cannot be started: {error.strerror}", hint="--python takes the path of a Python"
        ) from error
