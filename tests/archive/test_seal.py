"""archive.json: no byte of an archive changes unseen, in a run directory and in a packed file."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kitbuild.archive import KitTar, check, pack, read, read_kit, unpack, verify
from kitbuild.errors import LockError, UsageError, VerificationError
from kitbuild.flow.archives import archive_show, archive_verify
from kitbuild.guest import claim, seal
from kitbuild.store.blobs import Store
from tests.archive.factory import DATA, Run, lock_body, sha256, wheel
from tests.base import made

if TYPE_CHECKING:
    from pathlib import Path

FILES = (
    "archive.json", "exit.json", "lock.json", "logs/guest.log", "manifest.json", "metrics.jsonl", "model/config.json",
    "model/model.safetensors", "model/tokenizer.json", "recipe.yaml",
)  # fmt: skip


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return Run().write(tmp_path / "run", sealed=True)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store.open({"KITBUILD_HOME": str(tmp_path / "store")})
    for data in (DATA, b"{}"):
        store.add_bytes(data)
    return store


def detected(path: Path) -> bool:
    """Exit 7: as problems, or where it cannot be read at all as the error."""
    try:
        return bool(verify(read(path)))
    except (VerificationError, LockError, UsageError):
        return True


def messages(path: Path) -> list[str]:
    return [str(problem).replace(str(path), "RUN") for problem in verify(read(path))]


def flipped(data: bytes, place: int, bit: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]


def test_a_sealed_run_verifies_and_has_a_name(run_dir: Path) -> None:
    """The digest of archive.json stands for every byte, and is shown."""
    archive = read(run_dir, weights=True)
    assert archive.problems == ()
    assert archive.sha256 == sha256((run_dir / "archive.json").read_bytes())
    assert archive.seal is not None
    assert sorted({*archive.seal.files, "archive.json"}) == sorted(FILES)
    result = archive_verify(run_dir, expected=archive.sha256)
    assert result.lines == (
        f"{run_dir} verifies: 5 steps, 2 weight tensors, 9 files",
        f"archive sha256 {archive.sha256}",
    )
    assert archive_show(run_dir).fields["archive_sha256"] == archive.sha256


def test_another_archive_than_the_one_that_was_meant_is_refused(run_dir: Path) -> None:
    """Exit 7, though it is whole."""
    with pytest.raises(VerificationError) as caught:
        archive_verify(run_dir, expected="0" * 64)
    assert caught.value.message == f"{run_dir} is whole, and another archive: its sha256 is {read(run_dir).sha256}"


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_anywhere_is_detected(run_dir: Path, name: str) -> None:
    """In each file of an archive: its first and last byte, and forty places between."""
    path = run_dir / name
    good = path.read_bytes()
    choose = random.Random(name)  # noqa: S311 - places, not secrets
    places = {0, len(good) - 1, *(choose.randrange(len(good)) for _ in range(40))}
    missed = []
    for place in sorted(places):
        path.write_bytes(flipped(good, place, choose.randrange(8)))
        missed += [] if detected(run_dir) else [place]
    path.write_bytes(good)
    assert missed == []
    assert verify(read(run_dir)) == ()


@pytest.mark.slow_extra
@pytest.mark.parametrize("name", FILES)
def test_every_byte_counts(run_dir: Path, name: str) -> None:
    """The same for every single byte."""
    path = run_dir / name
    good = path.read_bytes()
    missed = []
    for place in range(len(good)):
        path.write_bytes(flipped(good, place, place % 8))
        missed += [] if detected(run_dir) else [place]
    assert missed == []


@pytest.mark.parametrize("name", FILES)
def test_a_missing_or_longer_file_is_detected(run_dir: Path, name: str) -> None:
    """Removed, emptied, one byte less, one byte more."""
    path = run_dir / name
    good = path.read_bytes()
    for data in (None, b"", good[:-1], good + b"\n"):
        path.unlink(missing_ok=True) if data is None else path.write_bytes(data)
        assert detected(run_dir), data and len(data)


def test_what_changed_is_named(run_dir: Path) -> None:
    """Each file with both digests; a file that is known to be wrong is not told twice."""
    (run_dir / "model" / "config.json").write_text("[]")
    (run_dir / "logs" / "guest.log").write_text("kit: done\nkit: and more\n")
    (run_dir / "model" / "tokenizer.json").unlink()
    (run_dir / "model" / "modeling.py").write_text("import os")
    (run_dir / "recipe.yaml").write_text("kitbuild: 1\n")
    (run_dir / "notes.txt").write_text("mine")
    assert messages(run_dir)[1:] == [
        "RUN/logs/guest.log: has 24 bytes, archive.json says 10",
        f"RUN/model/config.json: sha256 is {sha256('[]')}, archive.json says {sha256('{}')}",
        "RUN/model/tokenizer.json: missing, archive.json lists it",
        "RUN/model/modeling.py: was added: archive.json does not list it",
    ]
    assert messages(run_dir)[0].startswith("RUN/recipe.yaml: sha256 is ")


def test_a_removed_list_is_noticed(run_dir: Path) -> None:
    """The manifest says that there is one."""
    (run_dir / "archive.json").unlink()
    assert messages(run_dir) == [
        "RUN/archive.json: missing: the run was killed while it was recorded, or the file was removed"
    ]


def test_a_list_that_was_made_to_fit_is_another_archive(run_dir: Path) -> None:
    """Whoever rewrites the list too is found out by who holds the archive's digest."""
    before = read(run_dir).sha256
    (run_dir / "logs" / "guest.log").write_text("kit: nothing happened\n")
    seal.write(run_dir)
    assert verify(read(run_dir)) == ()
    with pytest.raises(VerificationError, match="is whole, and another archive"):
        archive_verify(run_dir, expected=before)


def test_an_older_run_still_reads(tmp_path: Path) -> None:
    """Without archive.json: what the manifest covers is checked, and what is not is said."""
    result = archive_verify(Run().write(tmp_path / "run"))
    assert result.fields["archive_sha256"] is None
    assert result.lines[1] == (
        "an older kitbuild made it, without a list of its files: logs, configuration and tokenizer have no digest"
    )


def test_a_newer_list_is_exit_3(run_dir: Path) -> None:
    """Not damaged: another kitbuild reads it."""
    body = {"files": {}, "format": 2}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    whole = {**body, "sha256": sha256(text)}
    (run_dir / "archive.json").write_text(json.dumps(whole, indent=1, sort_keys=True) + "\n")
    with pytest.raises(LockError, match="format 2 is newer than this kitbuild reads"):
        read(run_dir)


def test_a_run_that_goes_on_has_no_list(run_dir: Path) -> None:
    """A resume takes it away: what the run will be is not known."""
    assert "archive.json" in claim.ENDED
    (run_dir / "archive.json").unlink()
    assert read(run_dir).seal is None


@pytest.mark.parametrize("weights", [{}, {"embed.weight": ("F32", [2, 2], b"\1" * 16)}])
def test_weights_without_tensor_digests_are_hashed_whole(tmp_path: Path, weights: dict[str, object]) -> None:
    """A run that failed after it saved its weights lists no tensor; their bytes count all the same."""
    run = Run(exit={"exit_code": 6}, manifest={"complete": False, **({} if weights else {"weights": {}})})
    path = run.write(tmp_path / "run", sealed=True)
    entry = json.loads((path / "archive.json").read_bytes())["files"]["model/model.safetensors"]
    assert sorted(entry) == (["header_sha256", "size"] if weights else ["sha256", "size"])
    if not weights:
        assert verify(read(path)) == ()
    data = (path / "model" / "model.safetensors").read_bytes()
    (path / "model" / "model.safetensors").write_bytes(flipped(data, len(data) - 1, 0))
    assert detected(path)


def packed_run(tmp_path: Path, store: Store, *, weights: bool) -> Path:
    base = made.add(store).model_dump(mode="json")
    lock = lock_body(wheels=[wheel("torch", "2.13.0")], base=base)
    return pack(
        Run(lock=lock).write(tmp_path / "run", sealed=True), tmp_path / "x.kit.tar", store=store, weights=weights
    )


@pytest.mark.parametrize("weights", [False, True])
def test_a_packed_run_keeps_its_name(tmp_path: Path, store: Store, *, weights: bool) -> None:
    """Packed and unpacked it is the same archive, with its weights or without."""
    path = packed_run(tmp_path, store, weights=weights)
    there = unpack(path, Store.open({"KITBUILD_HOME": str(tmp_path / "other")}), tmp_path / "there")
    for place in (path, there):
        check(read(place))
        assert read(place).sha256 == read(tmp_path / "run").sha256
    assert (there / "model" / "tokenizer.json").exists() == weights


def test_any_bit_of_a_packed_run_counts(tmp_path: Path, store: Store) -> None:
    """Contents, headers, padding, the end: three hundred places, and each byte of the first header."""
    path = packed_run(tmp_path, store, weights=True)
    good = path.read_bytes()
    choose = random.Random(5)  # noqa: S311 - places, not secrets
    missed = []
    for place in sorted({*range(512), *(choose.randrange(len(good)) for _ in range(300)), len(good) - 1}):
        path.write_bytes(flipped(good, place, choose.randrange(8)))
        missed += [] if detected(path) else [place]
    path.write_bytes(good)
    assert missed == []
    check(read(path))


@pytest.mark.parametrize("extra", [b"x", b"\0" * 512, b"\0" * 10240])
def test_nothing_is_appended_to_a_packed_run(tmp_path: Path, store: Store, extra: bytes) -> None:
    """Not even zeros."""
    path = packed_run(tmp_path, store, weights=False)
    path.write_bytes(path.read_bytes() + extra)
    (problem,) = verify(read(path))
    assert problem.message.startswith("the end, at byte ")


def test_an_edited_kit_file_is_noticed(tmp_path: Path, store: Store) -> None:
    """It has a digest of itself."""
    path = packed_run(tmp_path, store, weights=False)
    path.write_bytes(path.read_bytes().replace(str(read(path).sha256).encode(), b"0" * 64, 1))
    with pytest.raises(VerificationError, match="is not as it was packed"):
        verify(read(path))


def test_another_run_in_a_kit_is_noticed(tmp_path: Path, store: Store) -> None:
    """`kit.json` names the archive that was packed, whoever wrote it anew."""
    path = packed_run(tmp_path, store, weights=False)
    old = read_kit(KitTar.read(path))
    new = replace(old, archive_sha256="0" * 64).to_bytes()
    path.write_bytes(path.read_bytes().replace(old.to_bytes(), new))
    (problem,) = verify(read(path))
    assert problem.message == f"archive.json has sha256 {old.archive_sha256}, kit.json says {'0' * 64}"
