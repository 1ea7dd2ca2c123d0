"""The local engine, with a program in the guest's place."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kitbuild.errors import RunError, StoppedError, VerificationError
from kitbuild.progress import Silent
from kitbuild.run.follow import Stop, read_json
from kitbuild.run.local_engine import run_local
from tests.image.kit import make_lock, new_store

if TYPE_CHECKING:
    from kitbuild.store import Store

HEAD = f"""#!{sys.executable} -I
import json, os, signal, subprocess, sys, time
out = os.environ["KIT_OUT"]
def write(name, **fields):
    with open(f"{{out}}/{{name}}.tmp", "w") as stream:
        json.dump(fields, stream)
    os.replace(f"{{out}}/{{name}}.tmp", f"{{out}}/{{name}}")
def end(code, message="the fact"):
    write("exit.json", exit_code=code, message=message, hint=None, problems=[], steps_done=3)
    sys.exit(code)
"""
USERS = {
    "PATH": os.environ["PATH"],
    "LANG": "C.UTF-8",
    "CUDA_VISIBLE_DEVICES": "0",
    "PYTHONPATH": "/somewhere",
    "OMP_NUM_THREADS": "64",
    "LOCAL_KERNELS": "org/x=/tmp/x",
    "HF_TOKEN": "secret",
    "LD_PRELOAD": "",
    "KIT_RESUME": "1",
}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return new_store(tmp_path / "store")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    return path


def run(tmp_path: Path, store: Store, run_dir: Path, body: str, **changes: Any) -> None:
    """Run `body` as the guest."""
    root = tmp_path / "root"
    (root / "kit").mkdir(parents=True)
    (root / "kit/lock.json").write_text("{}")
    (root / "opt/kit/lib/python3.11/site-packages").mkdir(parents=True)
    python = tmp_path / "python"
    python.write_text(HEAD + body)
    python.chmod(0o755)
    given: dict[str, Any] = {
        "root": root,
        "python": python,
        "locked": True,
        "run_dir": run_dir,
        "store": store,
        "environ": USERS,
        "resume": False,
        "progress": Silent(),
        "stop": Stop(),
    }
    run_local(changes.pop("lock", None) or make_lock(store), **(given | changes))


def test_guest_sees_the_locked_world(tmp_path: Path, store: Store, run_dir: Path) -> None:
    """Called as the image's entry, below one root that holds the image's files and this run's inputs."""
    body = """
root = os.environ["KIT_ROOT"]
write("seen.json", arguments=sys.argv[1:], environment=dict(os.environ), kit=os.listdir(f"{root}/kit"),
      model=open(f"{root}/inputs/model/config.json").read(), data=os.listdir(f"{root}/inputs/data/0"))
end(0)
"""
    run(tmp_path, store, run_dir, body)
    seen = read_json(run_dir / "seen.json")
    assert seen["arguments"] == ["-m", "kitbuild.guest", "train"]
    assert (seen["kit"], seen["model"], seen["data"]) == (["lock.json"], "{}", ["data.jsonl"])


def test_users_environment_is_left_behind(tmp_path: Path, store: Store, run_dir: Path) -> None:
    """What could change what is trained, or is a secret, does not reach the guest."""
    run(tmp_path, store, run_dir, 'write("seen.json", **os.environ)\nend(0)\n')
    seen = read_json(run_dir / "seen.json")
    assert set(seen) - {"LC_CTYPE"} == {
        *("PATH", "LANG", "CUDA_VISIBLE_DEVICES"),
        *("KIT_ENGINE", "KIT_LOCKED", "KIT_ROOT", "KIT_OUT", "KIT_CACHE"),
        *(
            "HOME",
            "USER",
            "PYTHONPATH",
            "PYTHONNOUSERSITE",
            "PYTHONDONTWRITEBYTECODE",
            "PYTHONHASHSEED",
            "PYTHONSAFEPATH",
        ),
    }
    assert seen["PYTHONPATH"].endswith("/opt/kit/lib/python3.11/site-packages")
    assert (seen["KIT_ENGINE"], seen["KIT_LOCKED"], seen["KIT_OUT"]) == ("local", "1", str(run_dir))


@pytest.mark.parametrize("nodes", [1, 2])
def test_several_nodes_know_where_they_meet(nodes: int, tmp_path: Path, store: Store, run_dir: Path) -> None:
    """What the scheduler says of this node reaches the guest where there are several, and only there."""
    told = {"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    lock = make_lock(store)
    lock = lock.model_copy(update={"recipe": {**lock.recipe, "launch": {"nodes": nodes}}})
    run(tmp_path, store, run_dir, 'write("seen.json", **os.environ)\nend(0)\n', lock=lock, environ=USERS | told)
    seen = read_json(run_dir / "seen.json")
    assert {key: seen[key] for key in told if key in seen} == (told if nodes > 1 else {})


def test_nodes_share_checkpoints(tmp_path: Path, store: Store, run_dir: Path) -> None:
    """KIT_CHECKPOINTS: each node's run directory has the one folder of all, and a new run goes on from what is in it."""
    shared = tmp_path / "job/checkpoints"
    lock = make_lock(store)
    lock = lock.model_copy(update={"recipe": {**lock.recipe, "launch": {"nodes": 2}}})
    told = USERS | {"KIT_CHECKPOINTS": str(shared)}
    body = 'open(out + "/checkpoints/x", "w").close()\nwrite("seen.json", **os.environ)\nend(0)\n'
    run(tmp_path, store, run_dir, body, lock=lock, environ=told)
    assert (shared / "x").is_file()
    assert read_json(run_dir / "seen.json")["KIT_RESUME"] == "auto"
    (tmp_path / "alone").mkdir()
    run(tmp_path / "alone", store, tmp_path / "alone", 'write("seen.json", **os.environ)\nend(0)\n', environ=told)
    assert not (tmp_path / "alone/checkpoints").exists()


@pytest.mark.parametrize(("locked", "resume"), [(False, True), (True, False)])
def test_guest_is_told_what_the_run_is(
    *, locked: bool, resume: bool, tmp_path: Path, store: Store, run_dir: Path
) -> None:
    """Locked or only recorded, new or resumed."""
    run(tmp_path, store, run_dir, 'write("seen.json", **os.environ)\nend(0)\n', locked=locked, resume=resume)
    seen = read_json(run_dir / "seen.json")
    assert seen["KIT_LOCKED"] == str(int(locked))
    assert ("KIT_RESUME" in seen) is resume


def test_nothing_is_left_behind(tmp_path: Path, store: Store, run_dir: Path) -> None:
    """The joined root and the cache go when the run ends; the inputs in the store stay."""
    run(tmp_path, store, run_dir, 'open(os.environ["KIT_CACHE"] + "/x", "w").close()\nend(0)\n')
    assert list((store.root / "work").iterdir()) == []
    assert store.path(make_lock(store).datasets[0].tree.files[0].sha256).is_file()
    assert (tmp_path / "root/kit/lock.json").is_file()


def test_guests_words_are_passed_on(tmp_path: Path, store: Store, run_dir: Path) -> None:
    """Exit 7 with what the guest found."""
    with pytest.raises(VerificationError, match="2 locked files differ"):
        run(tmp_path, store, run_dir, 'end(7, "2 locked files differ")\n')


def test_stop_becomes_a_checkpoint(tmp_path: Path, store: Store, run_dir: Path) -> None:
    """SIGTERM reaches the guest, which saves and ends with 10."""
    body = """
def stop(*_):
    write("checkpoint")
    end(10, "stopped on request after step 3 of 9")
signal.signal(signal.SIGTERM, stop)
write("status.json", phase="train", step=3, steps=9)
time.sleep(60)
"""
    stop = Stop()

    class Presses(Silent):
        def detail(self, text: str) -> None:
            assert text
            stop.requested = True

    with pytest.raises(StoppedError, match="after step 3 of 9"):
        run(tmp_path, store, run_dir, body, stop=stop, progress=Presses())
    assert (run_dir / "checkpoint").is_file()


def test_interruption_leaves_no_process(tmp_path: Path, store: Store, run_dir: Path) -> None:
    """A second Ctrl-C ends the guest and what it started, though both ignore SIGTERM."""
    body = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "60"])
write("pids.json", pids=[os.getpid(), child.pid])
write("status.json", phase="train", message="x")
time.sleep(60)
"""

    class Presses(Silent):
        def detail(self, text: str) -> None:
            raise KeyboardInterrupt(text)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, store, run_dir, body, progress=Presses())
    pids = json.loads((run_dir / "pids.json").read_text())["pids"]
    assert len(pids) == 2
    deadline = time.monotonic() + 5
    while any(running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(running(pid) for pid in pids)


def running(pid: int) -> bool:
    """Whether it runs; a zombie that waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(("body", "code"), [("os.kill(os.getpid(), 9)\n", 137), ("os._exit(3)\n", 3)])
def test_guest_that_dies_without_a_word(body: str, code: int, tmp_path: Path, store: Store, run_dir: Path) -> None:
    """Exit 6 that names the code as a shell would."""
    with pytest.raises(RunError, match=rf"killed or crashed \(exit code {code}\)"):
        run(tmp_path, store, run_dir, body)


@pytest.mark.parametrize("logs", [False, True])
def test_what_it_printed_is_kept_where_there_is_no_log(
    *, logs: bool, tmp_path: Path, store: Store, run_dir: Path
) -> None:
    """A guest that cannot even be imported is not silent; one that has a log needs no second one."""
    body = 'os.mkdir(f"{out}/logs")\nopen(f"{out}/logs/guest.log", "w").close()\n' if logs else ""
    with pytest.raises(RunError) as raised:
        run(tmp_path, store, run_dir, body + "import no_such_module\n")
    name = "logs/guest.log" if logs else "start.log"
    assert raised.value.hint == f"see {run_dir}/{name}"
    assert (run_dir / "start.log").exists() is not logs
    assert logs or "No module named 'no_such_module'" in (run_dir / "start.log").read_text()


def test_python_that_cannot_be_started(tmp_path: Path, store: Store, run_dir: Path) -> None:
    """Exit 6 that names it."""
    with pytest.raises(RunError) as raised:
        run(tmp_path, store, run_dir, "", python=tmp_path / "none")
    assert raised.value.message == f"{tmp_path}/none cannot be started: No such file or directory"
    assert list((store.root / "work").iterdir()) == []


def test_a_guest_that_outlives_us_keeps_its_run(tmp_path: Path, store: Store, run_dir: Path) -> None:
    """Where kitbuild was killed and its guest trains on, a second run in that directory is refused until it ends."""
    left = """
rest = subprocess.Popen(["sleep", "60"], start_new_session=True, close_fds=False, stdout=subprocess.DEVNULL)
write("pid.json", pid=rest.pid)
end(0)
"""
    run(tmp_path, store, run_dir, left)
    pid = read_json(run_dir / "pid.json")["pid"]
    with pytest.raises(RunError, match="another kitbuild follows the run"):
        run(tmp_path / "again", store, run_dir, "end(0)")
    os.kill(pid, 9)
    while running(pid):
        time.sleep(0.02)
    run(tmp_path / "later", store, run_dir, "end(0)")
