"""Step 6: what two archives say about each other: verdict, first difference, causes, report."""

from kitbuild.compare.bands import Bands
from kitbuild.compare.models import Cause, FirstDifference, Verdict
from kitbuild.compare.report import write_report
from kitbuild.compare.tolerance import Allowance, Tolerance
from kitbuild.compare.values import ulps
from kitbuild.compare.verdict import compare, first_difference

__all__ = [
    "Allowance",
    "Bands",
    "Cause",
    "FirstDifference",
    "Tolerance",
    "Verdict",
    "compare",
    "first_difference",
    "ulps",
    "write_report",
]
