"""archive → image → run → verdict: what was run is run again from the archive alone, and compared."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kitbuild import archive as archives
from kitbuild import compare as comparing
from kitbuild import recipe as recipes
from kitbuild.errors import NotComparableError
from kitbuild.flow.context import Context, Result
from kitbuild.flow.running import fetch_for, run_errors, train
from kitbuild.flow.tolerances import allowance, refuse_early
from kitbuild.lock.files import check_maker

if TYPE_CHECKING:
    from kitbuild.flow.running import RunOptions
    from kitbuild.run.follow import Stop


@run_errors()
def reproduce(
    context: Context,
    path: Path,
    options: RunOptions,
    *,
    tolerance: str | None,
    stop: Stop,
    report: Path | None = None,
) -> Result:
    """`kitbuild reproduce`: the archive's own lock and recipe, run again, compared."""
    refuse_early(tolerance)
    with context.store.scratch() as scratch:
        name = path.name.removesuffix(".tar").removesuffix(".kit")
        place = path if path.is_dir() else archives.unpack(path, context.store, scratch / name)
        original = archives.read(place)
        archives.check(original)
        _refuse_unfinished(original, path)
        allowed = allowance(tolerance, original)
        check_maker(original.manifest.lock)
        loaded = recipes.read(place / "recipe.yaml")
        fetch_for(context, original.manifest.lock, loaded, options)
        again = train(context, original.manifest.lock, loaded.content, options, stop=stop)
        made = archives.read(Path(str(again.fields["run_dir"])), weights=True)
        verdict = comparing.compare(original, made, allowed)
        if report is not None:
            comparing.write_report(original, made, verdict, report, allowed)
    wrote = () if report is None else (f"wrote {report}",)
    return Result(
        fields={**again.fields, **verdict.as_json()},
        lines=(*again.lines, *verdict.lines(), *wrote),
        exit_code=verdict.exit_code,
    )


def _refuse_unfinished(original: archives.Archive, path: Path) -> None:
    """Training again would take as long as ever and end without a verdict."""
    if not original.finished:
        raise NotComparableError(
            f"{path.name} is unfinished: nothing could be compared with it",
            hint=f"finish it with `kitbuild run RECIPE --resume {path}`, or train anew with `kitbuild run RECIPE`",
        )
