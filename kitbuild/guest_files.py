"""Which of kitbuild's own files go into an image, the digest that a lock keeps of them, and whose uid they run under.

Beside the steps, standard library only: `lock` writes the digest, `image` copies the files.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

GUEST_UID = 10001
"""Who the guest is in a container where nobody says otherwise, and where root starts it."""
_PACKAGE = Path(__file__).parent


@cache
def guest_files() -> tuple[tuple[str, bytes], ...]:
    """`(path below site-packages, content)` of each, sorted; read once, so that digest and copies agree."""
    found = {f"kitbuild/{name}": _PACKAGE / name for name in ("__init__.py", "errors.py")}
    for path in (_PACKAGE / "guest").rglob("*"):
        relative = path.relative_to(_PACKAGE)
        if path.is_file() and "__pycache__" not in relative.parts and path.suffix != ".pyc":
            found[f"kitbuild/{relative.as_posix()}"] = path
    return tuple((name, path.read_bytes()) for name, path in sorted(found.items()))


@cache
def guest_sha256() -> str:
    """Digest of every path and content: another guest is another kitbuild."""
    digest = hashlib.sha256()
    for name, content in guest_files():
        digest.update(f"{hashlib.sha256(content).hexdigest()}  {name}\n".encode())
    return digest.hexdigest()
