"""The page: whole, quiet on the network, safe with what a stranger wrote."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import TYPE_CHECKING

import pytest

from kitbuild.archive import Archive
from kitbuild.compare import Bands, compare, write_report
from kitbuild.compare.charts import sampled_steps, ticks
from kitbuild.compare.report import _json, page
from kitbuild.errors import UsageError
from tests.archive.factory import KERNEL, Run, lock_body, metrics_line, wheel

if TYPE_CHECKING:
    from pathlib import Path


def report(tmp_path: Path, left: Run, right: Run) -> str:
    sides = [Archive.read(run.write(tmp_path / name)) for run, name in ((left, "left"), (right, "right"))]
    path = write_report(sides[0], sides[1], compare(sides[0], sides[1]), tmp_path / "out" / "report.html")
    return path.read_text()


VOID = {"meta", "input"}


class Outline(HTMLParser):
    """Headings, captions and badges, and that every element is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.titles: list[str] = []
        self.rows: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002 - the parser's names
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002 - likewise
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag == self.open.pop()

    def handle_data(self, data: str) -> None:
        if "tr" in self.open and data.strip():
            self.rows[-1] += ("|" if self.rows[-1] else "") + data.strip()
        if self.open and self.open[-1] in {"h1", "h2"}:
            self.titles.append(data)
        if self.open[-2:] == ["figcaption", "b"]:
            self.titles.append(f"- {data.strip()}")


def outline(text: str) -> Outline:
    found = Outline()
    found.feed(text)
    found.close()
    assert found.open == []
    return found


def test_the_page_holds_verdict_causes_charts_and_manifests(tmp_path: Path) -> None:
    """Well-formed, in this order."""
    right = Run(device={"threads": 2})
    right.change_step(2, loss=(1.0).hex(), peak_memory_bytes=None)
    found = outline(report(tmp_path, Run(), right))
    assert found.titles == [
        "The runs differ, first at step 2, in loss — likely because of threads 1 vs 2",
        "First difference",
        "What differs, likeliest cause first",
        "How the runs part",
        "Notes",
        "Step by step",
        "- Loss",
        "- Difference of loss",
        "- Gradient norm",
        "- Step time",
        "- Tokens per second",
        "- Peak memory",
        "Both runs at a glance",
        "Both manifests, side by side",
    ]
    assert found.tags.count("svg") == 6
    assert "2|same|2.75|1|11,534,336|1.5|=|0" in found.rows
    assert "threads|threads|1|2" in found.rows
    assert "loss|differs in 1 of 5 steps, step 2, by at most 11,534,336 ulps (0.64 relative, at step 2)" in found.rows


def test_each_fact_of_both_manifests_is_there(tmp_path: Path) -> None:
    """Under its name, with both values; what differs is marked, and a part with differences is open."""
    lock = lock_body(wheels=[wheel("torch", "2.12.0"), wheel("trl", "1.14.2"), wheel("peft", "0.19.0")])
    text = report(tmp_path, Run(), Run(lock=lock))
    found = outline(text)
    assert "torch.version|2.13.0|2.12.0" in found.rows
    assert "trl.version|1.14.2|1.14.2" in found.rows
    assert "peft.version|–|0.19.0" in found.rows
    assert '<tr class="other"><th>torch.version</th>' in text
    assert '<tr class="same"><th>trl.version</th>' in text
    assert '<details class="other" open><summary>lock.wheels<span>15</span><em>' in text
    assert '<details class="same"><summary>device<span>' in text


@pytest.mark.parametrize(
    ("right", "badge", "headline"),
    [
        (Run(), "IDENTICAL", "Every value is the same, bit for bit: 5 steps, 2 weight tensors"),
        (Run(steps=[metrics_line(1)]), "NOT COMPARABLE", "The runs cannot be compared: 5 steps vs 1 steps"),
        (Run(weights=Run().weights | {"norm.weight": ("BF16", [4], b"\3" * 8)}), "DIFFERENT", "The runs differ, after training, in weights of norm.weight"),
    ],
)  # fmt: skip
def test_each_verdict_has_its_headline(tmp_path: Path, right: Run, badge: str, headline: str) -> None:
    """What came of it, before anything else."""
    text = report(tmp_path, Run(), right)
    assert f">{badge}</span>" in text
    assert outline(text).titles[0] == headline


def test_what_was_compared_is_told_for_equal_runs_too(tmp_path: Path) -> None:
    """Quantity by quantity, and what ran."""
    found = outline(report(tmp_path, Run(), Run()))
    assert found.titles[1] == "What was compared"
    assert "weights|equal in all 2 tensors" in found.rows
    assert "what ran|the locked kernels, attention and Liger, in both" in found.rows


def test_what_ran_otherwise_is_told(tmp_path: Path) -> None:
    """A kernel that was not called, and where."""
    rows = outline(report(tmp_path, Run(), Run(calls={"0": 0}))).rows
    assert f"what ran|right: {KERNEL}: locked aaaaaaaaaaaa (torch-universal), not used" in rows


def test_equal_losses_have_no_empty_chart(tmp_path: Path) -> None:
    """Where there is no difference it is said in words."""
    assert '<div class="empty">equal in all 5 steps</div>' in report(tmp_path, Run(), Run())


def test_every_attribute_is_quoted(tmp_path: Path) -> None:
    """An unquoted value before `/>` takes the slash in, and a browser then nests all that follows."""
    text = report(tmp_path, Run(), Run())
    page = text[: text.index('<script type="application/json"')]
    assert re.findall(r"<[a-z][^>]*\s[a-z-]+=[^\"\s>][^>]*>", page[page.index("<body>") :]) == []
    svg = text[text.index("<svg") : text.index("</svg>")]
    assert re.findall(r"<(?:path|rect)[^>]*[^/]>", svg) == []


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    """No address, and a policy that allows its own script and nothing else."""
    text = report(tmp_path, Run(), Run())
    assert [found for found in re.findall(r"https?:[^\"' ]*", text) if found != "http://www.w3.org/2000/svg"] == []
    assert re.findall(r"<link|<img|<iframe|src=|url\(|@import|fetch\(|XMLHttp|import\(", text) == []
    script = text[text.rindex("<script>") + len("<script>") : text.rindex("</script>")]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'" in text
    assert text.count("<script") == 2


def test_the_same_archives_give_the_same_page(tmp_path: Path) -> None:
    """No clock, no random name."""
    sides = [Archive.read(Run().write(tmp_path / name)) for name in ("a", "b")]
    verdict = compare(sides[0], sides[1])
    assert page(sides[0], sides[1], verdict) == page(sides[0], sides[1], verdict)


def test_numbers_for_the_script_are_whole(tmp_path: Path) -> None:
    """Steps, values, gaps for what is no number, ulps, and the first difference."""
    right = Run()
    right.change_step(3, loss="nan")
    right.change_step(4, loss=(2.5 + 2**-22).hex())
    text = report(tmp_path, Run(), right)
    body = json.loads(text[text.index('id="data">') + len('id="data">') : text.index("</script>")])
    assert body["steps"] == [1, 2, 3, 4, 5]
    assert body["first"] == 3
    assert body["charts"]["loss"]["series"][1] == [2.875, 2.75, None, 2.5 + 2**-22, 2.375]
    assert body["charts"]["loss"]["ulps"] == ["equal", "equal", None, "1 ulp", "equal"]
    assert body["charts"]["rate"]["series"][0][0] == 256.0


def test_times_and_rates_stand_on_zero(tmp_path: Path) -> None:
    """A chart of step times that began at the smallest would make a tremor of it; losses have no such floor."""
    text = report(tmp_path, Run(), Run())
    figures = {found[1]: found[0] for found in re.finditer(r'<figure data-chart="(\w+)">.*?</figure>', text)}
    on_zero = [
        key
        for key, figure in figures.items()
        if re.search(r'<i class="y" style="bottom:0\.00%">0(?:\.0+)?</i>', figure)
    ]
    assert on_zero == ["seconds", "rate", "memory"]


def test_a_long_run_is_thinned_and_kept_where_it_parts(tmp_path: Path) -> None:
    """At most a few thousand points, all of those around the first difference, and the last."""
    sides = [
        Archive.read(Run(steps=[metrics_line(n, loss=(1.0).hex()) for n in range(1, 9003)]).write(tmp_path / str(side)))
        for side in range(2)
    ]
    steps = sampled_steps(sides[0], sides[1], 4567)
    assert len(steps) < 4100
    assert set(range(4547, 4588)) <= set(steps)
    assert (steps[0], steps[-1]) == (1, 9002)


def test_a_band_is_drawn(tmp_path: Path) -> None:
    """Where the right run is held to repeats, around the losses, their difference and the gradient norm."""
    runs = []
    for number, gap in enumerate((0.0, 0.01, -0.02, 0.015)):
        run = Run()
        for line in run.steps:
            line["loss"] = (float.fromhex(line["loss"]) + gap).hex()
            line["grad_norm"] = (float.fromhex(line["grad_norm"]) + gap).hex()
        runs.append(Archive.read(run.write(tmp_path / str(number))))
    bands = Bands.of(runs[0], runs[1:3])
    text = page(runs[0], runs[3], compare(runs[0], runs[3], bands), bands)
    assert text.count('<path class="b"') == 3
    assert "shaded: the band that the right run is held to" in text
    assert "WITHIN TOLERANCE" in text


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (0.93, 1.07, [0.95, 1.0, 1.05]), (-3e-5, 1e-5, [-3e-5, -2e-5, -1e-5, 0, 1e-5])],
)  # fmt: skip
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    """Steps of 1, 2 or 5."""
    assert ticks(low, high, 5)[0] == pytest.approx(expected)


def test_what_a_stranger_wrote_is_text(tmp_path: Path) -> None:
    """Markup in a manifest is shown, not run."""
    run = Run(device={"name": "<script>alert(1)</script>"}, manifest={"name": "</script><script>alert(2)"})
    run.environment = {"variables": {'"><img src=x>': "<b>"}}
    text = report(tmp_path, Run(), run)
    assert text.count("<script") == 2
    assert "<img" not in text
    assert "&lt;script&gt;alert(1)" in text


def test_no_text_ends_the_script_s_data() -> None:
    """Whatever comes into it one day."""
    assert _json("</script><!--&") == '"\\u003c/script\\u003e\\u003c!--\\u0026"'


@pytest.mark.parametrize("loss", ["nan", "inf"])
def test_a_loss_that_is_no_number_leaves_a_gap(tmp_path: Path, loss: str) -> None:
    """A chart of a run that diverged is still drawn."""
    right = Run()
    right.change_step(3, loss=loss)
    text = report(tmp_path, Run(), right)
    assert not re.search(r'd="[^"]*(nan|inf)', text)


@pytest.mark.parametrize(
    ("field", "left", "right"),
    [("seconds", 5e-324, 1.0), ("loss", -1.7e308, 1.7e308), ("grad_norm", 5e-324, -5e-324), ("loss", 0.0, -0.0)],
)
def test_numbers_at_the_end_of_their_range_are_drawn(tmp_path: Path, field: str, left: float, right: float) -> None:
    """Where a number, a rate or a difference is too great to draw, there is a gap."""
    sides = [Run(), Run()]
    for side, value in zip(sides, (left, right), strict=True):
        side.change_step(3, **{field: value.hex()})
    text = report(tmp_path, *sides)
    assert not re.search(r'd="[^"]*(nan|inf)', text)


def test_a_run_without_steps_has_empty_charts(tmp_path: Path) -> None:
    """A run that failed before its first step can be reported too."""
    sides = [Run(steps=[], exit={"exit_code": 6}, manifest={"complete": False}) for _ in range(2)]
    text = report(tmp_path, sides[0], sides[1])
    assert text.count("no values") == 6
    assert "Why they cannot be compared" in text


def test_a_report_that_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    """Exit 2 with the path."""
    archive = Archive.read(Run().write(tmp_path / "run"))
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        write_report(archive, archive, compare(archive, archive), tmp_path / "file" / "x.html")
