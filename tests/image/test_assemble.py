"""Assembly: digests are a function of the lock, and a layer is made once."""

from __future__ import annotations

import hashlib
import json
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kitbuild.errors import ImageError, LockError, ResolveError, VerificationError
from kitbuild.image import HostCompiler, Image, assemble, write_oci
from kitbuild.progress import Silent
from tests.image.kit import (
    PYTHON,
    RECIPE,
    SITE,
    layer_members,
    locked_wheel,
    make_kernel,
    make_lock,
    make_wheel,
    new_store,
)

if TYPE_CHECKING:
    from kitbuild.lock.models import Lock
    from kitbuild.store import Store

COMPILER = HostCompiler(Path(sys.executable))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return new_store(tmp_path / "store")


def build(lock: Lock, store: Store) -> Image:
    return assemble(lock, recipe=RECIPE, store=store, compiler=COMPILER, progress=Silent())


def content_of(image: Image) -> dict[str, dict[str, str]]:
    with tarfile.open(image.layers[-1].path) as archive:
        stream = archive.extractfile("kit/content.json")
        assert stream is not None
        data = stream.read()
    assert image.content_sha256 == hashlib.sha256(data).hexdigest()
    found: dict[str, dict[str, str]] = json.loads(data)
    return found


def test_layers_in_order(store: Store) -> None:
    """Layers go from what changes least to what changes most, the lock last."""
    image = build(make_lock(store), store)
    assert [layer.name for layer in image.layers] == ["base-0", "wheels-torch", "wheels", "guest", "kernels", "lock"]


def test_config(store: Store) -> None:
    """The config has the contract's entry, user and labels, the base's variables, and no time."""
    lock = make_lock(store)
    image = build(lock, store)
    config = json.loads(image.config)
    assert config["created"] == "1970-01-01T00:00:00Z"
    assert config["rootfs"]["diff_ids"] == [layer.digest for layer in image.layers]
    assert len(config["history"]) == len(image.layers)
    run = config["config"]
    assert (run["Entrypoint"], run["WorkingDir"], run["User"]) == (["/opt/kit/bin/kit"], "/out", "10001:10001")
    assert "PATH=/opt/kit/bin:/usr/bin:/bin" in run["Env"]
    assert "NVIDIA_VISIBLE_DEVICES=all" in run["Env"]
    assert "KERNELS_CACHE=/kit/kernels" in run["Env"]
    assert run["Labels"]["org.kitbuild.content"] == image.content_sha256
    assert run["Labels"]["org.kitbuild.lock"] == lock.sha256
    assert run["Labels"]["base"] == "tiny"
    assert f"kitbuild/tiny:{lock.sha256[:12]}" == image.tag


def test_every_tar_is_plain(store: Store) -> None:
    """Entries are sorted, owned by 0, at time 0, with fixed modes, and each directory is there once."""
    for layer in build(make_lock(store, bake=("model", "dataset")), store).layers[1:]:
        with tarfile.open(layer.path) as archive:
            members = archive.getmembers()
        names = [member.name for member in members]
        assert sorted(set(names)) == names
        for member in members:
            assert (member.uid, member.gid, member.mtime, member.uname) == (0, 0, 0, "")
            allowed = {0o755, 0o1777} if member.isdir() else {0o777} if member.issym() else {0o644, 0o755}
            assert member.mode in allowed
            parent = member.name.rpartition("/")[0]
            assert parent in {*names, ""}
        assert layer.digest == "sha256:" + hashlib.sha256(layer.path.read_bytes()).hexdigest()


def test_content_lists_every_file(store: Store) -> None:
    """content.json has each file and link of our layers with its digest, and not itself."""
    image = build(make_lock(store, bake=("model", "dataset")), store)
    content = content_of(image)
    files, links = set(), {}
    for layer in image.layers[1:]:
        for name, member in layer_members(layer.path).items():
            if member.isfile():
                files.add(f"/{name}")
            if member.issym():
                links[f"/{name}"] = member.linkname
    assert files - {"/kit/content.json"} == set(content["files"])
    assert links == content["links"]
    assert content["files"]["/inputs/model/config.json"] == hashlib.sha256(b"{}").hexdigest()
    assert links["/opt/kit/bin/python"] == "/usr/bin/python3"


def test_modules_are_compiled_once_and_checked_never(store: Store) -> None:
    """Each module has an unchecked-hash .pyc of the base's minor; what is no Python 3 has none."""
    image = build(make_lock(store), store)
    files = content_of(image)["files"]
    tag = "cpython-" + "".join(PYTHON.split(".")[:2])
    assert f"{SITE}/tool/__pycache__/__init__.{tag}.pyc" in files
    assert f"{SITE}/kitbuild/__pycache__/errors.{tag}.pyc" in files
    assert f"{SITE}/tool/broken.py" in files
    assert f"{SITE}/tool/__pycache__/broken.{tag}.pyc" not in files
    (layer,) = (layer for layer in image.layers if layer.name == "wheels")
    with tarfile.open(layer.path) as archive:
        stream = archive.extractfile(f"{SITE[1:]}/tool/__pycache__/__init__.{tag}.pyc")
        assert stream is not None
        assert (1).to_bytes(4, "little") == stream.read()[4:8]


def test_unchanged_lock_writes_nothing(store: Store) -> None:
    """A second assembly makes no layer and compiles nothing."""
    lock = make_lock(store)
    first = build(lock, store)
    times = {path: path.stat().st_mtime_ns for path in store.root.rglob("*") if path.is_file()}
    assert build(lock, store) == first
    after = {path: path.stat().st_mtime_ns for path in store.root.rglob("*") if path.is_file()}
    assert {p: t for p, t in after.items() if p.suffix != ".lock"} == {
        p: t for p, t in times.items() if p.suffix != ".lock"
    }


def test_changed_kernel_changes_two_layers(store: Store) -> None:
    """Another kernel gives another kernels layer and another lock layer (some kilobytes), and no more."""
    before = build(make_lock(store), store)
    after = build(make_lock(store, kernels=(make_kernel(store, source=b"x = 1\n"),)), store)
    changed = [a.name for a, b in zip(after.layers, before.layers, strict=True) if a.digest != b.digest]
    assert changed == ["kernels", "lock"]


def test_small_wheel_changes_its_own_group(store: Store) -> None:
    """A new version of a small package leaves the layer with torch as it is."""
    torch = locked_wheel(store, *make_wheel("torch", {"torch/__init__.py": b""}))
    images = [
        build(make_lock(store, (torch, locked_wheel(store, *make_wheel("tool", {"tool.py": code})))), store)
        for code in (b"a = 1\n", b"a = 2\n")
    ]
    changed = [a.name for a, b in zip(*(image.layers for image in images), strict=True) if a.digest != b.digest]
    assert changed == ["wheels", "lock"]


@pytest.mark.parametrize("names", [("aa", "zz"), ("torch", "zz")])
def test_same_file_in_two_wheels_is_kept_once(store: Store, names: tuple[str, str]) -> None:
    """Two wheels may share a file of equal content, as namespace packages do."""
    shared = b"x = ('kit', 'build')\n"
    wheels = [make_wheel(name, {f"{name}.py": shared, "ns/__init__.py": shared}) for name in names]
    image = build(make_lock(store, tuple(locked_wheel(store, *wheel) for wheel in wheels)), store)
    assert f"{SITE}/ns/__init__.py" in content_of(image)["files"]


@pytest.mark.parametrize("names", [("aa", "bb"), ("torch", "bb")])
def test_two_wheels_that_clash_are_named(store: Store, names: tuple[str, str]) -> None:
    """Different content for one path is refused with both wheels, in one layer or in two."""
    wheels = [make_wheel(name, {"shared.py": name.encode()}) for name in names]
    lock = make_lock(store, tuple(locked_wheel(store, *wheel) for wheel in wheels))
    with pytest.raises(ImageError) as caught:
        build(lock, store)
    first, second = (f"{name}-1.0-py3-none-any.whl" for name in sorted(names, key=lambda n: n != "torch"))
    assert f"{first} and {second} both bring {SITE}/shared.py, with different content" == caught.value.message
    assert caught.value.exit_code == 5


def test_file_where_another_wheel_has_a_directory(store: Store) -> None:
    """A file and a directory of one name are refused."""
    wheels = [make_wheel("aa", {"thing": b"x"}), make_wheel("bb", {"thing/__init__.py": b""})]
    with pytest.raises(ImageError, match=r"aa-1.0-py3-none-any.whl has the file .*/thing, bb-1.0"):
        build(make_lock(store, tuple(locked_wheel(store, *wheel) for wheel in wheels)), store)


def test_changed_blob_is_refused(store: Store) -> None:
    """A wheel that is not the locked one any more is exit 7, naming the file."""
    wheel = locked_wheel(store, *make_wheel("tool", {"tool.py": b""}))
    path = store.path(wheel.sha256)
    path.chmod(0o644)
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(VerificationError, match=r"^tool-1.0-py3-none-any.whl: sha256 is [0-9a-f]{64}, locked "):
        build(make_lock(store, (wheel,)), store)


def test_changed_kernel_file_is_refused(store: Store) -> None:
    """A kernel's byte that is not the locked one is exit 7, naming repository and file."""
    kernel = make_kernel(store)
    path = store.path(kernel.files[0].sha256)
    path.chmod(0o644)
    path.write_bytes(b"def answer():\n    return 43\n")
    with pytest.raises(
        VerificationError, match=r"^org/tiny@ccccccc: /kit/kernels/kernels--org--tiny/snapshots/c+/build"
    ):
        build(make_lock(store, kernels=(kernel,)), store)


def test_missing_wheel_says_fetch(store: Store) -> None:
    """What the store lacks is named, exit 4."""
    wheel = locked_wheel(store, *make_wheel("tool", {"tool.py": b""}))
    store.path(wheel.sha256).unlink()
    with pytest.raises(ResolveError, match=r"tool-1.0-py3-none-any.whl .* is not in the store"):
        build(make_lock(store, (wheel,)), store)


def test_another_recipe_is_refused(store: Store) -> None:
    """A recipe that the lock was not made from is exit 3."""
    with pytest.raises(LockError, match="the recipe is not the one that was locked"):
        assemble(make_lock(store), recipe=b"other", store=store, compiler=COMPILER, progress=Silent())


def test_a_damaged_layer_is_not_written(store: Store, tmp_path: Path) -> None:
    """A layer whose bytes changed in the store is exit 7 and no archive, where a tool would fail only much later."""
    image = build(make_lock(store), store)
    path = image.layers[-1].path
    path.chmod(0o644)
    data = path.read_bytes()
    path.write_bytes(data[:600] + bytes([data[600] ^ 1]) + data[601:])
    with pytest.raises(VerificationError, match="in the store is damaged"):
        write_oci(image, tmp_path / "a.tar")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["store"]


def test_archive_is_written_whole_or_not_at_all(store: Store, tmp_path: Path) -> None:
    """`write_oci` gives the same bytes twice, with the layers' digests as names, and leaves nothing half done."""
    image = build(make_lock(store), store)
    paths = [tmp_path / "a.tar", tmp_path / "b.tar"]
    for path in paths:
        write_oci(image, path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    names = layer_members(paths[0])
    assert {f"blobs/sha256/{layer.digest[7:]}" for layer in image.layers} < set(names)
    with pytest.raises(ImageError, match="cannot be written"):
        write_oci(image, tmp_path / "missing" / "c.tar")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar", "b.tar", "store"]
