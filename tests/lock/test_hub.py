"""What the lock asks the Hub, and what becomes of its answers and failures."""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING

import pytest

from kitbuild.errors import ResolveError, VerificationError
from kitbuild.lock.hub import Hub
from kitbuild.progress import Silent
from tests.hub.fixtures import READER_TOKEN, STRANGER_TOKEN

if TYPE_CHECKING:
    from pathlib import Path

    from kitbuild.lock.models import LockedFile
    from kitbuild.store import Store
    from tests.hub.server import HubServer

MODEL = "Qwen/Qwen3-8B"


def locked(hub: Hub, store: Store, repo: str = MODEL, revision: str = "main") -> dict[str, LockedFile]:
    snapshot = hub.snapshot(repo, revision, "model")
    files = hub.lock_files(snapshot, snapshot.files, store=store, progress=Silent())
    return {file.path: file for file in files}


def test_every_page_of_a_tree(hub: HubServer, hub_environ: dict[str, str]) -> None:
    """The commit of a branch and all of its files, sorted, though the list comes in pages."""
    page, hub.state.page_size = hub.state.page_size, 2
    try:
        snapshot = Hub(hub_environ).snapshot(MODEL, "main", "model")
    finally:
        hub.state.page_size = page
    assert snapshot.commit == hub.sha(MODEL)
    names = [file.path for file in snapshot.files]
    assert names == sorted(names)
    assert {"config.json", "model-00001-of-00002.safetensors", "tokenizer.json"} <= set(names)


def test_large_files_are_not_fetched(hub: HubServer, hub_environ: dict[str, str], store: Store) -> None:
    """For an LFS file the Hub's own sha256 is locked without downloading it; a small file's is computed."""
    found = locked(Hub(hub_environ), store)
    assert not [request for request in hub.requests if request.origin == "lfs"]
    shard = found["model-00001-of-00002.safetensors"]
    assert not store.has(shard.sha256)
    assert store.has(found["config.json"].sha256)
    repo = hub.repo(MODEL).git
    held = {
        entry.path: hashlib.sha256(repo.blob(entry)).hexdigest()
        for entry in repo.tree(hub.sha(MODEL))
        if entry.kind == "file"
    }
    assert held == {path: file.sha256 for path, file in found.items()}


def test_small_files_once(hub: HubServer, hub_environ: dict[str, str], store: Store) -> None:
    """What was fetched for its digest is known by git's own name of it, and is not fetched again."""
    first = locked(Hub(hub_environ), store)
    hub.requests.clear()
    assert locked(Hub(hub_environ), store) == first
    assert not [request.path for request in hub.requests if "/resolve/" in request.path]


def test_a_small_file_in_lfs_that_is_read(hub_environ: dict[str, str], store: Store, tmp_path: Path) -> None:
    """A config.json kept in LFS is fetched all the same: the lock depends on what it says."""
    from tests.hub.server import HubServer  # noqa: PLC0415 - one of its own: this repository is odd

    with HubServer(tmp_path / "hub") as hub:
        hub.create_repo("org/odd")
        hub.commit("org/odd", {"config.json": b'{"a": 1}' + b" " * 1_000_001})
        found = locked(Hub({**hub_environ, "HF_ENDPOINT": hub.url}), store, "org/odd")
    assert store.path(found["config.json"].sha256).read_bytes().startswith(b'{"a": 1}')


def test_wrong_bytes_of_the_right_length(hub: HubServer, hub_environ: dict[str, str], store: Store) -> None:
    """A small file whose bytes are not those that the file list names is exit 7, and nothing is remembered of it."""
    hub.faults.add("config.json", kind="corrupt", times=None)
    with pytest.raises(
        VerificationError, match=rf"^{MODEL}/.*config\.json: the Hub sent other bytes than its file list"
    ):
        locked(Hub(hub_environ), store)
    hub.faults.clear()
    assert locked(Hub(hub_environ), store)["config.json"].size > 0


@pytest.mark.parametrize("kind", ["429", "503"])
def test_a_server_that_is_busy_for_a_moment(
    hub: HubServer, hub_environ: dict[str, str], store: Store, kind: str
) -> None:
    """A busy Hub is asked again, for the list and for a file."""
    rules = [
        hub.faults.add("/tree/", kind=kind, retry_after_seconds=0),  # type: ignore[arg-type]
        hub.faults.add("resolve.*config.json", kind=kind, retry_after_seconds=0),  # type: ignore[arg-type]
    ]
    assert "config.json" in locked(Hub(hub_environ), store)
    assert [rule.hits for rule in rules] == [1, 1]


def test_a_server_that_fails_for_ever(hub: HubServer, hub_environ: dict[str, str]) -> None:
    """A Hub that answers 500 to everything is exit 4, with its answer and what to do."""
    hub.faults.add("/revision/", kind="500", times=None)
    with pytest.raises(ResolveError) as caught:
        Hub(hub_environ).snapshot(MODEL, "main", "model")
    assert caught.value.message == f"the Hub answered 500 for model {MODEL}@main"
    assert "HF_ENDPOINT" in (caught.value.hint or "")


def test_no_server(hub_environ: dict[str, str]) -> None:
    """No connection is exit 4 and names what was not resolved, also when only the publisher is asked for."""
    hub = Hub({**hub_environ, "HF_ENDPOINT": "http://127.0.0.1:9"})
    with pytest.raises(ResolveError, match=rf"^the Hub cannot be reached, model {MODEL} was not resolved$"):
        hub.snapshot(MODEL, "main", "model")
    with pytest.raises(
        ResolveError, match=r"^the Hub cannot be reached, organization kernels-community was not resolved$"
    ):
        hub.trusts("kernels-community")


@pytest.mark.parametrize(
    ("repo", "revision", "message", "hint"),
    [
        ("Qwen/none", "main", "model Qwen/none does not exist on the Hub, or is private", "HF_TOKEN"),
        (
            "test-org/private-model",
            "main",
            "model test-org/private-model does not exist on the Hub, or is private",
            "HF_TOKEN",
        ),
        (MODEL, "v9", f"model {MODEL} has no revision 'v9'", "branches and tags that exist: main"),
        (MODEL, "0" * 40, f"model {MODEL} has no revision '{'0' * 40}'", "branches and tags that exist: main"),
    ],
)
def test_what_is_not_there(hub_environ: dict[str, str], repo: str, revision: str, message: str, hint: str) -> None:
    """A missing or private repository and a missing revision are exit 4, each with its own way on."""
    with pytest.raises(ResolveError) as caught:
        Hub(hub_environ).snapshot(repo, revision, "model")
    assert caught.value.message == message
    assert hint in (caught.value.hint or "")


def test_a_commit_that_stays(hub: HubServer, hub_environ: dict[str, str]) -> None:
    """A pin wins over the branch, for this repository and revision only."""
    old = hub.sha("trl-lib/Capybara", "v0.1")
    pinned = Hub(hub_environ, pins={("dataset", "trl-lib/Capybara", "main"): old})
    assert pinned.snapshot("trl-lib/Capybara", "main", "dataset").commit == old
    assert pinned.snapshot(MODEL, "main", "model").commit == hub.sha(MODEL)
    gone = Hub(hub_environ, pins={("model", MODEL, "main"): "0" * 40})
    with pytest.raises(ResolveError, match=f"has no revision '{'0' * 40}'"):
        gone.snapshot(MODEL, "main", "model")


def test_a_private_repository(
    hub: HubServer, hub_environ: dict[str, str], store: Store, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """HF_TOKEN opens it, and stands afterwards in no file, log or text, and in no request to another origin."""
    caplog.set_level(logging.DEBUG)
    reader = Hub({**hub_environ, "HF_TOKEN": READER_TOKEN})
    snapshot = reader.snapshot("test-org/private-model", "main", "model")
    files = reader.lock_files(snapshot, snapshot.files, store=store, progress=Silent())
    from kitbuild.store.download import fetch  # noqa: PLC0415 - beside its one use

    where = reader.downloads(snapshot.repo, "model", snapshot.commit, snapshot.files)
    fetch(store, where, progress=Silent(), environ=hub_environ)
    assert all(store.has(file.sha256) for file in files)
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    shown = caplog.text + repr(where) + repr(files)
    assert READER_TOKEN.encode() not in written
    assert READER_TOKEN not in shown
    assert not [request for request in hub.requests if request.origin == "lfs" and "authorization" in request.headers]


def test_a_gated_repository_without_access(hub_environ: dict[str, str], store: Store) -> None:
    """A gated model whose terms this account has not accepted is exit 4 that says so; the token is not in it."""
    stranger = Hub({**hub_environ, "HF_TOKEN": STRANGER_TOKEN})
    with pytest.raises(ResolveError) as caught:
        locked(stranger, store, "test-org/gated-model")
    assert caught.value.message == "model test-org/gated-model is gated and your account has no access"
    assert "HF_TOKEN" in (caught.value.hint or "")
    assert STRANGER_TOKEN not in caught.value.message + (caught.value.hint or "")
    reader = Hub({**hub_environ, "HF_TOKEN": READER_TOKEN})
    assert "config.json" in locked(reader, store, "test-org/gated-model")


def test_publishers(hub: HubServer, hub_environ: dict[str, str]) -> None:
    """Trust is what the Hub says of the organisation; one that it does not know has none; no answer is no verdict."""
    asked = Hub(hub_environ)
    assert asked.trusts("kernels-community") is True
    assert asked.trusts("stranger") is False
    assert asked.trusts("nobody") is False
    hub.faults.add("overview", kind="503", times=None)
    with pytest.raises(ResolveError, match=r"^the Hub answered 503 for organization kernels-community@overview$"):
        asked.trusts("kernels-community")
