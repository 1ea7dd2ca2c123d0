"""A real base compiles, and the image of a real base runs."""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING

import pytest

from kitbuild.base.bootstrap import bootstrap
from kitbuild.errors import ImageError
from kitbuild.image import assemble, base_compiler, load
from kitbuild.image.compilers import ContainerCompiler
from kitbuild.progress import Silent
from tests.image.kit import RECIPE, make_lock, new_store, remove_images

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from docker import DockerClient


def missing() -> DockerClient:
    raise AssertionError("the engine was asked for")


@pytest.mark.docker
@pytest.mark.slow
def test_base_compiles_and_image_runs(tmp_path: Path, client: DockerClient) -> None:
    """On the bootstrapped base: modules compiled twice give one image; it runs hardened; a warm store asks no engine."""
    first = new_store(tmp_path / "a")
    base = bootstrap("cpu", store=first, progress=Silent(), environ=os.environ)
    name = f"test-{uuid.uuid4().hex[:8]}"
    made = []
    for store in (first, new_store(tmp_path / "b")):
        for digest in (base.config_digest, *base.diff_ids):
            store.add_file(first.path(digest[7:]), expected=digest[7:])
        lock = make_lock(store, base=base, name=name)
        compiler = base_compiler(base, client, store=store, progress=Silent())
        made.append(assemble(lock, recipe=RECIPE, store=store, compiler=compiler, progress=Silent()))
    assert made[0].config_digest == made[1].config_digest
    assert made[0].manifest_digest == made[1].manifest_digest
    warm = base_compiler(base, missing, store=first, progress=Silent())
    again = assemble(
        make_lock(first, base=base, name=name), recipe=RECIPE, store=first, compiler=warm, progress=Silent()
    )
    assert again == made[0]
    try:
        loaded = load(made[0], client, store=first, progress=Silent())
        code = "import sys, torch, kitbuild.errors; print(sys.prefix, torch.__cached__, kitbuild.errors.__name__)"
        output = client.containers.run(
            loaded.engine_id,
            ["-c", code],
            entrypoint=["/opt/kit/bin/python"],
            remove=True,
            read_only=True,
            network_mode="none",
            cap_drop=["ALL"],
        )
        site = f"/opt/kit/lib/python{'.'.join(base.python.split('.')[:2])}/site-packages"
        tag = "cpython-" + "".join(base.python.split(".")[:2])
        expected = f"/opt/kit {site}/torch/__pycache__/__init__.{tag}.pyc kitbuild.errors\n"
        assert output.decode() == expected
    finally:
        remove_images(client, made[0].tag)


@pytest.mark.docker
@pytest.mark.parametrize(
    ("image", "message"),
    [(lambda: "kitbuild/none:0", "^the engine could not compile modules in the base: .*No such image")],
)
def test_base_that_is_not_there(tmp_path: Path, client: DockerClient, image: Callable[[], str], message: str) -> None:
    """An engine without the base says what it could not do, exit 5."""
    compiler = ContainerCompiler(client=lambda: client, image=image, interpreter="/usr/bin/python3", key="k")
    with pytest.raises(ImageError, match=message):
        compiler(tmp_path, advance=lambda _index: None)
