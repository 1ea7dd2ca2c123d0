"""Step time and memory against length, one line for each way to train, as SVG. Pure: no library draws it."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from kitbuild.recipe.memory import GIB

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kitbuild.bench.rows import Row

WIDTH, HEIGHT, LEFT, TOP, BOTTOM, KEY = 880, 420, 70, 48, 56, 260
# Okabe and Ito's eight, told apart by every kind of colour vision: https://jfly.uni-koeln.de/color/
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#f0e442")
TICKS = 4


def latency(rows: Sequence[Row]) -> str:
    """Seconds of an optimizer step against max_length."""
    return _chart("Optimizer step, seconds", rows, lambda row: row.step_seconds)


def memory(rows: Sequence[Row]) -> str:
    """Peak memory in GiB against max_length."""
    return _chart("Peak memory, GiB", rows, lambda row: (row.peak_allocated_bytes or 0) / GIB or None)


def _chart(title: str, rows: Sequence[Row], value: Callable[[Row], float | None]) -> str:
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        found = value(row) if row.state == "ok" else None
        if found is not None:
            lines.setdefault(_line(row), []).append((row.max_length, found))
    lengths = sorted({length for points in lines.values() for length, _ in points})
    top = max((height for points in lines.values() for _, height in points), default=1.0) * 1.08
    width = WIDTH - LEFT - KEY
    step = width / max(1, len(lengths) - 1)

    def place(length: int, height: float) -> tuple[float, float]:
        # Lengths double from one to the next: equal steps, as on a logarithmic axis.
        return LEFT + lengths.index(length) * step, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * height / top

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" font-family="system-ui,sans-serif" font-size="13" role="img" aria-label="{html.escape(title)}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="26" font-size="16" font-weight="600">{html.escape(title)}</text>',
    ]
    for tick in range(TICKS + 1):
        height = top * tick / TICKS
        y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * tick / TICKS
        parts.append(
            f'<path d="M{LEFT} {y:.1f}h{width}" stroke="#d8dee4"/><text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#57606a">{height:.3g}</text>'
        )
    for length in lengths:
        x, _ = place(length, 0)
        parts.append(
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle" fill="#57606a">{length}</text>'
        )
    parts.append(
        f'<text x="{LEFT + width / 2}" y="{HEIGHT - 10}" text-anchor="middle" fill="#57606a">max_length</text>'
    )
    for index, (name, points) in enumerate(lines.items()):
        colour = COLOURS[index % len(COLOURS)]
        dots = [place(*point) for point in sorted(points)]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in dots)
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in dots]
        y = TOP + 12 + index * 20
        parts.append(
            f'<circle cx="{WIDTH - KEY + 24}" cy="{y - 4}" r="5" fill="{colour}"/><text x="{WIDTH - KEY + 36}" y="{y}">{html.escape(name)}</text>'
        )
    return "".join(parts) + "</svg>\n"


def _line(row: Row) -> str:
    words = [row.attention.rpartition("/")[2]]
    words += [f"Liger {row.liger}"] if row.liger != "off" else []
    words += ["checkpointed"] if row.checkpointing else []
    words += ["packed"] if row.packing else []
    return ", ".join([*words, f"micro {row.micro}"])


def page(rows: Sequence[Row], title: str) -> str:
    """Both figures and the table in one file that loads nothing."""
    names = list(rows[0].as_json()) if rows else []
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    body = "".join(
        "<tr>" + "".join(f"<td>{_cell(value)}</td>" for value in row.as_json().values()) + "</tr>" for row in rows
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{html.escape(title)}</title><style>body{{font:15px/1.45 system-ui,sans-serif;max-width:1200px;margin:2em auto;"
        "padding:0 1em}svg{max-width:100%;height:auto}div{overflow-x:auto}table{border-collapse:collapse;font-size:13px}"
        "td,th{text-align:left;padding:.25em .7em;border-bottom:1px solid #d8dee4;white-space:nowrap}</style></head><body>"
        f"<h1>{html.escape(title)}</h1>{latency(rows)}{memory(rows)}<div><table><tr>{head}</tr>{body}</table></div></body></html>\n"
    )


def _cell(value: object) -> str:
    return html.escape("" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value))
