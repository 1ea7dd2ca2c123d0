"""What a registry's manifest says, believed only so far: its digests become addresses and file names here."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kitbuild.base.reference import Reference
    from kitbuild.errors import KitbuildError

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def digest_in(entry: Mapping[str, Any]) -> str:
    """The digest of an entry; ValueError for anything else, such as a path."""
    digest: str = entry["digest"]
    if not _DIGEST.fullmatch(digest):
        raise ValueError(digest)
    return digest


def is_for(entry: Mapping[str, Any], architecture: str) -> bool:
    """Whether an index's entry is the image for linux on this architecture."""
    platform = entry.get("platform", {})
    return bool(platform.get("os") == "linux" and platform.get("architecture") == architecture)


@contextlib.contextmanager
def manifest_errors(reference: Reference, failure: type[KitbuildError]) -> Iterator[None]:
    """Raise `failure` for a manifest that is not that of an image."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        what = f"{reference}: the registry's manifest is not that of an image"
        raise failure(what, hint="push the image again") from error
