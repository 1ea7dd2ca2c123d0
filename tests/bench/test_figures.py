"""Figures and tables of rows: every line and cell is there, nothing of a name is taken as markup."""

from __future__ import annotations

import csv
import io
import xml.etree.ElementTree as ET

import pytest

from kitbuild.bench.cells import Cell
from kitbuild.bench.figures import latency, memory, page
from kitbuild.bench.rows import Row, as_csv, failed, flops_per_token, table
from tests.bench.test_tune import row
from tests.recipe.test_memory import QWEN3_8B

SVG = "{http://www.w3.org/2000/svg}"


def cell(attention: str, length: int) -> Cell:
    return Cell(attention=attention, liger="off", max_length=length, checkpointing=False, packing=False, micro=1)


ROWS: list[Row] = [
    row(cell(attention, length), 1000 / length, peak_allocated_bytes=length << 20)
    for attention in ("sdpa", 'a<b"&') for length in (512, 1024, 2048)
] + [failed(cell("sdpa", 4096), state="out of memory", detail="out of memory: 1 GiB")]  # fmt: skip


@pytest.mark.parametrize("draw", [latency, memory])
def test_figures(draw: object) -> None:
    """One path and three points a way to train; what has no value is not drawn."""
    assert callable(draw)
    tree = ET.fromstring(draw(ROWS))  # noqa: S314 - our own text
    lines = [item for item in tree.iter(f"{SVG}path") if item.get("stroke-width") == "2"]
    assert [item.get("d", "").count("L") for item in lines] == [2, 2]
    assert 'a<b"&, micro 1' in [item.text for item in tree.iter(f"{SVG}text")]
    ET.fromstring(draw([]))  # noqa: S314 - our own text


def test_page_escapes() -> None:
    """A name is text, in the page as in the figure."""
    made = page(ROWS, "t<b>")
    assert "<b>" not in made
    assert "a<b" not in made
    assert "out of memory" in made


def test_table_and_csv() -> None:
    """What all cells share is said once; a cell without figures says why."""
    lines = table(ROWS)
    assert lines[0] == "all cells: liger off, checkpointing no, packing no, micro 1"
    assert len(lines) == 2 + len(ROWS)
    assert "out of memory" in lines[-1]
    read = list(csv.DictReader(io.StringIO(as_csv(ROWS))))
    assert [item["max_length"] for item in read] == [str(item.max_length) for item in ROWS]
    assert table([]) == ("no cells",)


def test_flops() -> None:
    """Qwen3-8B at 4096: 49.0 GFLOP a token, with which 2.900 s for 8 × 4096 tokens were MFU .701 of 790 TFLOP/s."""
    work = flops_per_token(QWEN3_8B, 4096)
    assert work is not None
    assert work * 8 * 4096 / 2.900 / 790e12 == pytest.approx(0.701, abs=0.002)
    assert flops_per_token({"model_type": "t5"}, 4096) is None
