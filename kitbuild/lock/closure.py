"""Step 2: every file that a lock needs, by digest, with a name for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kitbuild.lock.fetch import trees

if TYPE_CHECKING:
    from kitbuild.lock.models import Lock


def closure(lock: Lock) -> dict[str, str]:
    """sha256 of every blob that the lock needs, to what it is."""
    found = {wheel.sha256: wheel.file for wheel in lock.wheels}
    for key, _, tree in trees(lock):
        found |= {file.sha256: f"{key}: {file.path}" for file in tree.files}
    for kernel in lock.kernels:
        found |= {file.sha256: f"{kernel.repo}: {file.path}" for file in kernel.files}
    if lock.model.chat_template is not None:
        found[lock.model.chat_template.sha256] = f"model.chat_template: {lock.model.chat_template.path}"
    base = dict.fromkeys(lock.base.diff_ids, f"a layer of {lock.base.name}")
    base[lock.base.config_digest] = f"the configuration of {lock.base.name}"
    return found | {digest.removeprefix("sha256:"): name for digest, name in base.items()}
