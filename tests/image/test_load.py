"""Loading: the engine's id is ours, and only what it lacks is sent."""

from __future__ import annotations

import gc
import io
import json
import sys
import tarfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import docker.errors
import pytest

from kitbuild.errors import ImageError, VerificationError
from kitbuild.image import HostCompiler, Image, assemble, connect, load, verify_image
from kitbuild.image.load import archive_chunks
from kitbuild.progress import Silent
from tests.image.kit import RECIPE, make_kernel, make_lock, new_store, remove_images

if TYPE_CHECKING:
    from collections.abc import Iterator

    from docker import DockerClient

    from kitbuild.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return new_store(tmp_path / "store")


def build(store: Store, *, name: str = "tiny", source: bytes = b"x = 1\n") -> Image:
    lock = make_lock(store, kernels=(make_kernel(store, source=source),), name=name)
    compiler = HostCompiler(Path(sys.executable))
    return assemble(lock, recipe=RECIPE, store=store, compiler=compiler, progress=Silent())


def own_digests(image: Image) -> tuple[str, ...]:
    return tuple(layer.digest for layer in image.layers)


class FakeEngine:
    """An engine's two image stores as far as `load` sees them: `client` and `client.api` in one."""

    def __init__(self, *, containerd: bool) -> None:
        status = [["driver-type", "io.containerd.snapshotter.v1"]] if containerd else [["Backing Filesystem", "ext"]]
        self._info = {"ID": "engine-1", "DriverStatus": status}
        self._containerd = containerd
        self.blobs: set[str] = set()
        self.known: dict[str, tuple[str, ...]] = {}
        self.tags: dict[str, str] = {}
        self.archives: list[set[str]] = []
        self.refusal: str | None = None
        self.images = self
        self.api = self
        self.broken = False

    def info(self) -> dict[str, Any]:
        return self._info

    def __call__(self, *, all: bool) -> list[dict[str, str]]:  # noqa: A002 - the SDK's name
        assert all
        return [{"Id": key} for key in self.known]

    def get(self, engine_id: str) -> Any:
        if engine_id not in self.known:
            raise docker.errors.ImageNotFound(engine_id)
        layers = self.known[engine_id]

        class Found:
            id = engine_id
            attrs: dict[str, Any] = {"RootFS": {"Layers": list(layers)}}  # noqa: RUF012 - read only

            @staticmethod
            def tag(repository: str, tag: str) -> None:
                self.tags[f"{repository}:{tag}"] = engine_id

        return Found()

    def load_image(self, data: Iterator[bytes], *, quiet: bool) -> Iterator[dict[str, str]]:
        assert quiet
        with tarfile.open(fileobj=io.BytesIO(b"".join(data))) as archive:
            names = {name for name in archive.getnames() if name.startswith("blobs/sha256/")}
            read = {name: archive.extractfile(name).read() for name in ("manifest.json", "index.json")}  # type: ignore[union-attr]
        self.archives.append(names)
        if self.refusal:
            return iter([{"error": self.refusal}])
        digests = {f"sha256:{name.rpartition('/')[2]}" for name in names} | self.blobs
        layers = tuple(
            path.replace("blobs/sha256/", "sha256:") for path in json.loads(read["manifest.json"])[0]["Layers"]
        )
        missing = set(layers) - digests
        if missing and not self._containerd:
            return iter([{"error": f"open {missing}: no such file or directory"}])
        self.broken = bool(missing)
        self.blobs |= digests
        config = json.loads(read["manifest.json"])[0]["Config"].replace("blobs/sha256/", "sha256:")
        manifest = json.loads(read["index.json"])["manifests"][0]["digest"]
        self.known[manifest if self._containerd else config] = layers
        return iter([{"stream": "Loaded"}])

    def create_container(self, engine_id: str, *, command: list[str]) -> dict[str, str]:
        assert command == ["info"]
        if self.broken:
            self.known.pop(engine_id)
            raise docker.errors.APIError("content digest not found")
        return {"Id": "container"}

    def remove_container(self, container: str, *, v: bool) -> None:
        assert (container, v) == ("container", True)


class Client:
    """What `load` is given: `images` is the collection, `api.images` the listing."""

    def __init__(self, engine: FakeEngine) -> None:
        self.images = engine
        self.info = engine.info
        self.api = Api(engine)


class Api:
    def __init__(self, engine: FakeEngine) -> None:
        self.images = engine
        self.load_image = engine.load_image
        self.create_container = engine.create_container
        self.remove_container = engine.remove_container


def give(image: Image, engine: FakeEngine, store: Store) -> Any:
    return load(image, Client(engine), store=store, progress=Silent())  # type: ignore[arg-type]


def sent(engine: FakeEngine, image: Image) -> list[str]:
    return [layer.name for layer in image.layers if f"blobs/sha256/{layer.digest[7:]}" in engine.archives[-1]]


@pytest.mark.parametrize("containerd", [False, True])
def test_engine_id_is_the_digest_of_its_store(store: Store, *, containerd: bool) -> None:
    """The classic store names an image by its config, containerd's by its manifest."""
    image, engine = build(store), FakeEngine(containerd=containerd)
    loaded = give(image, engine, store)
    assert loaded.engine_id == (image.manifest_digest if containerd else image.config_digest)
    assert loaded.reused == ()
    assert engine.tags == {image.tag: loaded.engine_id}


@pytest.mark.parametrize("containerd", [False, True])
def test_present_image_is_not_sent(store: Store, *, containerd: bool) -> None:
    """An image that is there is only tagged again."""
    image, engine = build(store), FakeEngine(containerd=containerd)
    give(image, engine, store)
    engine.tags.clear()
    loaded = give(image, engine, store)
    assert len(engine.archives) == 1
    assert (loaded.reused, loaded.sent_bytes) == (own_digests(image), 0)
    assert engine.tags == {image.tag: loaded.engine_id}


@pytest.mark.parametrize("containerd", [False, True])
def test_changed_kernel_sends_its_layer(store: Store, *, containerd: bool) -> None:
    """After a change of one kernel its layer and the lock's few kilobytes are sent."""
    engine = FakeEngine(containerd=containerd)
    give(build(store), engine, store)
    image = build(store, source=b"x = 2\n")
    loaded = give(image, engine, store)
    assert sent(engine, image) == ["kernels", "lock"]
    assert loaded.reused == own_digests(image)[:-2]


@pytest.mark.parametrize("containerd", [False, True])
def test_unchanged_layers_are_not_even_read(store: Store, *, containerd: bool) -> None:
    """After a change of one kernel no byte of the other layers, or of what they are made of, is looked at."""
    engine = FakeEngine(containerd=containerd)
    first = build(store)
    give(first, engine, store)
    kept = [layer for layer in first.layers if layer.name not in {"kernels", "lock"}]
    wheels = {wheel.sha256 for wheel in make_lock(store).wheels}
    for path in [*(layer.path for layer in kept), *(store.path(sha256) for sha256 in wheels)]:
        path.chmod(0o644)
        path.write_bytes(b"")
        path.chmod(0)
    image = build(store, source=b"x = 2\n")
    loaded = give(image, engine, store)
    assert sent(engine, image) == ["kernels", "lock"]
    assert loaded.reused == tuple(layer.digest for layer in kept)


def test_containerd_gets_all_that_we_did_not_send(store: Store) -> None:
    """In containerd's store a layer is left out only on our own word: an equal layer of another's image is sent."""
    engine = FakeEngine(containerd=True)
    image = build(store)
    engine.known["sha256:" + "0" * 64] = own_digests(image)
    give(image, engine, store)
    assert sent(engine, image) == [layer.name for layer in image.layers]


def test_containerd_forgets_removed_images(store: Store) -> None:
    """What we sent counts only while the image that it came with is there."""
    engine = FakeEngine(containerd=True)
    give(build(store), engine, store)
    engine.known.clear()
    image = build(store, source=b"x = 2\n")
    give(image, engine, store)
    assert sent(engine, image) == [layer.name for layer in image.layers]


def test_containerd_that_lost_a_blob(store: Store) -> None:
    """containerd takes an incomplete archive silently: it shows when a container is made, and all is sent."""
    engine = FakeEngine(containerd=True)
    give(build(store), engine, store)
    engine.blobs.clear()
    image = build(store, source=b"x = 2\n")
    loaded = give(image, engine, store)
    assert loaded.reused == ()
    assert len(engine.archives) == 3


def test_classic_store_that_lost_a_layer(store: Store) -> None:
    """The classic store refuses an archive that lacks a layer: all is sent."""
    engine = FakeEngine(containerd=False)
    give(build(store), engine, store)
    engine.blobs.clear()
    image = build(store, source=b"x = 2\n")
    loaded = give(image, engine, store)
    assert loaded.reused == ()
    assert sent(engine, image) == [layer.name for layer in image.layers]


def test_no_space(store: Store) -> None:
    """A full engine is exit 5 and says so."""
    engine = FakeEngine(containerd=False)
    engine.refusal = "write /layer.tar: no space left on device"
    with pytest.raises(ImageError) as caught:
        give(build(store), engine, store)
    assert caught.value.message == "the engine could not load the image: its disk is full"
    assert caught.value.exit_code == 5


def test_archive_through_a_pipe_is_the_archive(store: Store) -> None:
    """Chunks are the archive with the omitted layers left out; a layer that is gone is an error."""
    image = build(store)
    omitted = frozenset({image.layers[0].digest})
    with tarfile.open(fileobj=io.BytesIO(b"".join(archive_chunks(image, omitted)))) as archive:
        names = archive.getnames()
    assert f"blobs/sha256/{image.layers[0].digest[7:]}" not in names
    assert f"blobs/sha256/{image.layers[1].digest[7:]}" in names
    image.layers[1].path.unlink()
    with pytest.raises(ImageError, match="a layer cannot be read"):
        list(archive_chunks(image, frozenset()))


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # the SDK leaves the socket that failed
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_no_engine(tmp_path: Path) -> None:
    """Without an engine the error names the address and the way without one."""
    address = f"unix://{tmp_path}/none.sock"
    with pytest.raises(ImageError) as caught:
        connect({"DOCKER_HOST": address})
    assert caught.value.message == f"no container engine answers at {address}"
    assert "--engine local" in str(caught.value.hint)
    del caught
    gc.collect()


@pytest.fixture
def name() -> str:
    return f"test-{uuid.uuid4().hex[:8]}"


@pytest.mark.docker
def test_real_engine(store: Store, client: DockerClient, name: str) -> None:
    """A real engine has the image under our digest, takes a changed kernel as two layers, and gives content.json."""
    first = build(store, name=name)
    second = build(store, name=name, source=b"x = 2\n")
    try:
        loaded = load(first, client, store=store, progress=Silent())
        assert loaded.engine_id in {first.config_digest, first.manifest_digest}
        assert client.images.get(first.tag).id == loaded.engine_id
        again = load(first, client, store=store, progress=Silent())
        assert again.sent_bytes == 0
        changed = load(second, client, store=store, progress=Silent())
        assert changed.reused == own_digests(second)[:-2]
        assert verify_image(client, changed.engine_id, expected=second.content_sha256) == second.content_sha256
        with pytest.raises(VerificationError, match=r"the lock's image says 0{64}"):
            verify_image(client, changed.engine_id, expected="0" * 64)
    finally:
        remove_images(client, first.tag, second.tag)


@pytest.mark.docker
def test_unknown_image(client: DockerClient) -> None:
    """An image that the engine lacks is named, exit 5."""
    with pytest.raises(ImageError, match="the engine has no image kitbuild/none:0"):
        verify_image(client, "kitbuild/none:0")
