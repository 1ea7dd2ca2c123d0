"""The page: whole, quiet on the network, safe with what a stranger wrote."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import TYPE_CHECKING

import pytest

from kitbuild.archive import Archive
from kitbuild.compare import compare, write_report
from kitbuild.errors import UsageError
from tests.archive.factory import Run

if TYPE_CHECKING:
    from pathlib import Path


def report(tmp_path: Path, left: Run, right: Run) -> str:
    sides = [Archive.read(run.write(tmp_path / name)) for run, name in ((left, "left"), (right, "right"))]
    path = write_report(sides[0], sides[1], compare(sides[0], sides[1]), tmp_path / "out" / "report.html")
    return path.read_text()


class Outline(HTMLParser):
    """Headings and captions, and that every container is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.titles: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002 - the parser's names
        self.tags.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002 - likewise
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag == self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in {"h1", "h2", "figcaption"}:
            self.titles.append(data)


def test_the_page_holds_verdict_charts_causes_and_manifests(tmp_path: Path) -> None:
    """Well-formed, in this order."""
    right = Run(device={"threads": 2})
    right.change_step(2, loss=(1.0).hex(), peak_memory_bytes=None)
    outline = Outline()
    outline.feed(report(tmp_path, Run(), right))
    assert outline.open == []
    assert outline.titles[0].startswith("DIFFERENT: first at step 2, loss ")
    assert outline.titles[1:] == [
        "First difference",
        "What differs, likeliest cause first",
        "Charts",
        "Loss",
        "Difference of loss (right - left)",
        "Step time, seconds",
        "Peak memory, MiB",
        "Manifests",
    ]
    assert outline.tags.count("svg") == 4


def test_every_attribute_is_quoted(tmp_path: Path) -> None:
    """An unquoted value before `/>` takes the slash in, and a browser then nests all that follows."""
    text = report(tmp_path, Run(), Run())
    assert re.findall(r"<[a-z][^>]*\s[a-z-]+=[^\"\s>][^>]*>", text) == []
    assert text.count('stroke-dasharray="5,3"/>') == 3
    svg = text[text.index("<svg") : text.index("</svg>")]
    assert re.findall(r"<(?:path|rect)[^>]*[^/]>", svg) == []
    assert svg.count("<text") == 4


def test_both_manifests_fit_the_window(tmp_path: Path) -> None:
    """A long line wraps; it does not push the other side off the screen."""
    text = report(tmp_path, Run(), Run(device={"name": "x" * 5000}))
    assert "grid-template-columns:minmax(0,1fr) minmax(0,1fr)" in text
    assert re.search(r"\npre\{[^}]*white-space:pre-wrap;overflow-wrap:anywhere", text)


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    """No address, no script, and a policy that forbids both."""
    text = report(tmp_path, Run(), Run())
    assert re.findall(r"https?:|<script|<link|<img|src=|url\(", text) == []
    assert "default-src 'none'" in text


def test_what_a_stranger_wrote_is_text(tmp_path: Path) -> None:
    """Markup in a manifest is shown, not run."""
    text = report(tmp_path, Run(), Run(device={"name": "<script>alert(1)</script>"}))
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)" in text


@pytest.mark.parametrize("loss", ["nan", "inf"])
def test_a_loss_that_is_no_number_leaves_a_gap(tmp_path: Path, loss: str) -> None:
    """A chart of a run that diverged is still drawn."""
    right = Run()
    right.change_step(3, loss=loss)
    text = report(tmp_path, Run(), right)
    assert not re.search(r'd="[^"]*(nan|inf)', text)


def test_a_run_without_steps_has_empty_charts(tmp_path: Path) -> None:
    """A run that failed before its first step can be reported too."""
    failed = Run(steps=[], exit={"exit_code": 6}, manifest={"complete": False})
    text = report(tmp_path, failed, failed_too := Run(steps=[], exit={"exit_code": 6}, manifest={"complete": False}))
    assert failed_too.steps == []
    assert text.count("no values") == 4
    assert "Cannot be compared because" in text


def test_a_report_that_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    """Exit 2 with the path."""
    archive = Archive.read(Run().write(tmp_path / "run"))
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        write_report(archive, archive, compare(archive, archive), tmp_path / "file" / "x.html")
