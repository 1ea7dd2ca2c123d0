"""Beside the flow: how fast a recipe trains in other ways, each cell a real run of its own. Pure; `flow` drives it."""

from kitbuild.bench.cells import Cell, Grid, bench_rows, grid, recipe_for
from kitbuild.bench.rows import Row, as_csv, measured, table
from kitbuild.bench.tune import Tuning

__all__ = ["Cell", "Grid", "Row", "Tuning", "as_csv", "bench_rows", "grid", "measured", "recipe_for", "table"]
