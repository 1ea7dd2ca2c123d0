"""Image references: what is one, and how each system writes it."""

from __future__ import annotations

import pytest

from kitbuild.errors import UsageError
from kitbuild.render import ImageReference

DIGEST = f"sha256:{'ab' * 32}"


@pytest.mark.parametrize(
    ("text", "engine", "enroot"),
    [
        ("registry.example/a/b:v1", f"registry.example/a/b@{DIGEST}", f"registry.example#a/b:{DIGEST}"),
        ("localhost:5000/b", f"localhost:5000/b@{DIGEST}", f"localhost:5000#b:{DIGEST}"),
        ("localhost/b", f"localhost/b@{DIGEST}", f"localhost#b:{DIGEST}"),
        ("org/b:v1", f"org/b@{DIGEST}", f"org/b:{DIGEST}"),
        ("b", f"b@{DIGEST}", f"b:{DIGEST}"),
    ],
)
def test_named_by_digest(text: str, engine: str, enroot: str) -> None:
    """A digest replaces the tag; enroot parts the host by `#` and has the digest in the place of a tag."""
    named = ImageReference.parse(text).at(DIGEST)
    assert (engine, enroot) == (str(named), named.enroot)
    assert named.digest == ImageReference.parse(str(named)).digest


def test_local_image_is_its_id() -> None:
    """What only the engine has is called by the engine's own id; the archive is told both digests."""
    other = f"sha256:{'cd' * 32}"
    local = ImageReference.local(DIGEST, config_digest=DIGEST, manifest_digest=other)
    assert str(local) == DIGEST
    assert local.identity == {"config_digest": DIGEST, "manifest_digest": other}
    assert ImageReference.parse(f"a@{DIGEST}").identity == {"manifest_digest": DIGEST}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "A/b",
        "a b",
        "a@sha256:12",
        "a:b:c",
        "https://registry.example/a",
        "user@registry.example/a",
        "a\n",
        'a"; rm -rf /',
        "$(id)",
        "-a",
        "a/../b",
    ],
)
def test_what_is_none_is_refused(text: str) -> None:
    """Exit 2, with how one is written."""
    with pytest.raises(UsageError, match="is not an image reference") as raised:
        ImageReference.parse(text)
    assert "--image" in raised.value.message
