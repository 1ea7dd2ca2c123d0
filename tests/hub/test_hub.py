"""The test Hub is worth nothing unless the real clients cannot tell it from the Hub: here they are asked."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import requests
from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from kernels._rust import Digest, Metadata
from kernels.backends import CUDA
from kernels.hf_hub import _check_trust_remote_code
from kernels.variants import _resolve_variant_for_system, get_variants
from packaging.version import Version

from tests.hub.fixtures import READER_TOKEN, STRANGER_TOKEN, standard_hub
from tests.hub.server import HubServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FLASH = "kernels-community/flash-attn2"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    with standard_hub(tmp_path_factory.mktemp("hub"), page_size=5) as running:
        yield running


@pytest.fixture
def small(tmp_path: Path) -> Iterator[HubServer]:
    """A Hub that a test may change."""
    with HubServer(tmp_path / "hub") as running:
        running.create_repo("org/model")
        running.commit("org/model", {"config.json": "{}\n", "model.safetensors": bytes(range(256)) * 40})
        yield running


def client(hub: HubServer, token: str | None = None) -> HfApi:
    return HfApi(endpoint=hub.url, token=token or False)


def test_commits_are_the_same_on_every_run(tmp_path: Path) -> None:
    """A commit's SHA depends on content and history only: not on the clock, the user or the machine."""
    server = HubServer(tmp_path)
    server.create_repo("org/model")
    server.commit("org/model", {"a": "1", "b/c.so": b"\0"})
    assert server.commit("org/model", {"a": "2"}) == "2d25020424eb4b7b95b4b7ed1070a572febb2139"


@pytest.mark.parametrize("kind", ["model", "dataset", "kernel"])
def test_repo_info_gives_the_commit_of_a_branch(hub: HubServer, kind: str) -> None:
    """`repo_info` of each kind of repository names the 40-hex commit behind `main`."""
    repo_id = {"model": "Qwen/Qwen3-8B", "dataset": "trl-lib/Capybara", "kernel": FLASH}[kind]
    assert client(hub).repo_info(repo_id, repo_type=kind).sha == hub.sha(repo_id)


def test_a_revision_is_a_branch_tag_reference_or_commit(hub: HubServer) -> None:
    """All ways to name a commit lead to it."""
    sha = hub.sha(FLASH, "v2")
    for revision in ("v2", "release-2", sha, sha[:8], "refs/heads/v2"):
        assert client(hub).repo_info(FLASH, repo_type="kernel", revision=revision).sha == sha


def test_model_info_lists_files_with_their_hashes(hub: HubServer) -> None:
    """`files_metadata` tells size and sha256 of an LFS file, and the blob id of a small one."""
    info = client(hub).model_info("Qwen/Qwen3-0.6B", files_metadata=True)
    files = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    entries = {entry.path: entry for entry in hub.repo("Qwen/Qwen3-0.6B").git.tree(hub.sha("Qwen/Qwen3-0.6B"))}
    weights, config = files["model.safetensors"], files["config.json"]
    lfs = entries["model.safetensors"].lfs
    assert lfs is not None
    assert weights.lfs is not None
    assert (lfs.sha256, lfs.size) == (weights.lfs.sha256, weights.size)
    assert entries["config.json"].oid == config.blob_id


def test_tree_is_paged(hub: HubServer) -> None:
    """The client follows `Link: rel=next` until all is listed."""
    hub.requests.clear()
    found = client(hub).list_repo_tree(FLASH, repo_type="kernel", revision="v2", recursive=True)
    assert {entry.path for entry in hub.repo(FLASH).git.tree(hub.sha(FLASH, "v2"))} == {item.path for item in found}
    assert len(hub.requests) > 5


def test_tree_of_a_folder_and_of_none(hub: HubServer) -> None:
    """A folder lists its own entries only; a missing folder is EntryNotFound."""
    api = client(hub)
    found = [item.path for item in api.list_repo_tree(FLASH, "build/torch-cpu", repo_type="kernel", revision="v2")]
    assert [f"build/torch-cpu/{name}" for name in ("__init__.py", "flash_attn.py", "metadata.json")] == found
    with pytest.raises(EntryNotFoundError):
        list(api.list_repo_tree(FLASH, "nothing", repo_type="kernel", revision="v2"))


def test_expanded_tree_names_the_last_commit(hub: HubServer) -> None:
    """`expand` tells which commit touched a file last."""
    (readme,) = client(hub).get_paths_info("trl-lib/Capybara", ["README.md"], repo_type="dataset", expand=True)
    assert readme.last_commit is not None
    assert readme.last_commit.title == "First half"


def test_paths_info_leaves_out_what_is_not_there(hub: HubServer) -> None:
    """`paths-info` answers for files and folders, and is silent about the rest."""
    found = client(hub).get_paths_info("trl-lib/Capybara", ["README.md", "data", "nope"], repo_type="dataset")
    assert {item.path for item in found} == {"README.md", "data"}


def test_refs(hub: HubServer) -> None:
    """Branches and tags come with the commits that they name."""
    refs = client(hub).list_repo_refs(FLASH, repo_type="kernel")
    assert {ref.name for ref in refs.branches} == {"main", "v1", "v2", "v3", "v4"}
    assert [(ref.name, ref.target_commit) for ref in refs.tags] == [("release-2", hub.sha(FLASH, "v2"))]


def test_pull_request_revision(small: HubServer) -> None:
    """`refs/pr/1` is a revision, also when its slashes are quoted."""
    sha = small.open_pull_request("org/model", 1, {"config.json": '{"a": 1}\n'})
    api = client(small)
    assert api.model_info("org/model", revision="refs/pr/1").sha == sha
    assert [ref.ref for ref in api.list_repo_refs("org/model", include_pull_requests=True).pull_requests or ()] == [
        "refs/pr/1"
    ]


def test_download_of_a_small_and_a_large_file(small: HubServer, tmp_path: Path) -> None:
    """A small file comes from the Hub, a large one from another origin, without the token."""
    small.add_token("hf_any")
    api = client(small, "hf_any")
    config = api.hf_hub_download("org/model", "config.json", cache_dir=tmp_path / "cache")
    weights = api.hf_hub_download("org/model", "model.safetensors", cache_dir=tmp_path / "cache")
    with open(config, "rb") as file:  # noqa: PTH123 - the client gives strings
        assert file.read() == b"{}\n"
    with open(weights, "rb") as file:  # noqa: PTH123
        assert file.read() == bytes(range(256)) * 40
    fetched = [request for request in small.requests if request.origin == "lfs"]
    assert {"GET"} <= {request.method for request in fetched}
    assert all(request.token is None for request in fetched)


@pytest.mark.parametrize(("repo_id", "kind"), [("Qwen/Qwen3-8B", "model"), (FLASH, "kernel")])
def test_snapshot_is_whole(hub: HubServer, tmp_path: Path, repo_id: str, kind: str) -> None:
    """`snapshot_download` brings every file of the commit, each with the bytes that were committed."""
    folder = client(hub).snapshot_download(repo_id, repo_type=kind, cache_dir=tmp_path)
    git = hub.repo(repo_id).git
    expected = {e.path: git.blob(e) for e in git.tree(hub.sha(repo_id)) if e.kind == "file"}
    assert folder.endswith(hub.sha(repo_id))
    assert expected == {path: (tmp_path / folder / path).read_bytes() for path in expected}


def test_range_requests(small: HubServer) -> None:
    """A part of a file is 206 with Content-Range; past the end it is 416."""
    url = hf_hub_url("org/model", "model.safetensors", endpoint=small.url)
    part = requests.get(url, headers={"Range": "bytes=10-19"}, timeout=10)
    assert (part.status_code, part.headers["Content-Range"], part.content) == (
        206,
        "bytes 10-19/10240",
        bytes(range(10, 20)),
    )
    assert requests.get(url, headers={"Range": "bytes=99999-"}, timeout=10).status_code == 416


def test_resolve_headers(small: HubServer) -> None:
    """HEAD on a file tells commit, size and hash before any byte is moved."""
    url = hf_hub_url("org/model", "model.safetensors", endpoint=small.url)
    head = requests.head(url, allow_redirects=False, timeout=10)
    sha256 = hashlib.sha256(bytes(range(256)) * 40).hexdigest()
    assert head.status_code == 302
    assert head.headers["X-Repo-Commit"] == small.sha("org/model")
    assert (head.headers["X-Linked-Size"], head.headers["X-Linked-Etag"]) == ("10240", f'"{sha256}"')
    assert head.headers["Location"].startswith(small.state.lfs_url)


def test_unknown_names(hub: HubServer, tmp_path: Path) -> None:
    """A missing repository, revision and file are three different errors."""
    api = client(hub)
    with pytest.raises(RepositoryNotFoundError):
        api.model_info("Qwen/Qwen3-9B")
    with pytest.raises(RepositoryNotFoundError):
        api.repo_info("kernels-community/nope", repo_type="kernel")
    with pytest.raises(RevisionNotFoundError):
        api.model_info("Qwen/Qwen3-8B", revision="nope")
    with pytest.raises(RevisionNotFoundError):
        api.model_info("Qwen/Qwen3-8B", revision="0" * 40)
    with pytest.raises(EntryNotFoundError):
        api.hf_hub_download("Qwen/Qwen3-8B", "nope.json", cache_dir=tmp_path)


def test_private_repository(hub: HubServer, tmp_path: Path) -> None:
    """A private repository opens with its reader's token and does not exist for anyone else."""
    api = client(hub, READER_TOKEN)
    path = api.hf_hub_download("test-org/private-model", "config.json", cache_dir=tmp_path)
    assert hub.sha("test-org/private-model") in path
    for token, status in ((None, 401), (STRANGER_TOKEN, 404)):
        with pytest.raises(RepositoryNotFoundError) as caught:
            client(hub, token).model_info("test-org/private-model")
        assert caught.value.response.status_code == status


def test_gated_repository(hub: HubServer, tmp_path: Path) -> None:
    """A gated repository shows its files to all and gives them to its readers."""
    assert client(hub).model_info("test-org/gated-model").gated == "manual"
    for token, status in ((None, 401), (STRANGER_TOKEN, 403)):
        with pytest.raises(GatedRepoError) as caught:
            client(hub, token).hf_hub_download("test-org/gated-model", "config.json", cache_dir=tmp_path)
        assert caught.value.response.status_code == status
    assert client(hub, READER_TOKEN).hf_hub_download("test-org/gated-model", "config.json", cache_dir=tmp_path)


def test_wrong_token(hub: HubServer) -> None:
    """A token that the Hub does not know is refused even for a public repository."""
    with pytest.raises(HfHubHTTPError, match="Invalid credentials in Authorization header"):
        client(hub, "hf_unknown").model_info("Qwen/Qwen3-8B")
    assert client(hub, READER_TOKEN).whoami()["name"] == "reader"


def test_publisher_trust(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """kernels trusts a publisher because the Hub says so."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    _check_trust_remote_code(FLASH, local_files_only=False, trust_remote_code=False)
    with pytest.raises(ValueError, match="is not from a trusted publisher"):
        _check_trust_remote_code("stranger/flash-attn2", local_files_only=False, trust_remote_code=False)
    with pytest.raises(ValueError, match="could not verify publisher trust"):
        _check_trust_remote_code("nobody/kernel", local_files_only=False, trust_remote_code=False)


@pytest.mark.parametrize(
    ("version", "cuda", "torch", "machine", "expected"),
    [
        ("v2", "12.9", "2.8", "x86_64", "torch28-cxx11-cu129-x86_64-linux"),
        ("v2", "12.8", "2.8", "x86_64", "torch28-cxx11-cu128-x86_64-linux"),
        ("v2", "12.8", "2.10", "x86_64", "torch210-cxx11-cu128-x86_64-linux"),
        ("v2", "12.9", "2.8", "aarch64", "torch28-cxx11-cu129-aarch64-linux"),
        ("v2", "13.2", "2.10", "x86_64", "torch210-cxx11-cu130-x86_64-linux"),
        ("v4", "12.8", "2.10", "x86_64", "torch-stable-abi210-cu128-x86_64-linux"),
        ("v2", "11.8", "2.8", "x86_64", None),
    ],
)
def test_variant_for_a_target(  # noqa: PLR0917 - one argument a column
    hub: HubServer, version: str, cuda: str, torch: str, machine: str, expected: str | None
) -> None:
    """kernels finds the variants on this Hub and prefers the one that the fixture intends."""
    variants = get_variants(client(hub), repo_id=FLASH, revision=version)
    target = (variants, CUDA(Version(cuda)), machine, "linux", Version(torch), True, None)
    accepted, _ = _resolve_variant_for_system(*target)
    assert (accepted[0].variant_str if accepted else None) == expected


def test_kernel_digests(hub: HubServer, tmp_path: Path) -> None:
    """Each variant's metadata parses and its digest is what kernels computes, but for the one made to fail."""
    bad = []
    for repo_id in sorted(name for kind, name in hub.state.repos if kind == "kernel"):
        folder = tmp_path / client(hub).snapshot_download(
            repo_id, repo_type="kernel", revision="v1", cache_dir=tmp_path
        )
        for path in folder.glob("build/*/metadata.json"):
            digest = Metadata.read_from_file(path).digest
            assert digest is not None
            if digest.files != Digest.hash_variant(digest.algorithm, path.parent).files:
                bad.append(repo_id)
    assert bad == ["test-org/tampered-attention"]


def test_variants_differ(hub: HubServer) -> None:
    """No two shared objects of the kernel are equal, so a test sees which was picked."""
    entries = [entry for version in ("v2", "v3") for entry in hub.repo(FLASH).git.tree(hub.sha(FLASH, version))]
    shared = [entry.oid for entry in entries if entry.path.endswith(".so")]
    assert len(shared) == len(set(shared)) == 20


def test_moving_branch(hub: HubServer) -> None:
    """A branch moves under a client; the old commit stays readable."""
    old, new = hub.sha("trl-lib/Capybara", "v0.1"), hub.sha("trl-lib/Capybara")
    api = client(hub)
    assert old != new
    hub.move_branch("trl-lib/Capybara", "main", "v0.1")
    assert api.dataset_info("trl-lib/Capybara").sha == old
    hub.move_branch("trl-lib/Capybara", "main", new)
    assert api.dataset_info("trl-lib/Capybara", revision=old).sha == old


def test_commit_changes_and_removes(small: HubServer) -> None:
    """A commit goes over its parent's files; None removes one."""
    sha = small.commit("org/model", {"config.json": None, "new.txt": "1"})
    assert {entry.path for entry in small.repo("org/model").git.tree(sha)} == {"model.safetensors", "new.txt"}


def test_renamed_repository(small: HubServer, tmp_path: Path) -> None:
    """The old name of a renamed repository still leads to it."""
    small.rename("org/model", "new-org/better")
    api = client(small)
    assert api.model_info("org/model").id == "new-org/better"
    assert api.hf_hub_download("org/model", "config.json", cache_dir=tmp_path)


def test_rate_limit(small: HubServer) -> None:
    """429 comes with and without Retry-After, as often as asked."""
    small.faults.add("/api/models/", kind="429", retry_after_seconds=7)
    small.faults.add("/api/models/", kind="429")
    answers = [requests.get(f"{small.url}/api/models/org/model", timeout=10) for _ in range(3)]
    assert [(a.status_code, a.headers.get("Retry-After")) for a in answers] == [(429, "7"), (429, None), (200, None)]


@pytest.mark.parametrize("kind", ["500", "503"])
def test_server_error(small: HubServer, kind: str) -> None:
    """A server error strikes only what the rule names."""
    fault = small.faults.add(r"config\.json", kind=kind, times=None)  # type: ignore[arg-type]
    with pytest.raises(HfHubHTTPError, match=kind):
        client(small).get_hf_file_metadata(url=hf_hub_url("org/model", "config.json", endpoint=small.url))
    assert client(small).model_info("org/model").sha
    assert fault.hits == 1


def test_truncated_body_is_asked_for_again(small: HubServer, tmp_path: Path) -> None:
    """The client notices a body that ended early, asks again and ends with the right bytes."""
    small.faults.add("model.safetensors", kind="truncate")
    path = client(small).hf_hub_download("org/model", "model.safetensors", cache_dir=tmp_path)
    with open(path, "rb") as file:  # noqa: PTH123
        assert file.read() == bytes(range(256)) * 40
    assert [request.method for request in small.requests if request.origin == "lfs"] == ["GET", "GET"]


def test_corrupt_body_is_accepted_by_the_client(small: HubServer, tmp_path: Path) -> None:
    """Wrong bytes of the right length pass the real client: whoever needs the bytes has to hash them."""
    small.faults.add("model.safetensors", kind="corrupt")
    path = client(small).hf_hub_download("org/model", "model.safetensors", cache_dir=tmp_path)
    with open(path, "rb") as file:  # noqa: PTH123
        data = file.read()
    assert len(data) == 10240
    assert data != bytes(range(256)) * 40


def test_reset_slow_and_hang(small: HubServer) -> None:
    """A connection is reset; an answer is late; an answer never comes."""
    url = f"{small.url}/api/models/org/model"
    small.faults.add("/api/models/", kind="reset")
    with pytest.raises(requests.ConnectionError):
        requests.get(url, timeout=10)
    small.faults.add("/api/models/", kind="slow", seconds=0.3)
    assert requests.get(url, timeout=10).elapsed.total_seconds() >= 0.3
    small.faults.add("/api/models/", kind="hang")
    with pytest.raises((requests.ConnectionError, requests.Timeout)):
        requests.get(url, timeout=0.3)


def test_requests_are_logged(small: HubServer) -> None:
    """The log holds method, path and headers of each request, and nothing when there was none."""
    assert small.requests == []
    client(small).model_info("org/model", revision="main")
    (request,) = small.requests
    assert (request.origin, request.method, request.path) == ("hub", "GET", "/api/models/org/model/revision/main")
    assert "hf_hub" in request.headers["user-agent"]


def test_environment_for_a_process(small: HubServer, tmp_path: Path) -> None:
    """A process given `environment` speaks to this Hub and caches where it was told."""
    script = "import huggingface_hub as h; print(h.snapshot_download('org/model'))"
    env = {**small.environment(tmp_path / "home"), "PATH": ""}
    ran = subprocess.run([sys.executable, "-c", script], env=env, check=True, capture_output=True, text=True)
    assert ran.stdout.strip().startswith(str(tmp_path / "home"))


def test_chat_rows_are_json_lines(hub: HubServer) -> None:
    """Every row of the dataset is one conversation that ends with the assistant."""
    git = hub.repo("trl-lib/Capybara").git
    files = {entry.path: entry for entry in git.tree(hub.sha("trl-lib/Capybara"))}
    lines = git.blob(files["data/train-00000-of-00001.jsonl"]).splitlines()
    assert {json.loads(line)["messages"][-1]["role"] for line in lines} == {"assistant"}
    assert len(lines) == 48
