"""Step 6, the data: a verdict, its first difference and its causes."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from kitbuild.compare.values import counted

if TYPE_CHECKING:
    from kitbuild.compare.divergence import Divergence

Outcome = Literal["IDENTICAL", "WITHIN_TOLERANCE", "DIFFERENT", "NOT_COMPARABLE"]
EXIT_CODES: dict[Outcome, int] = {"IDENTICAL": 0, "WITHIN_TOLERANCE": 0, "DIFFERENT": 8, "NOT_COMPARABLE": 9}
SHOWN_HASH = 12
SHOWN_CAUSES = 3


@dataclass(frozen=True, kw_only=True)
class FirstDifference:
    """The first value that differs. `step` is None for what is after training (weights, kernels).

    `name` is the tensor or the kernel. `rank` is the first rank that differs; None where ranks are merged before a
    value is made (a gradient norm over several processes, weights) or the two sides have other numbers of them.
    """

    step: int | None
    field: str
    left: str
    right: str
    ulps: int | None = None
    rank: int | None = None
    name: str | None = None
    several: bool = False
    """Whether there are ranks to tell apart."""

    def as_json(self) -> dict[str, Any]:
        """The fields of `first_difference`."""
        return {key: value for key, value in asdict(self).items() if key != "several"}

    def __str__(self) -> str:
        where = "after training" if self.step is None else f"at step {self.step}"
        what = f"{self.field} {self.name}" if self.name else self.field
        distance = "" if self.ulps is None else f", {counted(self.ulps)}"
        rank = f" (rank {self.rank})" if self.rank is not None and self.several else ""
        return f"{where}, {what}{rank} {shown(self.left)} vs {shown(self.right)}{distance}"


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One thing that differs between the manifests."""

    kind: str
    name: str
    left: str | None
    right: str | None
    text: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a comparison found. `causes` are ranked, likeliest first; `reasons` are why runs cannot be compared."""

    verdict: Outcome
    detail: str
    first_difference: FirstDifference | None = None
    causes: tuple[Cause, ...] = ()
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    divergence: Divergence | None = None

    @property
    def exit_code(self) -> int:
        """0, 8 or 9."""
        return EXIT_CODES[self.verdict]

    def as_json(self) -> dict[str, Any]:
        """The fields of `kitbuild.compare/1`."""
        return {
            "verdict": self.verdict,
            "detail": self.detail,
            "first_difference": self.first_difference.as_json() if self.first_difference else None,
            "causes": [asdict(cause) for cause in self.causes],
            "reasons": list(self.reasons),
            "notes": list(self.notes),
            **(self.divergence.as_json() if self.divergence else {"quantities": {}, "around": []}),
        }

    def text(self) -> str:
        """A few plain lines for the screen."""
        lines = [f"{self.verdict}: {self.detail}"]
        if self.verdict == "DIFFERENT" and self.causes:
            likely, *others = self.causes[:SHOWN_CAUSES]
            lines[0] += f"; likely cause: {likely.text}"
            lines += [f"  also differs: {cause.text}" for cause in others]
            rest = len(self.causes) - SHOWN_CAUSES
            lines += [f"  and {rest} more (--json lists them)"] if rest > 0 else []
        elif self.verdict == "DIFFERENT":
            lines[0] += "; the manifests name no cause"
        lines += [f"  reason: {reason}" for reason in self.reasons[1:]]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    def lines(self) -> tuple[str, ...]:
        """The same, and how the runs part."""
        return (self.text(), *(self.divergence.lines() if self.divergence else ()))


def shown(value: str) -> str:
    """A value for a person: a hex float with its decimal, a digest cut short."""
    if len(value) == 64 and all(c in "0123456789abcdef" for c in value):  # noqa: PLR2004 - a sha256 in hex
        return value[:SHOWN_HASH] + "…"
    if "0x" in value:
        number = float.fromhex(value)
        return f"{value} ({number:.6g})" if math.isfinite(number) else value
    return value
