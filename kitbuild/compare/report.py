"""Step 6: one page about two archives, in one file that loads nothing.

Charts are SVG drawn here: loss of both runs, their difference, step time, memory; below, what differs, and the two
manifests side by side. Every text from an archive is escaped: an archive may come from a stranger.
"""

from __future__ import annotations

import html
import json
import math
from typing import TYPE_CHECKING

from kitbuild.compare.models import shown
from kitbuild.errors import UsageError
from kitbuild.store.blobs import write_atomically

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kitbuild.archive.read import Archive
    from kitbuild.compare.models import Verdict

WIDTH, HEIGHT, MARGIN = 640, 220, 48
MAX_POINTS = 2000
LEFT_COLOUR, RIGHT_COLOUR, DIFFERENCE_COLOUR = "#1f6feb", "#d9730d", "#8250df"
DASHED = ' stroke-dasharray="5,3"'
MIB = 1 << 20
STYLE = """
body{font:15px/1.45 system-ui,sans-serif;max-width:1400px;margin:2em auto;padding:0 1em;color:#1b1f24;background:#fff}
h1{font-size:1.4em}h2{font-size:1.1em;margin-top:2em}.charts{display:flex;flex-wrap:wrap;gap:1.5em}
figure{margin:0}figcaption{font-weight:600;margin-bottom:.3em}table{border-collapse:collapse}
td,th{text-align:left;padding:.25em .8em;border-bottom:1px solid #d8dee4;vertical-align:top;overflow-wrap:anywhere}
th,td:first-child{white-space:nowrap}td:nth-child(2){min-width:10em}
.sides{display:grid;grid-template-columns:minmax(0,1fr) minmax(0,1fr);gap:1em}h3{overflow-wrap:anywhere}
pre{font-size:12px;background:#f6f8fa;padding:1em;overflow:auto;max-height:40em;white-space:pre-wrap;overflow-wrap:anywhere}
.left{color:#1f6feb}.right{color:#d9730d}
"""
Series = tuple[str, str, "Sequence[float | None]"]


def write_report(left: Archive, right: Archive, verdict: Verdict, path: Path) -> Path:
    """Write the page; returns its path."""
    try:
        write_atomically(path, page(left, right, verdict).encode("utf-8"))
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror}", hint="name a file that you may write"
        ) from error
    return path


def page(left: Archive, right: Archive, verdict: Verdict) -> str:
    """The whole page as text."""
    names = [_escape(archive.path.name) for archive in (left, right)]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{_escape(verdict.verdict)}: {names[0]} and {names[1]}</title><style>{STYLE}</style></head><body>"
        f"<h1>{_escape(verdict.verdict)}: {_escape(verdict.detail)}</h1>"
        f'<p><span class="left">left: {names[0]}</span> · <span class="right">right: {names[1]}</span></p>'
        + _list("Cannot be compared because", verdict.reasons)
        + _first(verdict)
        + _causes(verdict)
        + _list("Notes", verdict.notes)
        + f'<h2>Charts</h2><div class="charts">{_charts(left, right)}</div>'
        + f'<h2>Manifests</h2><div class="sides">{_manifest(left)}{_manifest(right)}</div></body></html>\n'
    )


def _charts(left: Archive, right: Archive) -> str:
    loss = [[float.fromhex(line.loss) for line in archive.metrics] for archive in (left, right)]
    seconds = [[float.fromhex(line.seconds) for line in archive.metrics] for archive in (left, right)]
    memory = [
        [None if line.peak_memory_bytes is None else line.peak_memory_bytes / MIB for line in archive.metrics]
        for archive in (left, right)
    ]
    gap = [two - one for one, two in zip(*loss, strict=False)]
    return (
        _chart("Loss", [("left", LEFT_COLOUR, loss[0]), ("right", RIGHT_COLOUR, loss[1])])
        + _chart("Difference of loss (right - left)", [("difference", DIFFERENCE_COLOUR, gap)])
        + _chart("Step time, seconds", [("left", LEFT_COLOUR, seconds[0]), ("right", RIGHT_COLOUR, seconds[1])])
        + _chart("Peak memory, MiB", [("left", LEFT_COLOUR, memory[0]), ("right", RIGHT_COLOUR, memory[1])])
    )


def _chart(title: str, series: Sequence[Series]) -> str:
    """One line chart over the steps; a value that is not finite leaves a gap."""
    values = [value for _, _, points in series for value in points if value is not None and math.isfinite(value)]
    if not values:
        return f"<figure><figcaption>{title}</figcaption>no values</figure>"
    low, high = min(values), max(values)
    last = max(len(points) for _, _, points in series)
    lines = "".join(
        f'<path d="{_path(points, low, high, last)}" fill="none" stroke="{colour}" stroke-width="1.5"'
        f"{DASHED if name == 'right' else ''}/>"
        for name, colour, points in series
    )
    labels = (
        f'<text x="4" y="18">{high:.5g}</text><text x="4" y="{HEIGHT - MARGIN / 2}">{low:.5g}</text>'
        f'<text x="{MARGIN}" y="{HEIGHT - 4}">1</text><text x="{WIDTH - 8}" y="{HEIGHT - 4}" text-anchor="end">step {last}</text>'
    )
    return (
        f'<figure><figcaption>{title}</figcaption><svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{title}" '
        f'font-size="11" fill="#57606a"><rect x="{MARGIN}" y="8" width="{WIDTH - MARGIN - 8}" height="{HEIGHT - MARGIN + 12}" '
        f'fill="none" stroke="#d8dee4"/>{lines}{labels}</svg></figure>'
    )


def _path(points: Sequence[float | None], low: float, high: float, last: int) -> str:
    stride = max(1, len(points) // MAX_POINTS)
    span, pen, parts = (high - low) or 1.0, "M", []
    for index in range(0, len(points), stride):
        value = points[index]
        if value is None or not math.isfinite(value):
            pen = "M"
            continue
        x = MARGIN + (WIDTH - MARGIN - 8) * index / max(1, last - 1)
        y = 14 + (HEIGHT - MARGIN) * (1 - ((value - low) / span if high > low else 0.5))
        parts.append(f"{pen}{x:.1f} {y:.1f}")
        pen = "L"
    return "".join(parts) + ("h0.1" if len(parts) == 1 else "")


def _first(verdict: Verdict) -> str:
    first = verdict.first_difference
    if first is None:
        return ""
    rows = {"step": first.step, "quantity": first.field, "name": first.name, "left": shown(first.left), "right": shown(first.right), "ulps": first.ulps}  # fmt: skip
    cells = "".join(
        f"<tr><th>{key}</th><td>{_escape(value)}</td></tr>" for key, value in rows.items() if value is not None
    )
    return f"<h2>First difference</h2><table>{cells}</table>"


def _causes(verdict: Verdict) -> str:
    if not verdict.causes:
        return ""
    rows = "".join(
        f"<tr><td>{_escape(c.kind)}</td><td>{_escape(c.name)}</td><td>{_escape(c.left)}</td><td>{_escape(c.right)}</td></tr>"
        for c in verdict.causes
    )
    head = '<tr><th>kind</th><th>name</th><th class="left">left</th><th class="right">right</th></tr>'
    return f"<h2>What differs, likeliest cause first</h2><table>{head}{rows}</table>"


def _list(title: str, items: Sequence[str]) -> str:
    body = "".join(f"<li>{_escape(item)}</li>" for item in items)
    return f"<h2>{title}</h2><ul>{body}</ul>" if items else ""


def _manifest(archive: Archive) -> str:
    """Without the lock's long lists, which the causes name item by item."""
    body = archive.manifest.model_dump(mode="json", exclude={"lock", "weights"})
    text = json.dumps(body, indent=1, sort_keys=True, ensure_ascii=False)
    return f"<div><h3>{_escape(archive.path.name)}</h3><pre>{_escape(text)}</pre></div>"


def _escape(value: object) -> str:
    return html.escape("" if value is None else str(value))
