"""What goes wrong while a lock is made: exit 4, or 7 for wrong bytes; one message; and the next try works."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kitbuild.lock.files import lock_path
from tests.docker.loop.command import eventually
from tests.docker.loop.recipes import ATTENTION, KERNELS, read_lock, recipe
from tests.docker.loop.stores import new_machine
from tests.hub.fixtures import OTHER_CUDA_VARIANTS, standard_hub

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kitbuild.store import Store
    from tests.docker.loop.command import Kitbuild
    from tests.hub.server import HubServer

pytestmark = pytest.mark.docker


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    with standard_hub(tmp_path_factory.mktemp("hub")) as running:
        yield running


@pytest.fixture
def there(kit: Kitbuild, hub: HubServer, store: Store, tmp_path: Path) -> Iterator[Kitbuild]:
    """The program on a machine that has downloaded wheels and base, and nothing of the Hub."""
    plain = recipe(tmp_path / "plain")
    kit("lock", plain)
    home = new_machine(store, tmp_path / "store", read_lock(plain))
    yield kit.given(KITBUILD_HOME=str(home), **hub.environment(tmp_path / "hf"))
    hub.faults.clear()


def with_attention(folder: Path, reference: str) -> Path:
    return recipe(folder / "recipe", KERNELS, changed={f"{ATTENTION}@v2": reference})


def refused(kit: Kitbuild, path: Path) -> tuple[str, str]:
    """Message and hint of the one problem for which the lock is not made."""
    error = kit.fails(4, "lock", path)
    assert not lock_path(path).exists()
    (problem,) = error["problems"] or [error]
    if problem is not error:
        assert problem["key"] == "kernels.attention"
    return problem["message"], problem["hint"]


def test_unknown_repository(there: Kitbuild, tmp_path: Path) -> None:
    """A kernel that the Hub does not know is named."""
    message, hint = refused(there, with_attention(tmp_path, "test-org/no-such-kernel@v1"))
    assert message == "kernel test-org/no-such-kernel does not exist on the Hub, or is private"
    assert hint == "check the spelling; for a private repository set HF_TOKEN"


def test_unknown_revision(there: Kitbuild, tmp_path: Path) -> None:
    """An unknown version lists the branches and tags that exist; a person reads the same."""
    path = with_attention(tmp_path, f"{ATTENTION}@v9")
    message, hint = refused(there, path)
    assert message == f"kernel {ATTENTION} has no revision 'v9'"
    assert hint == "branches and tags that exist: main, release-2, v1, v2, v3, v4"
    said = there.says(4, "lock", path)
    assert message in said
    assert hint in said


def test_no_variant_for_the_target(there: Kitbuild, tmp_path: Path) -> None:
    """A kernel without a build for the target lists the builds that it has."""
    message, hint = refused(there, with_attention(tmp_path, "test-org/other-cuda@v1"))
    assert "test-org/other-cuda@v1" in message
    assert "has no build for torch 2.13.0" in message
    assert f"variants that exist: {', '.join(sorted(OTHER_CUDA_VARIANTS))};" in hint


def test_untrusted_publisher(there: Kitbuild, tmp_path: Path) -> None:
    """A publisher whom the Hub does not trust is refused; the recipe may allow one by name."""
    path = with_attention(tmp_path, "stranger/flash-attn2@v1")
    message, hint = refused(there, path)
    assert message == "stranger/flash-attn2@v1: stranger is not a trusted kernel publisher"
    assert hint == "if you trust it, add it: policy: {allow_publishers: [stranger]}"
    path.write_text(path.read_text() + "policy: {allow_publishers: [stranger]}\n")
    there("lock", path)
    assert {kernel.publisher for kernel in read_lock(path).kernels} == {"stranger", "kernels-community"}


def test_tampered_kernel(there: Kitbuild, tmp_path: Path) -> None:
    """A build that does not match the digest in its own metadata is exit 7."""
    error = there.fails(7, "lock", with_attention(tmp_path, "test-org/tampered-attention@v1"))
    assert error["message"].endswith("does not match its own metadata: flash_attn.py")


def test_hub_down(there: Kitbuild, hub: HubServer, tmp_path: Path) -> None:
    """No Hub is exit 4 and leaves no lock; with the Hub back the same command works."""
    path = recipe(tmp_path / "recipe", KERNELS)
    down = there.given(HF_ENDPOINT="http://127.0.0.1:9")
    error = down.fails(4, "image", path)
    (problem, *_) = error["problems"] or [error]
    assert problem["message"] == f"the Hub cannot be reached, kernel {ATTENTION} was not resolved"
    assert not lock_path(path).exists()
    hub.faults.add("/api/kernels/", kind="503", times=None)
    error = there.fails(4, "lock", path)
    assert "503" in (error["problems"] or [error])[0]["message"]
    hub.faults.clear()
    assert there("lock", path)["changed"] is True


def test_corrupt_file(there: Kitbuild, hub: HubServer, tmp_path: Path) -> None:
    """A byte that the Hub or the way to it changed is exit 7, keeps nothing wrong, and the next try works."""
    path = recipe(tmp_path / "recipe", KERNELS)
    hub.faults.add(r"/flash_attn\.py", kind="corrupt", times=None)
    error = there.fails(7, "lock", path)
    assert "flash_attn.py" in error["message"]
    assert not lock_path(path).exists()
    hub.faults.clear()
    assert there("store", "verify")["damaged"] == 0
    assert there("lock", path)["changed"] is True


def test_interrupted_while_the_hub_hangs(there: Kitbuild, hub: HubServer, tmp_path: Path) -> None:
    """Ctrl-C while a download hangs is exit 130 at once, with one JSON object; the same command works afterwards."""
    path = recipe(tmp_path / "recipe", KERNELS)
    for pattern in (r"/flash_attn\.py", "/api/kernels/"):
        hub.faults.add(pattern, kind="hang", times=None)
        running = there.start("lock", path, "--json")
        eventually("a request that hangs", lambda: hub.faults.rules[0].hits)
        running.interrupt()
        code, out, err = running.end(timeout_seconds=20)
        assert (code, err) == (130, "")
        assert '"code": "interrupted"' in out
        assert not lock_path(path).exists()
        hub.faults.clear()
    assert there("store", "verify")["damaged"] == 0
    assert there("lock", path)["changed"] is True


def on_small_disk(kit: Kitbuild, place: Path, *, left: str) -> Kitbuild:
    """The program with its store on a file system of 8 MB of which `left` is free, which ends with it."""
    mount = f"mount -t tmpfs -o size=8m kitbuild-test {place} && head -c 8m /dev/zero >{place}/filler"
    script = f'{{ {mount}; truncate -s -{left} {place}/filler; }} 2>/dev/null; exec "$@"'
    alone = ("--mount",) if os.geteuid() == 0 else ("--user", "--map-root-user", "--mount")
    place.mkdir()
    return replace(kit.given(KITBUILD_HOME=str(place)), within=("unshare", *alone, "sh", "-c", script, "kitbuild"))


def test_no_space(kit: Kitbuild, tmp_path: Path) -> None:
    """A store on a full disk is exit 4, names the store, and says what to do, whatever is to be written."""
    path = recipe(tmp_path / "recipe")
    some, none = tmp_path / "some", tmp_path / "none"
    roomy, full = on_small_disk(kit, some, left="6M"), on_small_disk(kit, none, left="0")
    no_base = roomy.fails(4, "image", path)
    assert no_base["message"] == f"the store {some} has 0.0 GB free, bootstrapping a base takes 1.5 GB"
    no_byte = full.fails(4, "image", path)
    assert str(none) in no_byte["message"]
    assert not lock_path(path).exists()
    kit("lock", path)
    no_wheels = roomy.fails(4, "image", path)
    assert f"GB are free in the store {some}" in no_wheels["message"]
    for error in (no_base, no_byte, no_wheels):
        assert "KITBUILD_HOME" in error["hint"]
    assert list(some.iterdir()) == list(none.iterdir()) == []


def test_store_that_cannot_be_written(kit: Kitbuild, tmp_path: Path) -> None:
    """A store in a place where no folder can be made is exit 4."""
    place = tmp_path / "file"
    place.write_text("")
    error = kit.given(KITBUILD_HOME=str(place / "store")).fails(4, "image", recipe(tmp_path / "recipe"))
    assert error["message"] == f"the store {place / 'store'} cannot be used: Not a directory"
    assert error["hint"] == "set KITBUILD_HOME to a directory that you may write"
