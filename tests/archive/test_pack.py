"""Packing a run into one file and taking it apart on another machine; files made to do harm."""

from __future__ import annotations

import io
import json
import os
import tarfile
from typing import TYPE_CHECKING, Any

import pytest

from kitbuild.archive import KitTar, check, pack, read, read_kit, unpack, verify
from kitbuild.base import bases
from kitbuild.errors import KitbuildError, LockError, ResolveError, UsageError, VerificationError
from kitbuild.guest import seal
from kitbuild.store.blobs import Store
from tests.archive.factory import DATA, WHEEL, Run, lock_body, sha256, wheel
from tests.base import made

if TYPE_CHECKING:
    from pathlib import Path

KERNEL_FILE = b"a" * 40
BASE_LAYERS = [made.layer(made.DEBIAN), made.layer({"etc/mark": "1"})]
BASE_BLOBS = [made.config(BASE_LAYERS), *BASE_LAYERS]


def open_store(path: Path) -> Store:
    return Store.open({"KITBUILD_HOME": str(path)})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store that holds all that the default lock names."""
    store = open_store(tmp_path / "store")
    for data in (DATA, b"{}", WHEEL, KERNEL_FILE, b"torch 2.13.0", b"trl 1.14.2"):
        store.add_bytes(data)
    return store


@pytest.fixture
def base(store: Store) -> dict[str, Any]:
    return made.add(store).model_dump(mode="json")


@pytest.fixture
def run_dir(tmp_path: Path, base: dict[str, Any]) -> Path:
    wheels = [wheel("torch", "2.13.0"), wheel("deepspeed", "0.19.8", WHEEL, built=True)]
    path = Run(lock=lock_body(wheels=wheels, base=base)).write(tmp_path / "tiny-20260101T000000Z-abcdef")
    (path / "checkpoints").mkdir()
    (path / "checkpoints" / "state").write_text("large")
    (path / "status.json").write_text("{}")
    return path


def names(path: Path) -> list[str]:
    with tarfile.open(path) as tar:
        return tar.getnames()


def test_a_local_pack_holds_what_nobody_else_can_give(run_dir: Path, store: Store, tmp_path: Path) -> None:
    """The run's documents and logs, inputs from disk, wheels built here and a base without upstream; nothing more."""
    output = pack(run_dir, tmp_path / "x.kit.tar", store=store)
    blobs = sorted(sha256(data) for data in (*BASE_BLOBS, DATA, b"{}", WHEEL))
    run = ["exit.json", "lock.json", "logs/guest.log", "manifest.json", "metrics.jsonl", "recipe.yaml"]
    assert ["kit.json", *(f"run/{name}" for name in run), *(f"blobs/sha256/{name}" for name in blobs)] == names(output)
    kit = read_kit(KitTar.read(output))
    assert (kit.run, kit.include, kit.weights) == (run_dir.name, "local", False)
    assert output.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    ("name", "digest", "carried"),
    [
        ("registry.example/team/base:1", "sha256:" + "1" * 64, False),
        ("registry.example/team/base:1", None, True),
        ("kitbuild/base-cuda129", "sha256:" + "1" * 64, True),
    ],
)
def test_a_base_that_a_registry_has_is_left_out(
    tmp_path: Path, base: dict[str, Any], name: str, digest: str | None, *, carried: bool
) -> None:
    """A default base is carried although its own upstream is known: its build cannot be repeated."""
    store = open_store(tmp_path / "store")
    upstream = {"name": "debian", "digest": digest}
    path = Run(lock=lock_body(base=base | {"name": name, "upstream": upstream})).write(tmp_path / "run")
    layer = f"blobs/sha256/{sha256(BASE_LAYERS[0])}"
    assert (layer in names(pack(path, tmp_path / "x.kit.tar", store=store))) == carried
    assert layer in names(pack(path, tmp_path / "x.kit.tar", store=store, include="all"))


def test_a_full_pack_holds_kernels_and_every_wheel(run_dir: Path, store: Store, tmp_path: Path) -> None:
    """`all` carries what comes from the Hub and the index too."""
    found = names(pack(run_dir, tmp_path / "x.kit.tar", store=store, include="all"))
    assert {f"blobs/sha256/{sha256(data)}" for data in (KERNEL_FILE, b"torch 2.13.0", WHEEL)} <= set(found)


def test_weights_are_carried_when_asked_for(run_dir: Path, store: Store, tmp_path: Path) -> None:
    """With weights the packed file verifies by its bytes, without by its digests."""
    output = pack(run_dir, tmp_path / "x.kit.tar", store=store, weights=True)
    assert "run/model/model.safetensors" in names(output)
    archive = read(output, weights=True)
    assert archive.has_weights
    assert archive.problems == ()


def test_the_same_run_gives_the_same_bytes(run_dir: Path, store: Store, tmp_path: Path) -> None:
    """Times, modes and the umask leave no trace."""
    first = pack(run_dir, tmp_path / "a.kit.tar", store=store).read_bytes()
    os.utime(run_dir / "manifest.json", (1, 1))
    (run_dir / "lock.json").chmod(0o600)
    old = os.umask(0o077)
    try:
        second = pack(run_dir, tmp_path / "b.kit.tar", store=store).read_bytes()
    finally:
        os.umask(old)
    assert first == second


def test_a_packed_run_is_read_in_place(run_dir: Path, store: Store, tmp_path: Path) -> None:
    """Reading a .kit.tar gives the values of the run directory and writes nothing."""
    output = pack(run_dir, tmp_path / "out" / "x.kit.tar", store=store)
    assert read(output).metrics == read(run_dir).metrics
    assert read(output).manifest == read(run_dir).manifest
    check(read(output))
    assert [path.name for path in output.parent.iterdir()] == ["x.kit.tar"]


def test_a_stranger_gets_run_and_blobs(run_dir: Path, store: Store, tmp_path: Path) -> None:
    """Unpacking into an empty store gives every local input and the base, so that no network is asked."""
    output = pack(run_dir, tmp_path / "x.kit.tar", store=store)
    other = open_store(tmp_path / "other")
    path = unpack(output, other, tmp_path / "runs" / "here")
    check(read(path))
    assert read(path).manifest == read(run_dir).manifest
    assert all(other.has(sha256(data)) for data in (*BASE_BLOBS, DATA, b"{}", WHEEL))
    assert other.records("bases") == store.records("bases")
    assert bases.recorded(other, read(path).manifest.lock.base.manifest_digest) == read(path).manifest.lock.base
    assert other.records("base-names") == {}
    assert pack(path, tmp_path / "y.kit.tar", store=other).stat().st_size == output.stat().st_size


def test_a_base_is_what_its_bytes_say(tmp_path: Path, store: Store, base: dict[str, Any]) -> None:
    """A lock that tells something else of a base than the base itself is refused, and nothing is recorded."""
    path = Run(lock=lock_body(base=base | {"interpreter": "/opt/python3.11"})).write(tmp_path / "run")
    output = pack(path, tmp_path / "x.kit.tar", store=store)
    other = open_store(tmp_path / "other")
    with pytest.raises(VerificationError, match="the base kitbuild/base-cpu is not what the lock says of it"):
        unpack(output, other, tmp_path / "here")
    assert other.records("bases") == {}
    assert not (tmp_path / "here").exists()


def test_a_missing_input_is_named_before_anything_is_written(run_dir: Path, tmp_path: Path) -> None:
    """All missing blobs are named at once, exit 4, and no file appears."""
    with pytest.raises(ResolveError) as caught:
        pack(run_dir, tmp_path / "x.kit.tar", store=open_store(tmp_path / "empty"))
    assert [problem.message for problem in caught.value.problems] == [
        "tokenizer tokenizer.json is not in the store",
        "dataset 0 chats.jsonl is not in the store",
        "wheel deepspeed-0.19.8-py3-none-any.whl is not in the store",
        "base kitbuild/base-cpu is not in the store",
    ]
    assert caught.value.message == "cannot pack: tokenizer tokenizer.json is not in the store (and 3 more)"
    assert not list(tmp_path.glob("*.kit.tar*"))


def test_a_base_without_a_layer_is_missing(run_dir: Path, store: Store, tmp_path: Path) -> None:
    """A base is carried whole or not at all."""
    store.path(sha256(BASE_LAYERS[1])).unlink()
    with pytest.raises(ResolveError, match="base kitbuild/base-cpu is not in the store"):
        pack(run_dir, tmp_path / "x.kit.tar", store=store)


def test_a_tampered_run_is_not_packed(run_dir: Path, store: Store, tmp_path: Path) -> None:
    """What does not verify is not passed on, exit 7."""
    (run_dir / "recipe.yaml").write_text("other")
    with pytest.raises(VerificationError, match="does not verify"):
        pack(run_dir, tmp_path / "x.kit.tar", store=store)


def test_checkpoints_that_nodes_share_by_a_link_are_left_out(run_dir: Path, store: Store, tmp_path: Path) -> None:
    """They are no part of the archive, wherever they are."""
    shared = (run_dir / "checkpoints").rename(tmp_path / "shared")
    (run_dir / "checkpoints").symlink_to(shared)
    seal.write(run_dir)
    packed = pack(run_dir, tmp_path / "x.kit.tar", store=store)
    assert not any("checkpoints" in name for name in names(packed))
    check(read(packed))


def test_a_link_in_a_run_is_not_packed(run_dir: Path, store: Store, tmp_path: Path) -> None:
    """A symbolic link would carry another machine's file, or nothing."""
    (run_dir / "logs" / "link").symlink_to("/etc/passwd")
    with pytest.raises(VerificationError, match="has symbolic links"):
        pack(run_dir, tmp_path / "x.kit.tar", store=store)


def test_an_output_that_cannot_be_written_is_a_usage_error(run_dir: Path, store: Store, tmp_path: Path) -> None:
    """A bad output path is exit 2 and leaves nothing."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError) as caught:
        pack(run_dir, tmp_path / "file" / "x.kit.tar", store=store)
    assert "cannot be written" in caught.value.message


def test_a_packed_run_is_not_packed_again(run_dir: Path, store: Store, tmp_path: Path) -> None:
    """Packing takes run directories."""
    output = pack(run_dir, tmp_path / "x.kit.tar", store=store)
    with pytest.raises(UsageError, match="is not a run directory"):
        pack(output, tmp_path / "y.kit.tar", store=store)


def test_a_destination_with_something_in_it_is_left_alone(run_dir: Path, store: Store, tmp_path: Path) -> None:
    """Unpacking never writes into a directory that holds something, nor through a link."""
    output = pack(run_dir, tmp_path / "x.kit.tar", store=store)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for target in (run_dir, tmp_path / "link"):
        with pytest.raises(UsageError, match="exists and is not an empty directory"):
            unpack(output, store, target)


Member = tuple[tarfile.TarInfo, bytes]


def member(name: str, data: bytes = b"", *, kind: bytes = tarfile.REGTYPE, link: str = "") -> Member:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = len(data), kind, link
    return info, data


def write_tar(path: Path, members: list[Member], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return path


KIT = json.dumps({"format": 1, "run": "x", "include": "local", "weights": False}).encode()


@pytest.mark.parametrize(
    ("evil", "reason"),
    [
        (member("run/../../etc/cron.d/x"), "'run/../../etc/cron.d/x' leads outside the archive"),
        (member("/etc/passwd"), "'/etc/passwd' leads outside the archive"),
        (member("run/a//b"), "'run/a//b' leads outside the archive"),
        (member("run/./b"), "'run/./b' leads outside the archive"),
        (member("run\\..\\x"), "'run\\\\..\\\\x' leads outside the archive"),
        (member("run/link", kind=tarfile.SYMTYPE, link="/etc/passwd"), "'run/link' is not a regular file"),
        (member("run/hard", kind=tarfile.LNKTYPE, link="kit.json"), "'run/hard' is not a regular file"),
        (member("run/device", kind=tarfile.CHRTYPE), "'run/device' is not a regular file"),
        (member("run/pipe", kind=tarfile.FIFOTYPE), "'run/pipe' is not a regular file"),
        (member("run", kind=tarfile.DIRTYPE), "'run' is not a regular file"),
        (member("kit.json", KIT), "'kit.json' is there twice"),
        (member("etc/passwd"), "'etc/passwd' is in no known folder (run/, blobs/sha256/)"),
        (member("blobs/sha256/short"), "'blobs/sha256/short' is in no known folder (run/, blobs/sha256/)"),
        (member("blobs/sha256/" + "a" * 64 + "\n"), f"'blobs/sha256/{'a' * 64}\\n' is in no known folder (run/, blobs/sha256/)"),
        (member("kit.json/x"), "'kit.json/x' is in no known folder (run/, blobs/sha256/)"),
    ],
)  # fmt: skip
def test_an_evil_member_is_refused(tmp_path: Path, evil: Member, reason: str) -> None:
    """Names that lead out, links, devices and repeats are refused before anything is read, exit 7."""
    path = write_tar(tmp_path / "evil.kit.tar", [member("kit.json", KIT), evil])
    with pytest.raises(VerificationError) as caught:
        read(path)
    assert caught.value.message == f"{path} is not a safe archive: {reason}"


def test_a_file_below_a_file_is_refused(tmp_path: Path) -> None:
    """One name cannot be a file and a folder."""
    path = write_tar(tmp_path / "x.kit.tar", [member("kit.json", KIT), member("run/a/b"), member("run/a")])
    with pytest.raises(VerificationError, match="'run/a/b' lies below a file"):
        read(path)


@pytest.mark.parametrize("mode", ["w:gz", "w:xz"])
def test_a_compressed_tar_is_refused(tmp_path: Path, mode: str) -> None:
    """A few compressed bytes could stand for any number, so there is no compression."""
    path = write_tar(tmp_path / "x.kit.tar", [member("kit.json", KIT)], mode)
    with pytest.raises(VerificationError, match=r"is not a \.kit\.tar"):
        read(path)


def test_a_sparse_member_is_refused(tmp_path: Path) -> None:
    """A sparse file claims a size that it has not."""
    info, data = member("run/logs/big", b"")
    info.pax_headers = {"GNU.sparse.major": "0", "GNU.sparse.size": str(1 << 40), "GNU.sparse.map": "0,0"}
    path = write_tar(tmp_path / "x.kit.tar", [member("kit.json", KIT), (info, data)])
    with pytest.raises(VerificationError, match="is not a regular file"):
        read(path)


def test_a_cut_tar_is_refused(run_dir: Path, store: Store, tmp_path: Path) -> None:
    """A half transfer is exit 7, never half an archive."""
    output = pack(run_dir, tmp_path / "x.kit.tar", store=store)
    data = output.read_bytes()
    for length in (0, 100, 700, len(data) // 2, len(data) // 2 + 300):
        output.write_bytes(data[:length])
        with pytest.raises((VerificationError, UsageError)):
            unpack(output, open_store(tmp_path / "other"), tmp_path / "here")
        assert not (tmp_path / "here").exists()


@pytest.mark.parametrize(
    ("kit", "error", "message"),
    [
        ({"format": 3}, LockError, "format 3 is newer than this kitbuild reads (2)"),
        ({"format": 2}, VerificationError, "kit.json is malformed"),
        ({"format": 2, "run": "x", "include": "local", "weights": False, "archive_sha256": None}, VerificationError, "kit.json is not as it was packed"),
        ({"format": 2, "run": "x", "include": "local", "weights": False, "archive_sha256": "x"}, VerificationError, "kit.json is malformed"),
        ({"format": 1, "run": "x", "include": "local", "weights": False, "sha256": "x"}, VerificationError, "kit.json is malformed"),
        ({"format": 1}, VerificationError, "kit.json is malformed"),
        ({"format": 1, "run": "../x", "include": "local", "weights": False}, VerificationError, "kit.json is malformed"),
        ([], VerificationError, "kit.json is malformed"),
    ],
)  # fmt: skip
def test_a_bad_kit_file_is_refused(tmp_path: Path, kit: object, error: type[KitbuildError], message: str) -> None:
    """A newer format is exit 3; names that lead out are exit 7."""
    path = write_tar(tmp_path / "x.kit.tar", [member("kit.json", json.dumps(kit).encode())])
    with pytest.raises(error) as caught:
        unpack(path, open_store(tmp_path / "other"), tmp_path / "here")
    assert message in caught.value.message


def test_a_kit_of_the_first_format_still_reads(run_dir: Path, store: Store, tmp_path: Path) -> None:
    """It had no digest of kit.json, and its headers could be otherwise."""
    output = pack(run_dir, tmp_path / "x.kit.tar", store=store)
    old = rewritten(output, {"kit.json": KIT})
    assert read_kit(KitTar.read(old)).format == 1
    old.write_bytes(old.read_bytes() + b"\0" * 512)
    check(read(unpack(old, open_store(tmp_path / "other"), tmp_path / "here")))


def test_a_tar_without_a_kit_file_is_a_usage_error(tmp_path: Path) -> None:
    """Some other tar is exit 2, with the command that makes the right one."""
    with pytest.raises(UsageError, match=r"it has no kit\.json"):
        read(write_tar(tmp_path / "x.tar", [member("run/manifest.json", b"{}")]))


def rewritten(path: Path, change: dict[str, bytes]) -> Path:
    with tarfile.open(path) as tar:
        members = [(info, change.get(info.name, tar.extractfile(info).read())) for info in tar]  # type: ignore[union-attr]
    for info, data in members:
        info.size = len(data)
    return write_tar(path, members)


def test_a_wrong_blob_stays_out_of_the_store(run_dir: Path, store: Store, tmp_path: Path) -> None:
    """A blob that is not its name is exit 7, and neither blob nor run directory appears."""
    name = f"blobs/sha256/{sha256(DATA)}"
    output = rewritten(pack(run_dir, tmp_path / "x.kit.tar", store=store), {name: b"poison"})
    (problem,) = verify(read(output))
    assert (problem.file, problem.message) == (f"{output}/{name}", f"sha256 is {sha256(b'poison')}")
    other = open_store(tmp_path / "other")
    with pytest.raises(VerificationError, match="does not verify"):
        unpack(output, other, tmp_path / "here")
    assert not other.has(sha256(DATA))
    assert not (tmp_path / "here").exists()
