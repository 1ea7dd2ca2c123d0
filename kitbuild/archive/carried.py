"""Step 5: which blobs of the store one packed file must carry. Reads the store; writes nothing.

`local`: what the lock names and nobody else can give: inputs from disk, wheels built here, a base that no registry
is known to have. `all`: every blob that the lock names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from kitbuild.errors import Problem, ResolveError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kitbuild.base.models import LockedBase
    from kitbuild.lock.models import Lock, LockedTree
    from kitbuild.store.blobs import Store

Include = Literal["local", "all"]
DEFAULT_BASE = "kitbuild/base-"


def carried(lock: Lock, *, include: Include, store: Store) -> dict[str, str]:
    """Digest to what it is; every blob that is missing from the store is named in one error, exit 4."""
    blobs = dict(_input_blobs(lock, everything=include == "all"))
    if include == "all" or nobody_else_has(lock.base):
        digests = (lock.base.config_digest, *lock.base.diff_ids)
        blobs |= {digest.removeprefix("sha256:"): f"base {lock.base.name}" for digest in digests}
    missing = {name: sha256 for sha256, name in reversed(blobs.items()) if not store.has(sha256)}
    problems = [Problem(message=f"{name} is not in the store", key=missing[name]) for name in reversed(missing)]
    if problems:
        raise ResolveError(
            f"cannot pack: {problems[0].message}" + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""),
            problems=problems,
            hint="pack where the run was made, or fill the store with `kitbuild fetch`",
        )
    return blobs


def nobody_else_has(base: LockedBase) -> bool:
    """Whether no registry is known to have it: bootstrapped, or a default base, whose build cannot be repeated."""
    return base.upstream is None or base.upstream.digest is None or base.name.startswith(DEFAULT_BASE)


def _input_blobs(lock: Lock, *, everything: bool) -> Iterator[tuple[str, str]]:
    for name, tree in _trees(lock):
        if everything or tree.path is not None:
            yield from ((file.sha256, f"{name} {file.path}") for file in tree.files)
    template = lock.model.chat_template
    if template is not None:
        yield template.sha256, f"chat template {template.path}"
    for wheel in lock.wheels:
        if everything or wheel.built is not None:
            yield wheel.sha256, f"wheel {wheel.file}"
    for kernel in lock.kernels if everything else ():
        yield from ((file.sha256, f"kernel {kernel.repo} {file.path}") for file in kernel.files)


def _trees(lock: Lock) -> Iterator[tuple[str, LockedTree]]:
    if lock.model.weights is not None:
        yield "model", lock.model.weights
    if lock.model.tokenizer is not None:
        yield "tokenizer", lock.model.tokenizer
    for number, dataset in enumerate(lock.datasets):
        yield f"dataset {number}", dataset.tree
    if lock.evaluate is not None:
        yield "evaluate", lock.evaluate.tree
