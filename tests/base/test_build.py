"""A CUDA base is built from its Dockerfile, here on the Debian base and without a network."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING

import pytest

from kitbuild.base import bases
from kitbuild.base import build as building
from kitbuild.base.build import build
from kitbuild.base.find import find
from kitbuild.base.models import Upstream
from kitbuild.base.targets import data_path, load_target
from kitbuild.errors import ImageError
from kitbuild.image.load import load_base
from kitbuild.progress import Silent
from tests.base import made
from tests.base.made import Notes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import docker

    from kitbuild.base.models import LockedBase
    from kitbuild.store import Store

pytestmark = pytest.mark.docker


@pytest.fixture
def upstream(store: Store, client: docker.DockerClient) -> Iterator[str]:
    """A small image without a shell: enough to build FROM, nothing can RUN in it."""
    tag = f"kitbuild-test/upstream:{time.time_ns()}"
    load_base(made.add(store), client, store=store, tag=tag, progress=Silent())
    yield tag
    client.images.remove(tag, force=True)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cuda129", "cuda128"])
def test_build_on_the_debian_base(
    target: str, debian_base: LockedBase, session_store: Store, store: Store, client: docker.DockerClient
) -> None:
    """With everything there already nothing is installed; the result is a base whose labels tell where it is from."""
    tag = f"kitbuild-test/base-cpu:{time.time_ns()}"
    load_base(debian_base, client, store=session_store, tag=tag, progress=Silent())
    notes = Notes()
    try:
        base = build(target, client=client, store=store, progress=notes, upstream=tag, network="none")
    finally:
        client.images.remove(tag, force=True)
        client.images.remove(f"kitbuild/base-{target}", force=True)
    assert (base.cuda, base.interpreter, base.python) == (
        load_target(target).cuda,
        debian_base.interpreter,
        debian_base.python,
    )
    assert base.packages == debian_base.packages
    assert base.dockerfile_sha256 == hashlib.sha256(data_path(f"Dockerfile.{target}").read_bytes()).hexdigest()
    assert base.upstream == Upstream(name=tag, digest=debian_base.config_digest)
    assert base.diff_ids[0] == debian_base.diff_ids[0]
    assert any(line.startswith("build: Step 1/") for line in notes.lines)
    found = find(
        None, target=target, store=store, environ={}, client_factory=made.raising(ImageError("none")), progress=notes
    )
    assert found == base == bases.recorded(store, base.manifest_digest)


def test_a_step_that_fails(store: Store, client: docker.DockerClient, upstream: str) -> None:
    """Exit 5 with the build's last lines; the store has no such base, the engine no container of it."""
    with pytest.raises(ImageError, match=r"^building Dockerfile\.cuda129 failed: ") as caught:
        build("cuda129", client=client, store=store, progress=Silent(), upstream=upstream, network="none")
    assert "Step" in caught.value.message
    assert bases.named(store, "kitbuild/base-cuda129") is None
    assert client.containers.list(all=True, filters={"ancestor": upstream}) == []


def test_a_dockerfile_that_is_none(
    store: Store, client: docker.DockerClient, upstream: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's own answer to a syntax error, which is no build error, is exit 5 too."""
    (tmp_path / "Dockerfile").write_text("ARG BASE=x\nFROM ${BASE}\nRUNN true\n")
    monkeypatch.setattr(building, "dockerfile_path", lambda _target: tmp_path / "Dockerfile")
    with pytest.raises(ImageError, match=r"^the engine could not build Dockerfile\.cuda129: .*RUNN"):
        build("cuda129", client=client, store=store, progress=Silent(), upstream=upstream)


def test_an_upstream_that_is_nowhere(store: Store, client: docker.DockerClient) -> None:
    """Exit 5, naming the image that could not be pulled."""
    with pytest.raises(ImageError, match=r"^the engine could not pull localhost:9/none:1: "):
        build("cuda129", client=client, store=store, progress=Silent(), upstream="localhost:9/none:1")
