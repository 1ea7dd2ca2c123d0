"""To a registry and back: the same digests for everyone, and what the image says of itself."""

from __future__ import annotations

import io
import json
import sys
import tarfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kitbuild.base.reference import Reference
from kitbuild.base.registry import Registry, push
from kitbuild.errors import ImageError, VerificationError
from kitbuild.flow import inspecting
from kitbuild.flow.context import Context
from kitbuild.image import HostCompiler, Image, assemble, load, write_oci
from kitbuild.image.documents import DOCUMENTS, from_engine, from_registry
from kitbuild.progress import Silent
from tests.image.kit import RECIPE, make_lock, new_store, remove_images

if TYPE_CHECKING:
    from docker import DockerClient

    from kitbuild.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return new_store(tmp_path / "store")


@pytest.fixture
def name() -> str:
    return f"test-{uuid.uuid4().hex[:8]}"


def build(store: Store, name: str) -> Image:
    compiler = HostCompiler(Path(sys.executable))
    return assemble(make_lock(store, name=name), recipe=RECIPE, store=store, compiler=compiler, progress=Silent())


def give(image: Image, reference: str) -> str:
    layers = [(layer.digest, layer.path) for layer in image.layers]
    return push(reference, image.manifest, image.config, layers, environ={}, progress=Silent())


def test_everyone_pushes_the_same_digest(store: Store, registry: str, name: str, tmp_path: Path) -> None:
    """Two machines push one lock's image: the registry has one manifest, the one that was computed."""
    image, again = build(store, name), build(new_store(tmp_path / "other"), name)
    pushed = {give(image, f"{registry}/{name}:one"), give(again, f"{registry}/{name}:two")}
    assert pushed == {f"{registry}/{name}@{image.manifest_digest}"}
    for tag in ("one", "two"):
        assert Registry(Reference.parse(f"{registry}/{name}:{tag}"), environ={}).head() == image.manifest_digest


@pytest.mark.docker
def test_who_pulls_has_the_same_image(store: Store, registry: str, name: str, client: DockerClient) -> None:
    """An engine that pulls by the digest has the image under the id that a machine which builds it gives it."""
    image = build(store, name)
    reference = give(image, f"{registry}/{name}:one")
    pulled = client.images.pull(reference)
    try:
        assert pulled.id in {image.config_digest, image.manifest_digest}
        told = from_engine(client, reference)
        assert told is not None
        assert told.documents["recipe"] == RECIPE
        loaded = load(image, client, store=store, progress=Silent())
        assert (loaded.engine_id, loaded.sent_bytes) == (pulled.id, 0)
    finally:
        remove_images(client, str(pulled.id))


@pytest.mark.docker
def test_an_archive_is_what_the_engine_has(store: Store, name: str, client: DockerClient, tmp_path: Path) -> None:
    """`docker load` of an OCI archive gives the same image; its index names the manifest by digest and tag."""
    image = build(store, name)
    path = tmp_path / "image.tar"
    write_oci(image, path)
    with tarfile.open(path) as archive:
        (entry,) = json.load(archive.extractfile("index.json"))["manifests"]  # type: ignore[arg-type]
        held = archive.extractfile(f"blobs/sha256/{image.manifest_digest[7:]}")
        assert held is not None
        assert held.read() == image.manifest
    assert entry["digest"] == image.manifest_digest
    assert entry["annotations"]["io.containerd.image.name"] == f"docker.io/{image.tag}"
    with path.open("rb") as stream:
        (taken,) = client.images.load(stream)
    try:
        assert taken.id in {image.config_digest, image.manifest_digest}
        assert taken.tags == [image.tag]
    finally:
        remove_images(client, image.tag)


def test_a_registry_tells_without_the_layers_below(store: Store, registry: str, name: str) -> None:
    """Only the topmost layer is fetched; all documents are there."""
    image = build(store, name)
    give(image, f"{registry}/{name}:one")
    told = from_registry(f"{registry}/{name}:one", store=store, environ={}, progress=Silent())
    assert (told.config_digest, told.manifest_digest) == (image.config_digest, image.manifest_digest)
    assert told.documents.keys() == DOCUMENTS.keys()
    with pytest.raises(ImageError, match=f"^{registry}/none:1 is neither in the engine nor in the registry {registry}"):
        from_registry(f"{registry}/none:1", store=store, environ={}, progress=Silent())


@pytest.mark.docker
def test_inspect_looks_in_file_engine_and_registry(
    store: Store, registry: str, name: str, client: DockerClient, tmp_path: Path
) -> None:
    """The same documents from each place; a document is printed as it is in the image."""
    image = build(store, name)
    write_oci(image, tmp_path / "image.tar")
    give(image, f"{registry}/{name}:one")
    load(image, client, store=store, progress=Silent())
    context = Context(environ={}, store=store, progress=Silent(), _client=[client])
    places = {"archive": str(tmp_path / "image.tar"), "engine": image.tag, "registry": f"{registry}/{name}:one"}
    try:
        told = {place: inspecting.inspect(context, reference, show=None) for place, reference in places.items()}
        shown = inspecting.inspect(context, image.tag, show="sbom")
        with pytest.raises(ImageError, match="is neither in the engine nor in the registry") as absent:
            inspecting.inspect(context, f"{registry}/{name}:none", show=None)
    finally:
        remove_images(client, image.tag)
    for place, result in told.items():
        assert result.fields["place"] == place
        assert result.fields["image_id"] == image.config_digest
        assert result.fields["lock_sha256"] == image.lock_sha256
        for key in ("lock", "recipe", "sbom", "provenance", "layers"):
            assert result.fields[key] == told["archive"].fields[key]
        assert "  kernel     org/tiny @ " + "c" * 40 + " (torch-universal)" in result.lines
    assert json.loads(shown.text()) == told["archive"].fields["sbom"]
    assert absent.value.hint == "`docker images 'kitbuild/*'` lists what the engine has"


@pytest.mark.docker
def test_inspect_of_a_tampered_image(store: Store, name: str, client: DockerClient) -> None:
    """An image in which somebody changed a document is exit 7, also where it looks like ours."""
    image = build(store, name)
    load(image, client, store=store, progress=Silent())
    container = client.containers.create(image.tag, ["info"])
    try:
        changed = make_tar("kit/recipe.yaml", b"name: another\n")
        assert container.put_archive("/", changed)
        container.commit(f"kitbuild/{name}", "changed")
        with pytest.raises(VerificationError, match=r"/kit/recipe\.yaml has sha256 "):
            from_engine(client, f"kitbuild/{name}:changed")
    finally:
        container.remove(force=True)
        remove_images(client, f"kitbuild/{name}:changed", image.tag)


def make_tar(name: str, content: bytes) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()
