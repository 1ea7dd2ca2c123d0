"""What goes to an engine on another machine, and what is taken from it."""

from __future__ import annotations

import io
import tarfile
import time
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import docker
import docker.errors
import pytest

from kitbuild.errors import RunError
from kitbuild.progress import Silent
from kitbuild.run import remote_engine
from kitbuild.run.container import ContainerSpec, Mount
from kitbuild.run.follow import Stop
from kitbuild.run.remote_engine import LABEL, OUT, fetch, is_remote, run_remote

if TYPE_CHECKING:
    from collections.abc import Iterator

    from docker.models.containers import Container

EXIT = b'{"exit_code": 0}'


class Far:
    """A container: what it was sent, and what its /out holds when it ends."""

    def __init__(self, out: dict[str, bytes], *, status: str = "exited", labels: tuple[str, ...] = (LABEL,)) -> None:
        self.out, self.status, self.labels = out, status, dict.fromkeys(labels, "x")
        self.sent: dict[str, list[tarfile.TarInfo]] = {}
        self.bytes: dict[str, bytes] = {}
        self.removed: dict[str, Any] | None = None
        self.attrs = {"State": {"Status": "exited", "ExitCode": 0}}

    def put_archive(self, place: str, chunks: Iterator[bytes]) -> None:
        with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as archive:
            self.sent[place] = archive.getmembers()
            for member in self.sent[place]:
                stream = archive.extractfile(member)
                self.bytes[f"{place}/{member.name}"] = stream.read() if stream else b""

    def get_archive(self, place: str) -> tuple[Iterator[bytes], dict[str, Any]]:
        kept = io.BytesIO()
        with tarfile.open(fileobj=kept, mode="w") as archive:
            for name, data in self.out.items():
                if place != str(OUT) and name != f"out/{PurePosixPath(place).name}":
                    continue
                info = tarfile.TarInfo(name if place == str(OUT) else PurePosixPath(place).name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
        return iter([kept.getvalue()]), {}

    def start(self) -> None:
        self.status = "running"

    def reload(self) -> None:
        self.status = "exited"

    def kill(self, **_given: Any) -> None:
        self.status = "exited"

    def logs(self) -> bytes:
        return b""

    def remove(self, **given: Any) -> None:
        self.removed = given


class Engine:
    """The part of a client that a run needs."""

    def __init__(self, new: Far, old: Far | None = None) -> None:
        self.new, self.old, self.asked = new, old, dict[str, Any]()
        self.containers = self.api = self

    def get(self, name: str) -> Far:
        if name == "made":
            return self.new
        if self.old is None:
            raise docker.errors.NotFound("none")
        return self.old

    def create_host_config(self, **given: Any) -> dict[str, Any]:
        return given

    def create_container(self, *, host_config: dict[str, Any], **given: Any) -> dict[str, str]:
        self.asked = given | host_config
        return {"Id": "made"}


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A model with a file in a folder, a template, and an empty run directory."""
    for name in ("model/a/b.bin", "template/chat_template.jinja"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "run").mkdir()
    return tmp_path


def spec(host: Path) -> ContainerSpec:
    mounts = (
        Mount(host=host / "model", container=PurePosixPath("/inputs/model")),
        Mount(host=host / "template/chat_template.jinja", container=PurePosixPath("/inputs/chat_template.jinja")),
        Mount(host=host / "run", container=OUT, read_only=False),
    )
    return ContainerSpec(image="sha256:1", name="run", user="1:1", mounts=mounts)


def run(host: Path, engine: Engine, *, resume: bool = False) -> None:
    client = cast("docker.DockerClient", engine)
    run_remote(spec(host), host / "run", client=client, progress=Silent(), stop=Stop(), resume=resume)


def test_everything_goes_through_the_api(host: Path) -> None:
    """No path of this machine is mounted; inputs arrive in the container's own volume, results come back."""
    far = Far({"out/exit.json": EXIT, "out/model/x.bin": b"weights"})
    engine = Engine(far)
    run(host, engine)
    mounts = [(mount["Type"], mount["Target"], mount["Source"]) for mount in engine.asked["mounts"]]
    assert mounts == [("volume", "/inputs", None), ("volume", "/out", None)]
    assert (engine.asked["user"], engine.asked["read_only"]) == ("10001:10001", True)
    assert engine.asked["network_mode"] == "none"
    assert far.bytes["/inputs/model/a/b.bin"] == b"model/a/b.bin"
    assert far.bytes["/inputs/chat_template.jinja"] == b"template/chat_template.jinja"
    assert "/out" not in far.sent
    assert (host / "run/model/x.bin").read_bytes() == b"weights"
    assert far.removed == {"force": True, "v": True}


def test_nothing_to_send_where_all_is_baked(host: Path) -> None:
    """The image's own inputs are not hidden by a volume."""
    far = Far({"out/exit.json": EXIT})
    engine = Engine(far)
    baked = ContainerSpec(image="sha256:1", name="run", user="1:1", mounts=spec(host).mounts[-1:])
    client = cast("docker.DockerClient", engine)
    run_remote(baked, host / "run", client=client, progress=Silent(), stop=Stop(), resume=False)
    assert [mount["Target"] for mount in engine.asked["mounts"]] == ["/out"]
    assert far.sent == {}


def test_resumed_run_is_sent_with_its_owner(host: Path) -> None:
    """The guest's user can write to what is sent: the run directory's files and folders are its own there."""
    (host / "run/checkpoints/checkpoint-2").mkdir(parents=True)
    (host / "run/checkpoints/checkpoint-2/kit.json").write_bytes(b"{}")
    (host / "run/link").symlink_to("/etc/passwd")
    far = Far({"out/exit.json": EXIT})
    run(host, Engine(far), resume=True)
    assert far.bytes["/out/checkpoints/checkpoint-2/kit.json"] == b"{}"
    assert {member.name for member in far.sent["/out"]} == {
        "checkpoints",
        "checkpoints/checkpoint-2",
        "checkpoints/checkpoint-2/kit.json",
    }
    assert {(member.uid, member.gid) for member in far.sent["/out"]} == {(10001, 10001)}


def test_what_an_earlier_kitbuild_left_is_collected(host: Path) -> None:
    """Its container has ended there, and holds what is not here yet: that comes first, then it is removed."""
    old = Far({"out/exit.json": b"{}", "out/checkpoints/checkpoint-4/kit.json": b"[]"})
    far = Far({"out/exit.json": EXIT})
    run(host, Engine(far, old), resume=True)
    assert far.bytes["/out/checkpoints/checkpoint-4/kit.json"] == b"[]"
    assert old.removed == {"v": True}


def test_one_that_finished_meanwhile_is_not_run_again(host: Path) -> None:
    """Nobody followed it to its end: its results are taken, and that is the run."""
    old = Far({"out/exit.json": EXIT, "out/model/x.bin": b"weights"})
    engine = Engine(Far({}), old)
    run(host, engine, resume=True)
    assert (host / "run/model/x.bin").read_bytes() == b"weights"
    assert engine.asked == {}


def test_one_that_still_trains_is_left_alone(host: Path) -> None:
    """Exit 6, and how to wait for it."""
    old = Far({}, status="running")
    with pytest.raises(RunError, match="still trains on that engine") as raised:
        run(host, Engine(Far({}), old))
    assert "docker wait run" in (raised.value.hint or "")
    assert old.removed is None


def test_results_come_back_from_a_run_that_failed(host: Path) -> None:
    """What the guest says is read from the copy; the container is gone all the same."""
    far = Far({"out/exit.json": b'{"exit_code": 7, "message": "1 of 3 files"}'})
    far.attrs["State"]["ExitCode"] = 7
    with pytest.raises(Exception, match="1 of 3 files"):
        run(host, Engine(far))
    assert far.removed == {"force": True, "v": True}


@pytest.mark.parametrize("name", ["out/../escaped", "out/a/../../../escaped"])
def test_nothing_outside_the_run_directory_is_written(name: str, host: Path) -> None:
    """A path that climbs is refused, and nothing is there."""
    with pytest.raises(RunError, match="outside its run directory"):
        fetch(cast("Container", Far({name: b"x"})), OUT, host / "run")
    assert not list(host.rglob("escaped"))


def test_links_are_not_taken(host: Path) -> None:
    """Only regular files come back."""
    kept = io.BytesIO()
    with tarfile.open(fileobj=kept, mode="w") as archive:
        info = tarfile.TarInfo("out/passwd")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(info)
    far = SimpleNamespace(get_archive=lambda _place: (iter([kept.getvalue()]), {}))
    fetch(cast("Container", far), OUT, host / "run")
    assert list((host / "run").iterdir()) == []


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http+docker://localhost", False),
        ("http+docker://localnpipe", False),
        ("http+docker://ssh", True),
        ("http://10.0.0.1:2375", True),
        ("https://127.0.0.1:2376", True),
    ],
)
def test_remote_is_what_is_not_a_socket_here(url: str, expected: bool) -> None:  # noqa: FBT001
    """Even on this machine's own address, nobody can tell whose files an engine behind TCP has."""
    assert is_remote(cast("docker.DockerClient", SimpleNamespace(api=SimpleNamespace(base_url=url)))) is expected


def test_status_is_brought_while_it_runs(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is asked once a second, and the guest's status copied here for whoever watches."""
    clock = iter([10.0, 10.1, 11.2, 13.3])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    far = Far({"out/status.json": b'{"step": 3}', "out/lock.json": b"{}", "out/manifest.json": b"{}"})
    far.attrs["State"]["Status"] = "running"
    process = remote_engine.RemoteProcess(cast("Container", far), host / "run")
    assert process.exit_code() is None
    assert {path.name for path in (host / "run").iterdir()} == {"status.json", "lock.json"}
    assert (host / "run/status.json").read_bytes() == b'{"step": 3}'
    far.attrs["State"]["Status"] = "exited"
    assert [process.exit_code() for _ in range(2)] == [None, 0]
    far.out = {}
    assert process.exit_code() == 0
