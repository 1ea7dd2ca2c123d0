"""Step 3: what is in the image, as a CycloneDX document. A pure function of the lock: it is in the image too.

Written here and not by cyclonedx-python-lib: another version of it must not change an image. Tests hold the result
against CycloneDX's own schema. https://cyclonedx.org/docs/1.6/json/
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from kitbuild.base.oci import canonical

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kitbuild.lock.models import Lock, LockedKernel, LockedTree, LockedWheel, SystemPackage

SBOM = "/kit/sbom.cdx.json"
_ROOT = "image"


def sbom(lock: Lock) -> bytes:
    """The base and its packages, wheels, guest, kernels, and the model and data that are baked in."""
    components = sorted(_components(lock), key=lambda component: str(component["bom-ref"]))
    depends = [str(component["bom-ref"]) for component in components]
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, lock.sha256)}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "container",
                "bom-ref": _ROOT,
                "name": f"kitbuild/{lock.name}",
                "version": lock.sha256[:12],
            },
            "lifecycles": [{"phase": "build"}],
            "tools": {
                "components": [{"type": "application", "name": "kitbuild", "version": lock.kitbuild.version}],
            },
        },
        "components": components,
        "dependencies": [{"ref": _ROOT, "dependsOn": depends}],
    }
    return canonical(document) + b"\n"


def package_url(kind: str, name: str, version: str, **qualifiers: str) -> str:
    """A purl.

    https://github.com/package-url/purl-spec/blob/main/PURL-SPECIFICATION.rst
    """
    asked = "&".join(f"{key}={quote(value, safe=':')}" for key, value in sorted(qualifiers.items()))
    path = "/".join(quote(part, safe="") for part in name.split("/"))
    return f"pkg:{kind}/{path}@{quote(version, safe=':')}" + (f"?{asked}" if asked else "")


def _components(lock: Lock) -> Iterator[dict[str, Any]]:
    yield _component(
        "operating-system",
        f"base:{lock.base.manifest_digest}",
        lock.base.name,
        lock.base.manifest_digest,
        properties=_base_facts(lock),
    )
    distribution = "ubuntu" if any("ubuntu" in package.version for package in lock.base.packages) else "debian"
    yield from (_system(package, distribution) for package in lock.base.packages)
    yield from (_wheel(wheel) for wheel in lock.wheels)
    yield _component(
        "application",
        "guest",
        "kitbuild",
        lock.kitbuild.version,
        properties={"guest.sha256": lock.kitbuild.guest_sha256},
    )
    yield from {f"{kernel.repo}@{kernel.commit}": _kernel(kernel) for kernel in lock.kernels}.values()
    yield from _baked(lock)


def _base_facts(lock: Lock) -> dict[str, str]:
    facts = {"glibc": lock.base.glibc, "python": lock.base.python, "cuda": lock.base.cuda or "none"}
    upstream = lock.base.upstream
    return facts | ({"upstream": f"{upstream.name}@{upstream.digest}"} if upstream and upstream.digest else {})


def _system(package: SystemPackage, distribution: str) -> dict[str, Any]:
    url = package_url("deb", f"{distribution}/{package.name}", package.version, arch=package.architecture)
    return _component("library", url, package.name, package.version, url=url, sha256=package.sha256)


def _wheel(wheel: LockedWheel) -> dict[str, Any]:
    url = package_url("pypi", wheel.name, wheel.version)
    properties = {"file": wheel.file} | ({"sdist.sha256": wheel.built.sdist_sha256} if wheel.built else {})
    return _component("library", url, wheel.name, wheel.version, url=url, sha256=wheel.sha256, properties=properties)


def _kernel(kernel: LockedKernel) -> dict[str, Any]:
    url = package_url("huggingface", kernel.repo, kernel.commit)
    properties = {
        "metadata.sha256": kernel.metadata_sha256,
        "publisher.trusted": str(kernel.trusted).lower(),
        "signature": kernel.signature,
        "variant": kernel.variant,
    }
    return _component("library", url, kernel.repo, kernel.commit, url=url, properties=properties)


def _baked(lock: Lock) -> Iterator[dict[str, Any]]:
    """Model and data, where they are in the image; where they are mounted, they are inputs of a run."""
    baked = lock.recipe["image"]["bake"]
    if "model" in baked:
        for role, tree in (("model", lock.model.weights), ("tokenizer", lock.model.tokenizer)):
            yield from _tree("machine-learning-model", role, tree)
    if "dataset" in baked:
        for index, data in enumerate(lock.datasets):
            yield from _tree("data", f"dataset.{index}", data.tree)
        yield from _tree("data", "evaluate", lock.evaluate.tree if lock.evaluate else None)


def _tree(kind: str, role: str, tree: LockedTree | None) -> Iterator[dict[str, Any]]:
    if tree is None:
        return
    files = {f"file:{file.path}": file.sha256 for file in tree.files}
    if tree.repo is not None and tree.commit is not None:
        url = package_url("huggingface", tree.repo, tree.commit)
        yield _component(kind, f"{role}:{url}", tree.repo, tree.commit, url=url, properties=files)
    else:
        yield _component(kind, role, str(tree.path), None, properties=files)


def _component(
    kind: str,
    reference: str,
    name: str,
    version: str | None,
    *,
    url: str | None = None,
    sha256: str | None = None,
    properties: dict[str, str] | None = None,
) -> dict[str, Any]:
    found: dict[str, Any] = {"type": kind, "bom-ref": reference, "name": name}
    found |= {"version": version} if version else {}
    found |= {"purl": url} if url else {}
    found |= {"hashes": [{"alg": "SHA-256", "content": sha256}]} if sha256 else {}
    listed = [{"name": f"kitbuild:{key}", "value": value} for key, value in sorted((properties or {}).items())]
    return found | ({"properties": listed} if listed else {})
