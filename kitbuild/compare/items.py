"""Step 6: one difference as a cause, and all differences of two tables. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kitbuild.compare.models import Cause

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ABSENT = "absent"


def cause(kind: str, name: str, left: object, right: object, what: str | None = None) -> Cause:
    """`what` (default: the name) left vs right, as one line."""
    one, two = as_text(left), as_text(right)
    return Cause(kind=kind, name=name, left=one, right=two, text=f"{what or name} {one or ABSENT} vs {two or ABSENT}")


def as_text(value: object) -> str | None:
    """As JSON has it; None for what is not there."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return None if value is None else str(value)


def tables(kind: str, left: Mapping[str, Any], right: Mapping[str, Any], *, what: str = "{}") -> Iterator[Cause]:
    """Differences of two tables; nested tables by dotted name."""
    for name in sorted({*left, *right}):
        one, two = left.get(name), right.get(name)
        if one == two:
            continue
        if isinstance(one, dict) and isinstance(two, dict):
            nested = ({f"{name}.{key}": value for key, value in table.items()} for table in (one, two))
            yield from tables(kind, *nested, what=what)
        else:
            yield cause(kind, name, one, two, what.format(name))
