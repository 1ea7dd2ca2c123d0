"""Step 3: how the image came to be, as an in-toto statement with SLSA's predicate. A pure function of the lock.

It lies in the image, so it cannot name the image's own digest: its subjects are the layers below the one it is in.
No time and no host is in it: who built an image does not change the image.
https://slsa.dev/spec/v1.0/provenance
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kitbuild.base.oci import canonical
from kitbuild.image.sbom import package_url

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kitbuild.image.models import Layer
    from kitbuild.lock.models import Lock, LockedTree

PROVENANCE = "/kit/provenance.json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:kitbuild:image:1"


def provenance(lock: Lock, layers: Sequence[Layer]) -> bytes:
    """The statement about `layers`, those of kitbuild's own that are finished."""
    definition = {
        "buildType": BUILD_TYPE,
        "externalParameters": {
            "lock": {"name": lock.name, "sha256": lock.sha256, "content_sha256": lock.content_sha256},
            "recipe": {"sha256": lock.recipe_sha256},
        },
        "internalParameters": {"guest_sha256": lock.kitbuild.guest_sha256, "layout": lock.kitbuild.layout},
        "resolvedDependencies": list(_materials(lock)),
    }
    details = {
        "builder": {
            "id": package_url("pypi", "kitbuild", lock.kitbuild.version),
            "version": {"kitbuild": lock.kitbuild.version},
        }
    }
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": layer.name, "digest": _sha256(layer.digest)} for layer in layers],
        "predicateType": PREDICATE_TYPE,
        "predicate": {"buildDefinition": definition, "runDetails": details},
    }
    return canonical(statement) + b"\n"


def _materials(lock: Lock) -> Iterator[dict[str, Any]]:
    """What went in, each by digest: also what a run mounts and the image does not hold."""
    yield {"name": lock.base.name, "digest": _sha256(lock.base.manifest_digest)}
    for wheel in lock.wheels:
        url = package_url("pypi", wheel.name, wheel.version)
        yield {"name": wheel.file, "uri": url, "digest": _sha256(wheel.sha256)}
    for repo, commit in sorted({(kernel.repo, kernel.commit) for kernel in lock.kernels}):
        yield _commit(repo, commit)
    trees = [lock.model.weights, lock.model.tokenizer, *(data.tree for data in lock.datasets)]
    trees += [lock.evaluate.tree] if lock.evaluate else []
    for tree in trees:
        yield from _tree(tree)
    if lock.model.chat_template is not None:
        yield {"name": lock.model.chat_template.path, "digest": _sha256(lock.model.chat_template.sha256)}


def _tree(tree: LockedTree | None) -> Iterator[dict[str, Any]]:
    if tree is None:
        return
    if tree.repo is not None and tree.commit is not None:
        yield _commit(tree.repo, tree.commit)
    else:
        yield from ({"name": f"{tree.path}: {file.path}", "digest": _sha256(file.sha256)} for file in tree.files)


def _commit(repo: str, commit: str) -> dict[str, Any]:
    return {"name": repo, "uri": package_url("huggingface", repo, commit), "digest": {"gitCommit": commit}}


def _sha256(digest: str) -> dict[str, str]:
    return {"sha256": digest.removeprefix("sha256:")}
