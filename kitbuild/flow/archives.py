"""archive → compare, and the upkeep of archives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kitbuild import archive as archives
from kitbuild import compare as comparing
from kitbuild.errors import UsageError
from kitbuild.flow.context import Context, Result
from kitbuild.flow.running import summary_lines

if TYPE_CHECKING:
    from pathlib import Path

INCLUDES = ("local", "all")


def compare(context: Context, left: Path, right: Path, *, report: Path | None, tolerance: str | None) -> Result:  # noqa: ARG001 - every verb takes the context
    """`kitbuild compare`: the verdict over two archives."""
    allowed = comparing.Tolerance.parse(tolerance) if tolerance else None
    first, second = archives.read(left, weights=True), archives.read(right, weights=True)
    verdict = comparing.compare(first, second, allowed)
    if report is not None:
        comparing.write_report(first, second, verdict, report)
    return Result(fields=verdict.as_json(), lines=(verdict.text(),), exit_code=verdict.exit_code)


def archive_verify(path: Path) -> Result:
    """Every digest in an archive against its files; exit 7 with all that is wrong."""
    found = archives.read(path)
    archives.check(found)
    fields = {"path": str(path), "steps": len(found.metrics), "tensors": len(found.manifest.weights)}
    return Result(
        fields=fields, lines=(f"{path} verifies: {fields['steps']} steps, {fields['tensors']} weight tensors",)
    )


def archive_list(folder: Path) -> Result:
    """The runs in a folder, oldest first."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder", hint="runs are kept in runs/ unless --out said otherwise")
    runs = archives.list_runs(folder)
    lines = tuple(
        f"{run.name}  {run.state}"
        + (f"  {run.steps} steps" if run.steps else "")
        + (f"  ({run.problem})" if run.problem else "")
        for run in runs
    )
    return Result(fields={"runs": [run.as_json() for run in runs]}, lines=lines or ("no runs",))


def archive_show(path: Path) -> Result:
    """One run at a glance."""
    summary = archives.show(archives.read(path))
    fields: dict[str, Any] = summary.as_json()
    facts = (f"  {key:<20} {value}" for key, value in fields.items() if value is not None and key != "name")
    return Result(fields=fields, lines=(summary.name, *summary_lines(summary), *facts))


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
