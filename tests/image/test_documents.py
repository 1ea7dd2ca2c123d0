"""What an image says of itself: bill of materials, provenance, annotations, and that all of it is checked."""

from __future__ import annotations

import hashlib
import json
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from google.protobuf import json_format
from in_toto_attestation.predicates.provenance.v1.provenance_pb2 import Provenance
from in_toto_attestation.v1.statement import Statement
from in_toto_attestation.v1.statement_pb2 import Statement as StatementMessage
from packageurl import PackageURL

from kitbuild.base.models import SystemPackage
from kitbuild.errors import ImageError, UsageError, VerificationError
from kitbuild.image import HostCompiler, Image, assemble, write_oci
from kitbuild.image.documents import DOCUMENTS, from_archive
from kitbuild.image.sbom import package_url, sbom
from kitbuild.lock.models import LockedTree
from kitbuild.progress import Silent
from tests.image.kit import COMMIT, RECIPE, locked_file, make_base, make_lock, new_store

if TYPE_CHECKING:
    from kitbuild.lock.models import Lock
    from kitbuild.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return new_store(tmp_path / "store")


def build(lock: Lock, store: Store) -> Image:
    compiler = HostCompiler(Path(sys.executable))
    return assemble(lock, recipe=RECIPE, store=store, compiler=compiler, progress=Silent())


def debian(store: Store) -> Any:
    """A base with packages whose versions have every sign that Debian's have."""
    packages = (
        SystemPackage(name="g++-12", version="12.2.0-14+deb12u1", architecture="amd64", sha256="a" * 64),
        SystemPackage(name="libc6", version="1:2.36-9~bpo+1", architecture="amd64"),
    )
    return make_base(store).model_copy(update={"packages": packages})


def parsed(told: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(told)
    return found


def archived(image: Image, folder: Path) -> Path:
    path = folder / "image.tar"
    write_oci(image, path)
    return path


def test_sbom_is_cyclonedx(store: Store) -> None:
    """It holds against CycloneDX's own strict schema; each reference is unique, each purl in its canonical form."""
    weights = LockedTree(repo="org/model", revision="main", commit=COMMIT, files=(locked_file(store, "a", b"a"),))
    lock = make_lock(store, base=debian(store), bake=("model", "dataset"))
    lock = lock.model_copy(update={"model": lock.model.model_copy(update={"weights": weights})})
    data = sbom(lock).decode()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(data) is None
    components = parsed(data.encode())["components"]
    references = [component["bom-ref"] for component in components]
    assert sorted(set(references)) == references
    for component in components:
        if "purl" in component:
            assert PackageURL.from_string(component["purl"]).to_string() == component["purl"]
    (root,) = parsed(data.encode())["dependencies"]
    assert root == {"ref": "image", "dependsOn": references}


def test_sbom_lists_what_is_in_the_image(store: Store) -> None:
    """System packages, wheels with their digests, kernels by commit; model and data only where they are baked in."""
    lock = make_lock(store, base=debian(store))
    components = {component["bom-ref"]: component for component in parsed(sbom(lock))["components"]}
    assert set(components) == {
        f"base:{lock.base.manifest_digest}",
        "guest",
        "pkg:deb/debian/g%2B%2B-12@12.2.0-14%2Bdeb12u1?arch=amd64",
        "pkg:deb/debian/libc6@1:2.36-9~bpo%2B1?arch=amd64",
        f"pkg:huggingface/org/tiny@{COMMIT}",
        "pkg:pypi/tool@1.0",
        "pkg:pypi/torch@1.0",
    }
    for wheel in lock.wheels:
        found = components[f"pkg:pypi/{wheel.name}@{wheel.version}"]
        assert found["hashes"] == [{"alg": "SHA-256", "content": wheel.sha256}]
    baked = parsed(sbom(make_lock(store, bake=("model", "dataset"))))["components"]
    kinds = {component["type"]: component["name"] for component in baked}
    assert (kinds["machine-learning-model"], kinds["data"]) == ("model", "data.jsonl")


def test_ubuntu_is_told_from_debian(store: Store) -> None:
    """A base of NVIDIA's is Ubuntu: its packages are another distribution's."""
    base = make_base(store)
    packages = (SystemPackage(name="base-files", version="13ubuntu10.2", architecture="amd64"),)
    lock = make_lock(store, base=base.model_copy(update={"packages": packages}))
    urls = [component.get("purl", "") for component in parsed(sbom(lock))["components"]]
    assert "pkg:deb/ubuntu/base-files@13ubuntu10.2?arch=amd64" in urls


def test_provenance_is_slsa(store: Store, tmp_path: Path) -> None:
    """It is an in-toto statement with SLSA's predicate, field by field, about the layers below the one it is in."""
    lock = make_lock(store)
    image = build(lock, store)
    data = from_archive(archived(image, tmp_path)).documents["provenance"]
    message = json_format.Parse(data, StatementMessage())
    Statement.copy_from_pb(message).validate()
    predicate = json_format.ParseDict(parsed(data)["predicate"], Provenance())
    subjects = {subject.name: subject.digest["sha256"] for subject in message.subject}
    assert {layer.name: layer.digest[7:] for layer in image.layers[1:-1]} == subjects
    materials = {item.name: dict(item.digest) for item in predicate.build_definition.resolved_dependencies}
    assert materials["tiny"] == {"sha256": lock.base.manifest_digest[7:]}
    assert materials["org/tiny"] == {"gitCommit": COMMIT}
    assert {wheel.file: {"sha256": wheel.sha256} for wheel in lock.wheels}.items() <= materials.items()
    parameters = json_format.MessageToDict(predicate.build_definition.external_parameters)
    assert parameters["lock"]["sha256"] == lock.sha256
    assert parameters["recipe"]["sha256"] == hashlib.sha256(RECIPE).hexdigest()


def test_annotations(store: Store) -> None:
    """The manifest and the labels say what the image is in OCI's words; what these say of the base is not inherited."""
    lock = make_lock(store)
    image = build(lock, store)
    told = json.loads(image.manifest)["annotations"]
    prefix = "org.opencontainers.image."
    assert told == {
        f"{prefix}base.digest": lock.base.manifest_digest,
        f"{prefix}base.name": "tiny",
        f"{prefix}created": "1970-01-01T00:00:00Z",
        f"{prefix}description": "Training image of the recipe tiny, made by kitbuild from its lock",
        f"{prefix}title": "tiny",
        f"{prefix}version": lock.sha256[:12],
    }
    labels = json.loads(image.config)["config"]["Labels"]
    assert {key: value for key, value in labels.items() if key.startswith(prefix)} == told


def test_an_archive_tells_what_it_holds(store: Store, tmp_path: Path) -> None:
    """Lock, recipe and the rest come out of an OCI archive as they went in, with both digests of the image."""
    lock = make_lock(store)
    image = build(lock, store)
    told = from_archive(archived(image, tmp_path))
    assert (told.config_digest, told.manifest_digest) == (image.config_digest, image.manifest_digest)
    names = ["tiny", *(layer.name for layer in image.layers[1:])]
    assert told.layers == tuple(zip(names, (layer.digest for layer in image.layers), strict=True))
    assert told.documents["lock"] == lock.to_bytes()
    assert told.documents["recipe"] == RECIPE
    assert told.documents["sbom"] == sbom(lock)
    assert hashlib.sha256(told.documents["content"]).hexdigest() == image.content_sha256


@pytest.mark.parametrize("name", sorted(DOCUMENTS))
def test_a_document_that_was_exchanged(store: Store, tmp_path: Path, name: str) -> None:
    """A document that is not what the image's labels say is exit 7, by name."""
    path = archived(build(make_lock(store), store), tmp_path)
    data = path.read_bytes()
    member = DOCUMENTS[name][1:].encode() + b"\0"
    assert data.count(member) == 1
    place = data.index(member) + 515  # behind the header of 512 bytes
    path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    with pytest.raises(VerificationError, match=DOCUMENTS[name]):
        from_archive(path)


def test_an_image_of_somebody_else(store: Store, tmp_path: Path) -> None:
    """An image that kitbuild did not make is said to be none; a file that is no image, too."""
    image = build(make_lock(store), store)
    config = json.loads(image.config)
    config["config"]["Labels"] = {}
    data = json.dumps(config).encode()
    other = Image(config=data, manifest=image.manifest, layers=image.layers, tag="other:1")
    with pytest.raises(UsageError, match=r"is no image of kitbuild: it has no label org\.kitbuild\.content$"):
        from_archive(archived(other, tmp_path))
    with pytest.raises(ImageError, match="its configuration is not that of an image"):
        from_archive(archived(Image(config=b"[" * 100_000, manifest=b"{}", layers=image.layers, tag="o:1"), tmp_path))
    (tmp_path / "x").write_bytes(b"no tar")
    with pytest.raises(ImageError, match="is not an image archive"):
        from_archive(tmp_path / "x")
    with tarfile.open(tmp_path / "empty.tar", "w"):
        pass
    with pytest.raises(ImageError, match="is not an image archive"):
        from_archive(tmp_path / "empty.tar")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("pypi", "torch", "2.13.0+cpu"), "pkg:pypi/torch@2.13.0%2Bcpu"),
        (("huggingface", "org/name", COMMIT), f"pkg:huggingface/org/name@{COMMIT}"),
    ],
)
def test_package_urls(arguments: tuple[str, str, str], expected: str) -> None:
    """A purl names version and owner, with what is not allowed in one escaped."""
    assert package_url(*arguments) == expected
    assert PackageURL.from_string(expected).to_string() == expected
