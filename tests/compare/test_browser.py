"""The page in a real browser: it runs without an error, fits the window, and its charts answer."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from kitbuild.archive import Archive
from kitbuild.compare import compare, write_report
from tests.archive.factory import Run, lock_body, metrics_line, wheel

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow_extra
PROBE = """
const seen = {
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  width: innerWidth,
  hidden: [...document.querySelectorAll("h1,h2,.plot,figcaption")].filter((item) => item.offsetWidth === 0).length,
  small: [...document.querySelectorAll(".plot i")].map((item) => parseFloat(getComputedStyle(item).fontSize)).sort()[0],
};
const labels = () => [...document.querySelector("[data-chart=loss]").querySelectorAll("i.x")].map((item) => item.textContent);
const outputs = () => [...document.querySelectorAll("figcaption output")].map((item) => item.textContent);
const plot = document.querySelector("[data-chart=loss] .plot");
const box = plot.getBoundingClientRect();
const at = (type, x) => plot.dispatchEvent(new PointerEvent(type, {clientX: box.left + x * box.width, clientY: box.top + 9, pointerId: 1, pointerType: "mouse"}));
plot.setPointerCapture = () => {};
seen.whole = labels();
at("pointermove", 0.5); seen.pointed = outputs();
at("pointerleave", 0.5); seen.left = outputs();
at("pointerdown", 0.25); at("pointermove", 0.5); at("pointerup", 0.5); seen.zoomed = labels();
document.querySelector("[data-reset]").click(); seen.reset = labels();
document.querySelector("[data-near]").click(); seen.near = labels(); seen.nearOutput = outputs()[0];
const rows = () => [...document.querySelectorAll(".manifests tr.same")].filter((item) => item.offsetHeight > 0).length;
seen.only = rows();
document.querySelector("[data-only]").click(); document.querySelector("[data-open]").click(); seen.all = rows();
const told = document.createElement("pre"); told.id = "seen"; told.textContent = JSON.stringify(seen); document.body.append(told);
"""


def chromium(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert program, "install chromium (scripts/test --all does)"
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def console(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What the page's script or its policy complained of."""
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """Two runs of forty steps that part at step 30, with a long name and a long value."""
    steps = [metrics_line(step, loss=(3.0 - step / 32).hex()) for step in range(1, 41)]
    lock = lock_body(wheels=[wheel("torch", "2.12.0"), wheel("trl", "1.14.2")])
    right = Run(lock=lock, steps=[dict(line) for line in steps], device={"name": "x" * 400})
    right.change_step(30, loss=(2.0).hex())
    sides = [
        Archive.read(run.write(tmp_path / f"a-run-with-a-rather-long-name-20261130T101500Z-{name}"))
        for name, run in (("0aa1b2", Run(steps=steps)), ("77c3d4", right))
    ]
    return write_report(sides[0], sides[1], compare(sides[0], sides[1]), tmp_path / "report.html")


def test_the_page_runs_as_it_is(report: Path) -> None:
    """Under its own policy: the script runs, nothing is refused, and an address leads to a step."""
    done = chromium("--dump-dom", f"file://{report}#step=30")
    assert console(done) == []
    assert re.search(r'<html[^>]* class="js"', done.stdout)
    assert "step 30 · left 2.0625 · right 2 · 262,144 ulps" in done.stdout


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_fits_and_answers(report: Path, tmp_path: Path, width: int) -> None:
    """On a desk and on a phone: nothing sticks out, labels stay legible, pointing and zooming work."""
    text = report.read_text(encoding="utf-8")
    probed = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    copy = tmp_path / "probed.html"
    copy.write_text(probed.replace("</body>", f"<script>{PROBE}</script></body>"), encoding="utf-8")
    done = chromium(f"--window-size={width},1200", "--dump-dom", f"file://{copy}")
    assert console(done) == []
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stdout[-500:]
    seen: dict[str, Any] = json.loads(found[1].replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&"))
    assert (seen["overflow"], seen["hidden"]) == (0, 0)
    assert seen["small"] >= 11
    assert seen["whole"] == ["10", "20", "30", "40"]
    assert seen["pointed"][0] in {
        f"step {step} · left {value} · right {value} · equal" for step, value in ((20, 2.375), (21, 2.34375))
    }
    assert set(seen["left"]) == {""}
    assert seen["zoomed"][0] in {"12", "11"}
    assert seen["reset"] == seen["whole"]
    assert seen["near"] == ["20", "25", "30", "35", "40"]
    assert seen["nearOutput"].startswith("step 30 · left 2.0625 · right 2 ")
    assert seen["only"] == 0
    assert seen["all"] > 100


@pytest.mark.parametrize(("width", "height"), [(1280, 2400), (390, 4000)])
def test_the_page_can_be_seen(report: Path, tmp_path: Path, width: int, height: int) -> None:
    """A picture of it has both runs' colours, the mark of the first difference, and no blank half."""
    picture = tmp_path / "page.png"
    chromium(f"--window-size={width},{height}", "--hide-scrollbars", f"--screenshot={picture}", f"file://{report}")
    data = picture.read_bytes()
    assert int.from_bytes(data[16:20], "big") == width
    assert int.from_bytes(data[20:24], "big") == height
    assert len(data) > 50_000
