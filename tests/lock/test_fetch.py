"""Everything that a lock names comes into the store, as the locked bytes or not at all."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from kitbuild.errors import ImageError, ResolveError, VerificationError
from kitbuild.lock import fetch as fetching
from kitbuild.lock.fetch import fetch_locked, trees
from kitbuild.lock.hub import Hub
from kitbuild.lock.kernel_variants import System
from kitbuild.lock.kernels import lock_kernels
from kitbuild.lock.models import LockedDataset, LockedFile, LockedModel, LockedTree, LockedWheel
from kitbuild.progress import Silent
from kitbuild.store import Store
from tests.base import made
from tests.image.kit import make_lock
from tests.lock.test_kernels import recipe

if TYPE_CHECKING:
    from pathlib import Path

    from kitbuild.lock.models import Lock
    from tests.hub.server import HubServer

NO_ENGINE = made.raising(ImageError("no engine answers"))


@dataclass(frozen=True)
class Case:
    """A lock of Hub files, made with one store, and another machine's empty store."""

    lock: Lock
    environ: dict[str, str]
    store: Store

    def fetch(self, *, folder: Path | None = None, **changes: Any) -> None:
        fetch_locked(
            self.lock.model_copy(update=changes),
            store=self.store,
            environ=self.environ,
            progress=Silent(),
            client=NO_ENGINE,
            folder=folder,
            indexes={},
            base=False,
        )


@pytest.fixture
def case(hub: HubServer, hub_environ: dict[str, str], store: Store, tmp_path: Path) -> Case:
    client = Hub(hub_environ)

    def tree(repo: str, kind: Any, *suffixes: str) -> LockedTree:
        snapshot = client.snapshot(repo, "main", kind)
        chosen = tuple(file for file in snapshot.files if file.path.endswith(suffixes))
        files = client.lock_files(snapshot, chosen, store=store, progress=Silent())
        return LockedTree(repo=repo, revision="main", commit=snapshot.commit, files=files)

    data = tree("trl-lib/Capybara", "dataset", "train-00000-of-00001.jsonl")
    kernels = lock_kernels(
        recipe("kernels-community/flash-attn2@v2"),
        system=System(cuda="12.9", torch="2.8.0", machine="x86_64"),
        wheels=(),
        hub=client,
        store=store,
        progress=Silent(),
    )
    lock = make_lock(
        store,
        wheels=(),
        kernels=kernels,
        model=LockedModel(
            weights=tree("Qwen/Qwen3-8B", "model", ".json", ".safetensors"),
            config=None,
            tokenizer=None,
            chat_template=None,
        ),
        datasets=(
            LockedDataset(tree=data, format="json", config=None, split="train", data_files=(data.files[0].path,)),
        ),
    )
    hub.requests.clear()
    return Case(lock, hub_environ, Store.open({"KITBUILD_HOME": str(tmp_path / "other")}))


def files_of(lock: Lock) -> dict[str, str]:
    found = {file.sha256: file.path for _, _, tree in trees(lock) for file in tree.files}
    return found | {file.sha256: file.path for kernel in lock.kernels for file in kernel.files}


def test_everything_that_is_named(case: Case) -> None:
    """Model, data and kernel files come by their digests, large and small."""
    case.fetch()
    for sha256, path in files_of(case.lock).items():
        assert hashlib.sha256(case.store.path(sha256).read_bytes()).hexdigest() == sha256, path


def test_nothing_is_asked_twice(case: Case, hub: HubServer) -> None:
    """Where all is in the store the Hub is not asked at all."""
    case.fetch()
    hub.requests.clear()
    case.fetch()
    assert hub.requests == []


def test_by_commit(case: Case, hub: HubServer) -> None:
    """Files are asked for at the locked commits, never at a branch, and no file list is read."""
    case.fetch()
    asked = [request.path for request in hub.requests if "/resolve/" in request.path]
    assert asked
    assert all("/resolve/main/" not in path and "/resolve/v2/" not in path for path in asked)
    assert not [request.path for request in hub.requests if "/tree/" in request.path or "/revision/" in request.path]


@pytest.mark.parametrize("pattern", ["config.json", "/lfs|/repos/"])
def test_wrong_bytes_of_the_right_length(case: Case, hub: HubServer, pattern: str) -> None:
    """A small and a large file whose bytes are others are exit 7, and are not in the store."""
    rule = hub.faults.add(pattern, kind="corrupt", times=None)
    with pytest.raises(VerificationError):
        case.fetch()
    assert rule.hits >= 1
    hub.faults.clear()
    case.fetch()
    assert all(case.store.has(sha256) for sha256 in files_of(case.lock))


def test_a_repository_that_is_gone(case: Case, hub: HubServer) -> None:
    """A kernel whose repository was deleted is exit 4 and named; with its files in the store nobody is asked."""
    repo = hub.repo("kernels-community/flash-attn2")
    hub.delete_repo(repo.id)
    try:
        with pytest.raises(ResolveError, match=r"^kernels-community/flash-attn2/build/"):
            case.fetch()
        case.fetch(kernels=())
    finally:
        hub.state.repos["kernel", repo.id] = repo


def test_local_files_have_no_upstream(case: Case, tmp_path: Path) -> None:
    """A local file comes from the recipe's folder while it is the locked one; else exit 4 tells how to get it."""
    (dataset,) = case.lock.datasets
    data = b'{"text": "a"}\n'
    file = LockedFile(path="data.jsonl", size=len(data), sha256=hashlib.sha256(data).hexdigest())
    local = dataset.model_copy(update={"tree": LockedTree(path="data.jsonl", files=(file,))})
    with pytest.raises(ResolveError, match=r"^dataset\.0: data\.jsonl .* is not in the store and has no") as caught:
        case.fetch(datasets=(local,), folder=tmp_path)
    assert "--from BUNDLE" in (caught.value.hint or "")
    (tmp_path / "data.jsonl").write_bytes(b'{"text": "b"}\n')
    with pytest.raises(VerificationError):
        case.fetch(datasets=(local,), folder=tmp_path)
    (tmp_path / "data.jsonl").write_bytes(data)
    case.fetch(datasets=(local,), folder=tmp_path)
    assert case.store.path(file.sha256).read_bytes() == data


def test_wheels_that_moved(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel whose remembered address is gone is looked for anew, once."""
    asked: list[bool] = []

    def locate(*_: Any, anew: bool = False, **__: Any) -> list[Any]:
        asked.append(anew)
        if not anew:
            raise ResolveError("gone")
        return []

    monkeypatch.setattr(fetching, "locate_wheels", locate)
    wheel = LockedWheel(name="a", version="1", file="a-1-py3-none-any.whl", size=1, sha256="1" * 64, index="pypi")
    case.fetch(wheels=(wheel,))
    assert asked == [False, True]


def test_the_base(case: Case) -> None:
    """A base that is in no store, engine or registry is exit 4 unless the base is left out."""
    base = case.lock.base.model_copy(update={"name": "kitbuild/base-cpu"})
    lock = case.lock.model_copy(update={"base": base})
    ask: dict[str, Any] = {"store": case.store, "environ": case.environ, "progress": Silent(), "client": NO_ENGINE}
    with pytest.raises(ResolveError, match=r"^the base kitbuild/base-cpu @ sha256:.* is nowhere"):
        fetch_locked(lock, **ask, folder=None, indexes={})
    fetch_locked(lock, **ask, folder=None, indexes={}, base=False)
