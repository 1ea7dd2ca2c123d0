"""archive → compare, `--tolerance`: what the user wrote, as what a comparison holds two runs to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kitbuild import archive as archives
from kitbuild import compare as comparing
from kitbuild.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

REPEATS = "repeats"


def refuse_early(text: str | None) -> None:
    """A tolerance that cannot be read is told before anything is unpacked or hashed."""
    if text is not None and text.partition(":")[0] != REPEATS:
        comparing.Tolerance.parse(text)


def allowance(
    text: str | None, original: archives.Archive, *, other: archives.Archive | None = None
) -> comparing.Allowance | None:
    """`loss=1e-3` and the like, `repeats` that the archive keeps, or `repeats:RUN,RUN` (a pattern names several).

    The archive itself and the run that is judged are no repeats, whatever a pattern says.
    """
    if text is None:
        return None
    word, colon, listed = text.partition(":")
    if word != REPEATS:
        return comparing.Tolerance.parse(text)
    if not colon:
        found = archives.kept_repeats(original)
        if not found:
            raise UsageError(
                f"{original.path} keeps no repeats",
                hint="`kitbuild archive repeats ARCHIVE RUN RUN…` adds them, or name them: repeats:RUN,RUN",
            )
        return comparing.Bands.of(original, found)
    return comparing.Bands.of(original, [*read_repeats(listed.split(","), original, other)])


def read_repeats(
    paths: Iterable[str], original: archives.Archive, other: archives.Archive | None = None
) -> Iterable[archives.Archive]:
    """Each run that a path or pattern names, once, in the order of their names."""
    places = {place.resolve() for text in paths if text.strip() for place in _places(text.strip())}
    left_out = {run.path.resolve() for run in (original, other) if run is not None}
    digests = {run.sha256 for run in (original, other) if run is not None} - {None}
    for place in sorted(places - left_out):
        run = archives.read(place, weights=True)
        if run.sha256 not in digests:
            digests |= {run.sha256} - {None}
            yield run


def _places(text: str) -> list[Path]:
    path = Path(text)
    if not any(sign in text for sign in "*?["):
        return [path]
    root = Path(path.anchor) if path.is_absolute() else Path()
    found = [*root.glob(str(path.relative_to(root) if path.is_absolute() else path))]
    if not found:
        raise UsageError(
            f"--tolerance {REPEATS}: nothing is named {text}", hint="name run directories or packed archives"
        )
    return found
