"""The Hub that most tests want: the names of the real recipes, their traps, and a few kernels that are broken."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.hub import content, kernel_repos
from tests.hub.server import HubServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

READER_TOKEN = "hf_reader_of_private_repos"
STRANGER_TOKEN = "hf_known_but_without_access"
OTHER_CUDA_VARIANTS = ("torch28-cxx11-cu118-x86_64-linux", "torch210-cxx11-cu130-aarch64-linux")


@contextmanager
def standard_hub(root: Path, *, page_size: int = 20) -> Iterator[HubServer]:
    """A running Hub with every repository below, its git repositories under `root`."""
    with HubServer(root, page_size=page_size) as hub:
        add_publishers(hub)
        add_kernels(hub)
        add_broken_kernels(hub)
        add_models(hub)
        add_datasets(hub)
        hub.add_token(READER_TOKEN, "reader", readable=("test-org/private-model", "test-org/gated-model"))
        hub.add_token(STRANGER_TOKEN, "stranger")
        yield hub


def add_publishers(hub: HubServer) -> None:
    for name in ("kernels-community", "test-org", "Qwen", "trl-lib"):
        hub.add_organization(name, trusted_kernel_publisher=name in ("kernels-community", "test-org"))
    hub.add_organization("stranger")


def add_kernels(hub: HubServer) -> None:
    """The kernels that the recipes name, each version a branch."""
    hub.create_repo("kernels-community/flash-attn2", "kernel")
    card = {"README.md": "# flash-attn2\nVersions are branches.\n"}
    first = hub.commit("kernels-community/flash-attn2", card, message="Initial commit")
    for version in (1, 2, 3, 4):
        files = kernel_repos.flash_attn2(version)
        hub.commit("kernels-community/flash-attn2", files, f"v{version}", parent=first, message=f"Version {version}")
    hub.tag("kernels-community/flash-attn2", "release-2", "v2")

    hub.create_repo("kernels-community/liger-kernels", "kernel")
    first = hub.commit("kernels-community/liger-kernels", {"README.md": "# liger-kernels\n"}, message="Initial commit")
    for version in (1, 3):
        files = kernel_repos.liger_kernels(version)
        hub.commit("kernels-community/liger-kernels", files, f"v{version}", parent=first, message=f"Version {version}")


def add_kernel(hub: HubServer, repo_id: str, files: dict[str, bytes]) -> str:
    """A kernel repository with its one version on `main` and `v1`."""
    hub.create_repo(repo_id, "kernel")
    sha = hub.commit(repo_id, files, kind="kernel", message="Version 1")
    return hub.move_branch(repo_id, "v1", sha, kind="kernel")


def add_broken_kernels(hub: HubServer) -> None:
    """One kernel for each way in which a kernel disappoints; `torch-attention` is the right one for any device."""
    right, build = kernel_repos.attention(), kernel_repos.variant_files
    add_kernel(hub, "test-org/torch-attention", build("torch-attention", "torch-universal", right))
    for name in ("nan_attention", "leaky_attention", "broken_backward"):
        slug = name.replace("_", "-")
        add_kernel(hub, f"test-org/{slug}", build(slug, "torch-universal", kernel_repos.attention(name)))
    only_padded = kernel_repos.attention("flash_attn", "flash_attn_func")
    add_kernel(hub, "test-org/no-varlen-attention", build("no-varlen-attention", "torch-universal", only_padded))
    add_kernel(hub, "stranger/flash-attn2", build("flash-attn2", "torch-cpu", right))

    other: dict[str, bytes] = {}
    for variant in OTHER_CUDA_VARIANTS:
        other |= kernel_repos.binary_variant("other-cuda", variant)
    add_kernel(hub, "test-org/other-cuda", other)

    depends = {"repo-id": "test-org/torch-attention", "version": 1}
    reexport = b'from kernels import get_kernel_dep\n\n_dep = get_kernel_dep("test-org/torch-attention")\n'
    reexport += b"flash_attn_func = _dep.flash_attn_func\nflash_attn_varlen_func = _dep.flash_attn_varlen_func\n"
    dependent = {"__init__.py": reexport}
    files = build("dependent-attention", "torch-universal", dependent, kernel_depends=(depends,))
    add_kernel(hub, "test-org/dependent-attention", files)

    tampered = build("tampered-attention", "torch-universal", right)
    tampered["build/torch-universal/flash_attn.py"] += b"\n# a line that the digest does not know\n"
    add_kernel(hub, "test-org/tampered-attention", tampered)

    target = 'kind = "redirect"\ndestination = "test-org/torch-attention"\nrevision = "v1"\n'
    add_kernel(hub, "test-org/moved-attention", {"kernel-status.toml": target.encode()})


def add_models(hub: HubServer) -> None:
    """Tiny random models under the real names; the larger one in two shards."""
    hub.create_repo("Qwen/Qwen3-8B")
    hub.commit("Qwen/Qwen3-8B", content.qwen3_files(seed=8, shards=2), message="Upload model")
    hub.create_repo("Qwen/Qwen3-0.6B")
    hub.commit("Qwen/Qwen3-0.6B", content.qwen3_files(seed=6, tied=True), message="Upload model")
    for name, private in (("private-model", True), ("gated-model", False)):
        hub.create_repo(f"test-org/{name}", private=private, gated=not private)
        hub.commit(f"test-org/{name}", content.qwen3_files(seed=1, tied=True), message="Upload model")


def add_datasets(hub: HubServer) -> None:
    """A chat dataset whose `main` has a past: the first commit has half of the rows."""
    hub.create_repo("trl-lib/Capybara", "dataset")
    hub.commit("trl-lib/Capybara", content.capybara_files(rows=24), message="First half")
    hub.tag("trl-lib/Capybara", "v0.1")
    hub.commit("trl-lib/Capybara", content.capybara_files(rows=48), message="All rows")
