"""What a training container is given, to the word."""

from __future__ import annotations

import json
import os
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import pytest

from kitbuild.guest_files import GUEST_UID
from kitbuild.lock.models import LockedDataset, LockedModel, LockedTree
from kitbuild.run.container import ContainerSpec, Mount, guest_environment, input_mounts
from kitbuild.run.docker_engine import container_spec
from tests.image.kit import locked_file, make_lock, new_store

if TYPE_CHECKING:
    from kitbuild.lock.models import Lock
    from kitbuild.store import Store

SPEC = ContainerSpec(
    image="sha256:" + "a" * 64,
    name="tiny-20260101T000000Z-abcdef",
    user="1000:1000",
    mounts=(
        Mount(host=Path("/home/u/store/trees/m"), container=PurePosixPath("/inputs/model")),
        Mount(host=Path("/home/u/my runs/r"), container=PurePosixPath("/out"), read_only=False),
    ),
    environment={"KIT_LOCKED": "1", "KIT_ENGINE": "docker"},
)
LINE = (
    "docker run --rm --stop-timeout 600 --network none --read-only --cap-drop ALL --security-opt no-new-privileges --user 1000:1000"
    " --shm-size 1073741824 --tmpfs /tmp:rw,nosuid,nodev,mode=1777 --tmpfs /cache:rw,nosuid,nodev,exec,mode=1777"
    "{gpus}"
    " --mount type=bind,source=/home/u/store/trees/m,target=/inputs/model,readonly"
    " --mount 'type=bind,source=/home/u/my runs/r,target=/out'"
    " -e KIT_ENGINE=docker -e KIT_LOCKED=1 sha256:" + "a" * 64 + " train"
)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return new_store(tmp_path / "store")


def rich_lock(store: Store, *, bake: tuple[str, ...] = ()) -> Lock:
    """Every kind of input there is."""
    tree = LockedTree(path="t", files=(locked_file(store, "tokenizer.json", b"{1}"),))
    data = LockedDataset(
        tree=LockedTree(path="d", files=(locked_file(store, "d.jsonl", b"{}\n"),)),
        format="json",
        config=None,
        split="train",
        data_files=("d.jsonl",),
    )
    model = LockedModel(
        weights=LockedTree(path="m", files=(locked_file(store, "config.json", b"{}"),)),
        config=None,
        tokenizer=tree,
        chat_template=locked_file(store, "my/chat.jinja", b"{{ messages }}"),
    )
    return make_lock(store, bake=bake, model=model, datasets=(data, data), evaluate=data)


@pytest.mark.parametrize(("gpus", "words"), [(False, ""), (True, " --gpus all")])
def test_command_line(*, gpus: bool, words: str) -> None:
    """The printed line is the equal `docker run`, quoted for a shell."""
    spec = ContainerSpec(**{**vars(SPEC), "gpus": gpus})
    assert LINE.format(gpus=words) == spec.command_line()


def test_engine_arguments() -> None:
    """No network, no capability, no new privilege, a read-only root, an ordinary user."""
    given = SPEC.engine_arguments()
    mounts = given.pop("mounts")
    assert given == {
        "image": SPEC.image,
        "command": ["train"],
        "name": SPEC.name,
        "user": "1000:1000",
        "environment": {"KIT_LOCKED": "1", "KIT_ENGINE": "docker"},
        "tmpfs": {"/tmp": "rw,nosuid,nodev,mode=1777", "/cache": "rw,nosuid,nodev,exec,mode=1777"},  # noqa: S108
        "read_only": True,
        "network_mode": "none",
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "shm_size": 1 << 30,
        "device_requests": None,
        "detach": True,
        "stop_timeout": 600,
    }
    assert [(item["Source"], item["Target"], item["ReadOnly"]) for item in mounts] == [
        ("/home/u/store/trees/m", "/inputs/model", True),
        ("/home/u/my runs/r", "/out", False),
    ]


def test_line_and_arguments_agree() -> None:
    """What the engine is told is what is printed: each mount, each variable, each tmpfs."""
    given, line = SPEC.engine_arguments(), SPEC.command_line()
    for mount in given["mounts"]:
        assert f"source={mount['Source']},target={mount['Target']}{',readonly' if mount['ReadOnly'] else ''}" in line
    for key, value in given["environment"].items():
        assert f"-e {key}={value}" in line
    for place, options in given["tmpfs"].items():
        assert f"--tmpfs {place}:{options}" in line


def test_every_gpu_is_given() -> None:
    """A GPU run asks for all GPUs, as `--gpus all` does."""
    (request,) = ContainerSpec(**{**vars(SPEC), "gpus": True}).engine_arguments()["device_requests"]
    assert (request["Count"], request["Capabilities"]) == (-1, [["gpu"]])


def test_each_input_has_its_place(store: Store) -> None:
    """Model, tokenizer, template, every dataset, evaluation: the guest finds each where it looks."""
    found = {str(place): host for host, place in input_mounts(rich_lock(store), store, baked=frozenset())}
    assert list(found) == [
        "/inputs/model",
        "/inputs/tokenizer",
        "/inputs/chat_template.jinja",
        "/inputs/data/0",
        "/inputs/data/1",
        "/inputs/evaluate",
    ]
    assert (found["/inputs/model"] / "config.json").read_bytes() == b"{}"
    assert found["/inputs/chat_template.jinja"].read_bytes() == b"{{ messages }}"
    assert all(host.is_absolute() for host in found.values())


@pytest.mark.parametrize(
    ("baked", "expected"),
    [
        ({"model"}, ["/inputs/data/0", "/inputs/data/1", "/inputs/evaluate"]),
        ({"dataset"}, ["/inputs/model", "/inputs/tokenizer", "/inputs/chat_template.jinja"]),
        ({"model", "dataset"}, []),
    ],
)
def test_baked_inputs_are_not_mounted(baked: set[str], expected: list[str], store: Store) -> None:
    """What the image has already is not laid over it."""
    found = input_mounts(rich_lock(store), store, baked=frozenset(baked))
    assert expected == [str(place) for _, place in found]


def test_guest_environment() -> None:
    """All that the host tells a guest, and nothing else."""
    image = {"config_digest": "sha256:c", "manifest_digest": "sha256:m", "engine_id": "sha256:e"}
    told = guest_environment(engine="docker", locked=True, image=image, resume=False)
    assert set(told) == {"KIT_ENGINE", "KIT_LOCKED", "KIT_IMAGE", "KIT_HARDENING"}
    assert (told["KIT_ENGINE"], told["KIT_LOCKED"]) == ("docker", "1")
    assert json.loads(told["KIT_IMAGE"]) == image
    assert json.loads(told["KIT_HARDENING"])["network"] == "none"
    local = guest_environment(engine="local", locked=False, image=None, resume=True)
    assert local == {"KIT_ENGINE": "local", "KIT_LOCKED": "0", "KIT_RESUME": "1"}


def test_container_of_a_run(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ordinary user's container runs as that user; the run directory is the one writable mount."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "getegid", lambda: 100)
    run_dir = tmp_path / "tiny-1"
    run_dir.mkdir()
    lock = rich_lock(store, bake=("model",))
    spec = container_spec(lock, image={"engine_id": "sha256:e"}, run_dir=run_dir, store=store, resume=True)
    assert (spec.image, spec.name, spec.user, spec.gpus) == ("sha256:e", "tiny-1", "1000:100", False)
    assert [str(mount.container) for mount in spec.mounts if not mount.read_only] == ["/out"]
    assert "/inputs/model" not in {str(mount.container) for mount in spec.mounts}
    assert spec.environment["KIT_RESUME"] == "1"


def test_root_gives_the_run_directory_to_the_guest(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root's container runs as 10001, who owns the run directory and all in it; a link's target keeps its owner."""
    owners: dict[str, tuple[int, int]] = {}

    def chown(path: Path, uid: int, gid: int, *, follow_symlinks: bool) -> None:
        assert not follow_symlinks
        owners[path.name] = (uid, gid)

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "chown", chown)
    run_dir = tmp_path / "tiny-1"
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "link").symlink_to("/etc/passwd")
    spec = container_spec(make_lock(store), image={"engine_id": "e"}, run_dir=run_dir, store=store, resume=False)
    assert spec.user == f"{GUEST_UID}:{GUEST_UID}"
    assert owners == dict.fromkeys(("tiny-1", "checkpoints", "link"), (GUEST_UID, GUEST_UID))
