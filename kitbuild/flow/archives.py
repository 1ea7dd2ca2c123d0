"""archive → compare, and the upkeep of archives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kitbuild import archive as archives
from kitbuild import compare as comparing
from kitbuild.errors import UsageError, VerificationError
from kitbuild.flow.context import Context, Result
from kitbuild.flow.running import summary_lines
from kitbuild.flow.tolerances import allowance, read_repeats, refuse_early

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

INCLUDES = ("local", "all")
LIST_HEAD = ("run", "started (UTC)", "state", "steps", "loss", "exact match", "")
DATE_LENGTH = len("2026-01-01T00:00")
SHOWN_ABOVE = frozenset({"name", "error", "hint"})


def compare(context: Context, left: Path, right: Path, *, report: Path | None, tolerance: str | None) -> Result:  # noqa: ARG001 - every verb takes the context
    """`kitbuild compare`: the verdict over two archives."""
    refuse_early(tolerance)
    first, second = archives.read(left, weights=True), archives.read(right, weights=True)
    allowed = allowance(tolerance, first, other=second)
    verdict = comparing.compare(first, second, allowed)
    if report is not None:
        comparing.write_report(first, second, verdict, report, allowed)
    wrote = () if report is None else (f"wrote {report}",)
    return Result(fields=verdict.as_json(), lines=(*verdict.lines(), *wrote), exit_code=verdict.exit_code)


def archive_verify(path: Path, *, expected: str | None = None) -> Result:
    """Every digest in an archive against its files; exit 7 with all that is wrong.

    `expected` is the archive's own digest as somebody else holds it: then it is also the very run that was meant.
    """
    found = archives.read(path)
    archives.check(found)
    if expected is not None and expected.removeprefix("sha256:").lower() != found.sha256:
        raise VerificationError(
            f"{path} is whole, and another archive: its sha256 is {found.sha256}", hint="take the one that was meant"
        )
    files = len(found.seal.files) if found.seal else None
    fields = {
        "path": str(path), "steps": len(found.metrics), "tensors": len(found.manifest.weights),
        "files": files, "archive_sha256": found.sha256,
    }  # fmt: skip
    counts = f"{fields['steps']} steps, {fields['tensors']} weight tensors"
    line = f"{path} verifies: {counts}" + (f", {files} files" if files is not None else "")
    return Result(fields=fields, lines=(line, _seal_line(found)))


def _seal_line(archive: archives.Archive) -> str:
    """The one digest that stands for all of it."""
    if archive.sha256 is not None:
        return f"archive sha256 {archive.sha256}"
    if not archive.manifest_found:
        return "it has no list of its files: the run was killed, or is not over"
    return "an older kitbuild made it, without a list of its files: logs, configuration and tokenizer have no digest"


def archive_list(folder: Path) -> Result:
    """The runs in a folder, oldest first."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder", hint="runs are kept in runs/ unless --out said otherwise")
    runs = archives.list_runs(folder)
    rows = [LIST_HEAD, *(_row(run) for run in runs)] if runs else [("no runs",)]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = tuple("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return Result(fields={"runs": [run.as_json() for run in runs]}, lines=lines)


def _row(run: archives.Summary) -> tuple[str, ...]:
    """One line of the list; a reason is cut to its first line."""
    reason = (run.problem or run.error or "").partition("\n")[0]
    return (
        run.name,
        (run.started or "")[:DATE_LENGTH].replace("T", " "),
        run.state,
        str(run.steps or ""),
        _change(run.loss_first, run.loss_last, ".4f"),
        _change(run.exact_match_before, run.exact_match_after, ".1%"),
        f"({reason})" if reason else "",
    )


def _change(first: float | None, last: float | None, form: str) -> str:
    if first is None and last is None:
        return ""
    return " → ".join("?" if value is None else f"{value:{form}}" for value in (first, last))


def archive_show(path: Path) -> Result:
    """One run at a glance."""
    summary = archives.show(archives.read(path))
    fields: dict[str, Any] = summary.as_json()
    facts = (f"  {key:<20} {value}" for key, value in fields.items() if value is not None and key not in SHOWN_ABOVE)
    first, *learned = summary_lines(summary)
    why = [f"{key}: {text}" for key, text in (("error", summary.error), ("hint", summary.hint)) if text]
    return Result(fields=fields, lines=(summary.name, first, *why, *learned, *facts))


def archive_repeats(path: Path, runs: Sequence[Path]) -> Result:
    """Keep further runs of the same recipe in an archive, for `--tolerance repeats`; what it keeps already counts."""
    original = archives.read(path, weights=True)
    held = archives.kept_repeats(original)
    new = [*read_repeats(map(str, runs), original)]
    comparing.Bands.of(original, [*held, *(run for run in new if run.sha256 not in {item.sha256 for item in held})])
    made = archives.keep_repeats(original, new)
    return Result(
        fields={"path": str(path), "repeats": [str(place) for place in made]}, lines=tuple(str(place) for place in made)
    )


def archive_pack(context: Context, path: Path, *, output: Path | None, include: str, weights: bool) -> Result:
    """One file that a stranger can reproduce from."""
    if include not in INCLUDES:
        raise UsageError(f"--include {include} is not known", hint=f"one of {', '.join(INCLUDES)}")
    target = output or path.absolute().with_name(f"{path.absolute().name}.kit.tar")
    made = archives.pack(
        path, target, store=context.store, include="all" if include == "all" else "local", weights=weights
    )
    size = made.stat().st_size
    return Result(fields={"path": str(made), "bytes": size}, lines=(f"{made} ({size / 1e6:.1f} MB)",))


def archive_unpack(context: Context, path: Path, folder: Path) -> Result:
    """A run directory from a packed archive; its blobs go into the store."""
    name = path.name.removesuffix(".tar").removesuffix(".kit")
    made = archives.unpack(path, context.store, folder / name)
    return Result(fields={"path": str(made)}, lines=(str(made),))
