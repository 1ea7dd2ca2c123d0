"""Looking after the store: what is kept, what is dropped, what is refused."""

from __future__ import annotations

import os
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kitbuild.base import bases
from kitbuild.errors import LockError, UsageError, VerificationError
from kitbuild.flow import upkeep
from kitbuild.flow.context import Context
from kitbuild.image import HostCompiler, Image, assemble, materialise
from kitbuild.lock.closure import closure
from kitbuild.progress import Silent
from tests.base import made
from tests.image.kit import RECIPE, locked_wheel, make_lock, make_wheel, new_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from kitbuild.lock.models import Lock

OLD = time.time() - 8 * 86400


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context(environ={}, store=new_store(tmp_path / "store"), progress=Silent())


def age(context: Context) -> None:
    """Everything in the store is a week old."""
    for path in context.store.root.rglob("*"):
        os.utime(path, (OLD, OLD), follow_symlinks=False)


def test_closure_is_all_that_a_lock_names(context: Context) -> None:
    """Every digest is in the store after it was filled, and none is missing from the closure."""
    lock = make_lock(context.store)
    found = closure(lock).keys()
    assert all(context.store.has(sha256) for sha256 in found)
    assert {wheel.sha256 for wheel in lock.wheels} <= found
    assert {file.sha256 for kernel in lock.kernels for file in kernel.files} <= found
    assert {digest.removeprefix("sha256:") for digest in (lock.base.config_digest, *lock.base.diff_ids)} <= found


@pytest.mark.parametrize("name", ["tiny.lock.json", "runs/a/lock.json"])
def test_gc_keeps_what_a_lock_names(name: str, context: Context, tmp_path: Path) -> None:
    """Beside a recipe or in a run; the rest goes."""
    lock = make_lock(context.store)
    place = tmp_path / "project" / name
    place.parent.mkdir(parents=True)
    place.write_bytes(lock.to_bytes())
    loose = context.store.add_bytes(b"nobody names this")
    age(context)
    fields = upkeep.store_gc(context, (tmp_path / "project",)).fields
    assert (fields["locks"], fields["blobs"]) == (1, 1)
    assert not context.store.has(loose)
    assert all(context.store.has(sha256) for sha256 in closure(lock))


def keep(folder: Path, lock: Lock) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "kept.lock.json").write_bytes(lock.to_bytes())
    return folder


@dataclass(frozen=True, kw_only=True)
class BaseCompiler:
    """This Python under the base's name, as the base's own Python has it; `used` notes that it compiled."""

    key: str
    used: list[Path] = field(default_factory=list)

    def __call__(self, work: Path, *, advance: Callable[[int], None]) -> None:
        self.used.append(work)
        HostCompiler(Path(sys.executable))(work, advance=advance)


def test_gc_keeps_what_was_made_for_a_lock(context: Context, tmp_path: Path) -> None:
    """Layers and compiled modules of a kept lock stay, so that its image costs nothing; those of another lock go."""
    lock = make_lock(context.store)
    wheel = locked_wheel(context.store, *make_wheel("other", {"other.py": b"x = 1\n"}))
    other = make_lock(context.store, (wheel,), name="other")
    compiler = BaseCompiler(key=lock.base.config_digest)

    def image(of: Lock) -> Image:
        return assemble(of, recipe=RECIPE, store=context.store, compiler=compiler, progress=Silent())

    first, gone = image(lock), image(other)
    age(context)
    upkeep.store_gc(context, (keep(tmp_path / "project", lock),))
    left = {layer.name: layer.path.is_file() for layer in first.layers}
    assert left == dict.fromkeys(left, True) | {"lock": False}
    assert [layer.name for layer in gone.layers if not layer.path.is_file()] == ["wheels", "lock"]
    assert [record for record in context.store.records("layers").values() if record["name"] == "lock"] == []
    compiler.used.clear()
    assert image(lock) == first
    assert compiler.used == []


def test_gc_keeps_a_base_that_a_name_means(context: Context, tmp_path: Path) -> None:
    """The default base of the next lock cannot be made again where it was built: it stays, an unnamed one goes."""
    project = tmp_path / "project"
    project.mkdir()
    named = made.add(context.store, mark="named")
    bases.remember_name(context.store, named)
    unnamed = made.add(context.store, "other", mark="unnamed")
    age(context)
    upkeep.store_gc(context, (project,))
    assert bases.recorded(context.store, named.manifest_digest) == named
    assert bases.held(context.store, unnamed) is False
    assert list(context.store.records(bases.BASES)) == [named.manifest_digest[7:]]


def test_gc_drops_environments_that_no_lock_has(context: Context, tmp_path: Path) -> None:
    """Those of a kept lock stay, with the packages below them; others go unless a run used them since yesterday."""
    store = context.store
    lock, other = make_lock(store), make_lock(store, (), name="other")
    project = keep(tmp_path / "project", lock)

    def laid_out(of: Lock) -> Path:
        return materialise(
            of,
            recipe=RECIPE,
            python=Path(sys.executable),
            store=store,
            compiler=HostCompiler(Path(sys.executable)),
            progress=Silent(),
        )

    root, gone = laid_out(lock), laid_out(other)
    for path in (store.root / "envs").iterdir():
        os.utime(path, (OLD, OLD))
    os.utime(gone)
    assert upkeep.store_gc(context, (project,)).fields["environments"] == 1
    assert gone.is_dir()
    os.utime(gone, (OLD, OLD))
    assert upkeep.store_gc(context, (project,)).fields["environments"] == 1
    assert not gone.exists()
    assert len(store.records("environments")) == len(list((store.root / "envs").iterdir())) == 2
    assert (root / "opt/kit/bin/python").exists()
    assert laid_out(lock) == root


def test_gc_of_a_folder_that_is_not_there(context: Context, tmp_path: Path) -> None:
    """A misspelt folder must not mean that nothing is kept."""
    kept = context.store.add_bytes(b"of some lock")
    age(context)
    with pytest.raises(UsageError, match="is not a folder"):
        upkeep.store_gc(context, (tmp_path, tmp_path / "projct"))
    assert context.store.has(kept)


def test_gc_stops_at_a_lock_that_it_cannot_read(context: Context, tmp_path: Path) -> None:
    """Who knows what it names: exit 3, nothing removed. Other programs' lock files do not matter."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project/package-lock.json").write_text('{"version": "1.0.0", "lockfileVersion": 3}')
    kept = context.store.add_bytes(b"of some lock")
    age(context)
    (tmp_path / "project/r.lock.json").write_text("{")
    with pytest.raises(LockError, match="is not JSON"):
        upkeep.store_gc(context, (tmp_path / "project",))
    assert context.store.has(kept)
    (tmp_path / "project/r.lock.json").unlink()
    assert upkeep.store_gc(context, (tmp_path / "project",)).fields["locks"] == 0


def test_damaged_store_is_exit_7_and_can_be_repaired(context: Context) -> None:
    """Each damaged file is a problem; with `repair` it is gone and the store is whole."""
    good, bad = context.store.add_bytes(b"good"), context.store.add_bytes(b"bad")
    path = context.store.path(bad)
    path.chmod(0o644)
    path.write_bytes(b"BAD")
    with pytest.raises(VerificationError, match="1 files in the store are damaged") as raised:
        upkeep.store_verify(context, repair=False)
    assert bad[:12] in str(raised.value.problems[0])
    with pytest.raises(VerificationError):
        upkeep.store_verify(context, repair=True)
    assert upkeep.store_verify(context, repair=False).fields == {"damaged": 0}
    assert (context.store.has(good), context.store.has(bad)) == (True, False)


def test_stack_lists_every_target() -> None:
    """Each target with its Python and the versions that were tested together."""
    result = upkeep.stack()
    assert {target["target"] for target in result.fields["targets"]} == {"cpu", "cuda128", "cuda129"}
    assert all(
        {"torch", "transformers", "trl", "kernels"} <= target["packages"].keys() for target in result.fields["targets"]
    )
    assert "torch" in result.text()


def test_doctor_is_never_an_error(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing is listed with what to do; the exit code stays 0."""
    from kitbuild.errors import ImageError  # noqa: PLC0415

    def none(_context: Context) -> None:
        raise ImageError("no container engine answers", hint="install Docker or Podman")

    monkeypatch.setattr(Context, "client", none)
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    result = upkeep.doctor(context)
    assert result.exit_code == 0
    assert {item["name"]: item["ok"] for item in result.fields["checks"]} | {"store": True} == {
        "kitbuild": True,
        "engine": False,
        "store": True,
        "mmdebstrap": False,
        "nvidia": False,
    }
    assert "missing  engine      no container engine answers; install Docker or Podman" in result.lines
