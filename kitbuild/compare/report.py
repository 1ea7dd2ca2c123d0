"""Step 6: one page about two archives, in one file that loads nothing.

Verdict, both runs at a glance, the first difference with the steps around it, ranked causes, charts, and both
manifests side by side. The page is whole without its script, which adds values under the pointer and zoom. Every text
from an archive is escaped and the page forbids all but its own script, since an archive may come from a stranger.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib import resources
from typing import TYPE_CHECKING

from kitbuild import __version__
from kitbuild.archive.runs import show
from kitbuild.compare.bands import Bands
from kitbuild.compare.charts import charts, drawn, sampled_steps
from kitbuild.compare.divergence import decimal, divergence
from kitbuild.compare.kernels import departures
from kitbuild.compare.models import shown
from kitbuild.compare.side_by_side import ABSENT, sections
from kitbuild.compare.values import FLOAT_FIELDS, counted, spelt, ulps
from kitbuild.errors import UsageError
from kitbuild.store.blobs import write_atomically

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kitbuild.archive.read import Archive
    from kitbuild.compare.divergence import Row
    from kitbuild.compare.models import FirstDifference, Verdict
    from kitbuild.compare.side_by_side import Section
    from kitbuild.compare.tolerance import Allowance

MANY = 400
WORDS = {
    "IDENTICAL": "Every value is the same, bit for bit",
    "WITHIN_TOLERANCE": "Not identical, and within what was stated",
    "DIFFERENT": "The runs differ",
    "NOT_COMPARABLE": "The runs cannot be compared",
}
FIELDS = {
    "batch_sha256": "batches", "loss": "loss", "grad_norm": "gradient norm", "learning_rate": "learning rate",
    "weights": "weights", "kernels": "kernels",
}  # fmt: skip


def write_report(left: Archive, right: Archive, verdict: Verdict, path: Path, held: Allowance | None = None) -> Path:
    """Write the page; returns its path."""
    try:
        write_atomically(path, page(left, right, verdict, held).encode("utf-8"))
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror}", hint="name a file that you may write"
        ) from error
    return path


def page(left: Archive, right: Archive, verdict: Verdict, held: Allowance | None = None) -> str:
    """The whole page as text; the same archives give the same page."""
    style, script = (resources.files("kitbuild.compare").joinpath("page", name).read_text("utf-8") for name in ("style.css", "script.js"))  # fmt: skip
    first = verdict.first_difference.step if verdict.first_difference else None
    steps = sampled_steps(left, right, first)
    found = charts(left, right, steps, held if isinstance(held, Bands) else None)
    data = {"steps": steps, "first": first, "charts": {chart.key: chart.as_json() for chart in found}}
    names = [_escape(archive.path.name) for archive in (left, right)]
    parts = (
        _first(verdict, held), _list("Why they cannot be compared", verdict.reasons), _causes(verdict), _quantities(left, right, verdict),
        _list("Notes", verdict.notes), _charts([drawn(chart, steps, first) for chart in found], held, first=first, many=len(steps) > MANY),
        _glance(left, right), _manifests(sections(left, right)),
    )  # fmt: skip
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(script)}">'
        f"<title>{verdict.verdict}: {names[0]} and {names[1]}</title><style>{style}</style></head><body>"
        f'<header><span class="badge {verdict.verdict}">{verdict.verdict.replace("_", " ")}</span>'
        f"<h1>{_headline(verdict)}</h1>"
        f'<p class="lead"><span class="side left">left</span> <b>{names[0]}</b></p>'
        f'<p class="lead"><span class="side right">right</span> <b>{names[1]}</b></p></header><main>'
        + "".join(parts)
        + f"</main><footer>{_footer(left, right)}</footer>"
        f'<script type="application/json" id="data">{_json(data)}</script><script>{script}</script></body></html>\n'
    )


def _policy(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def _headline(verdict: Verdict) -> str:
    first = verdict.first_difference
    if verdict.verdict != "DIFFERENT" or first is None:
        detail = verdict.detail if verdict.verdict in {"IDENTICAL", "WITHIN_TOLERANCE"} else verdict.reasons[0]
        return f"{WORDS[verdict.verdict]}: {_escape(detail)}"
    where = f"first at step {first.step}" if first.step is not None else "after training"
    what = FIELDS.get(first.field, first.field) + (f" of {first.name}" if first.name else "")
    likely = f" — likely because of {verdict.causes[0].text}" if verdict.causes else ""
    return f"{WORDS[verdict.verdict]}, {where}, in {_escape(what)}{_escape(likely)}"


def _first(verdict: Verdict, held: Allowance | None) -> str:
    first = verdict.first_difference
    if first is None:
        return ""
    facts = "".join(f"<div><dt>{title}</dt><dd>{value}</dd></div>" for title, value in _first_facts(first))
    rows = verdict.divergence.around if verdict.divergence else ()
    title = "First value beyond what was allowed" if held is not None else "First difference"
    if verdict.verdict != "DIFFERENT":
        title = "First value that is not equal"
    return f'<section><h2>{title}</h2><dl class="first">{facts}</dl>{_around(rows, first.step)}</section>'


def _first_facts(first: FirstDifference) -> Iterator[tuple[str, str]]:
    yield "step", "after training" if first.step is None else str(first.step)
    yield "quantity", _escape(FIELDS.get(first.field, first.field) + (f" {first.name}" if first.name else ""))
    for side, value in (("left", first.left), ("right", first.right)):
        small = f"<small class=mono>{_escape(value)}</small>".replace("class=mono", 'class="mono"')
        short = decimal(value) if first.field in FLOAT_FIELDS else shown(value)
        yield f'<span class="side {side}">{side}</span>', _escape(short) + (small if short != value else "")
    if first.ulps is not None:
        yield "distance", _escape(counted(first.ulps))
    yield "rank", "merged over the ranks" if first.rank is None else str(first.rank)


def _around(rows: Sequence[Row], at: int | None) -> str:
    if not rows:
        return ""
    head = ("step", "batch", "loss, left", "loss, right", "ulps", "gradient norm, left", "right", "ulps")
    body = ""
    for row in rows:
        cells = ["same" if row.equal_batch else "other", *_pair(row.loss), *_pair(row.grad_norm)]
        marked = ' class="at"' if row.step == at else ""
        body += f"<tr{marked}><th>{row.step}</th>" + "".join(f"<td>{_escape(cell)}</td>" for cell in cells) + "</tr>"
    titles = "".join(f"<th>{title}</th>" for title in head)
    return f'<div class="scroll"><table class="num"><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'


def _pair(values: tuple[str, str]) -> tuple[str, str, str]:
    left, right = values
    distance = ulps(left, right)
    return decimal(left), "=" if left == right else decimal(right), ABSENT if distance is None else spelt(distance)


def _causes(verdict: Verdict) -> str:
    if not verdict.causes:
        if verdict.verdict != "DIFFERENT":
            return ""
        return "<section><h2>Likely causes</h2><p>The manifests name no cause: they agree in all that could decide a value.</p></section>"  # fmt: skip
    rows = ""
    for number, cause in enumerate(verdict.causes):
        likely = ' class="likely"' if number == 0 else ""
        rows += (
            f"<tr{likely}><th>{_escape(cause.kind.replace('_', ' '))}</th><td>{_escape(cause.name)}</td>"
            f'<td data-side="left">{_escape(cause.left) or ABSENT}</td><td data-side="right">{_escape(cause.right) or ABSENT}</td></tr>'
        )
    head = '<thead><tr><th>kind</th><th>what</th><th class="left">left</th><th class="right">right</th></tr></thead>'
    return f'<section><h2>What differs, likeliest cause first</h2><table class="causes">{head}<tbody>{rows}</tbody></table></section>'


def _quantities(left: Archive, right: Archive, verdict: Verdict) -> str:
    if not (left.finished and right.finished):
        return ""
    found = (verdict.divergence or divergence(left, right, None)).quantities
    rows = [(FIELDS.get(item.field, item.field), item.text()) for item in found]
    rows.append(("what ran", _ran(left, right)))
    body = "".join(f"<tr><th>{name}</th><td>{_escape(text)}</td></tr>" for name, text in rows)
    title = "What was compared" if verdict.verdict == "IDENTICAL" else "How the runs part"
    return f"<section><h2>{title}</h2><table><tbody>{body}</tbody></table></section>"


def _ran(left: Archive, right: Archive) -> str:
    """Kernels, attention and Liger against the locks."""
    wrong = [f"{side}: {item}" for side, archive in (("left", left), ("right", right)) for item in departures(archive)]
    return "; ".join(wrong) or "the locked kernels, attention and Liger, in both"


def _list(title: str, items: Sequence[str]) -> str:
    body = "".join(f"<li>{_escape(item)}</li>" for item in items)
    return f"<section><h2>{title}</h2><ul>{body}</ul></section>" if items else ""


def _charts(figures: Sequence[str], held: Allowance | None, *, first: int | None, many: bool) -> str:
    near = '<button type="button" data-near>Around the first difference</button>' if first is not None else ""
    band = "<span>shaded: the band that the right run is held to</span>" if isinstance(held, Bands) else ""
    tools = (
        f'<div class="tools"><span class="side left">left</span><span class="side right">right</span>{band}'
        f'<span class="js-only">point at a chart for its values, drag over it to zoom</span><span class="js-only">{near} '
        '<button type="button" data-reset disabled>Whole run</button></span></div>'
    )
    return f'<section><h2>Step by step</h2>{tools}<div class="charts{" many" if many else ""}">{"".join(figures)}</div></section>'


def _glance(left: Archive, right: Archive) -> str:
    rows = ""
    for name, values in _glances(left, right):
        one, two = (_escape(value) or ABSENT for value in values)
        kind = "same" if one == two else "other"
        rows += f'<tr class="{kind}"><th>{name}</th><td>{one}</td><td>{two}</td></tr>'
    head = '<thead><tr><th></th><th class="left">left</th><th class="right">right</th></tr></thead>'
    return f'<section><h2>Both runs at a glance</h2><table class="pair">{head}<tbody>{rows}</tbody></table></section>'


def _glances(left: Archive, right: Archive) -> Iterator[tuple[str, list[object]]]:
    summaries, sides = [show(archive) for archive in (left, right)], [left.manifest, right.manifest]
    yield "state", [item.state for item in summaries]
    yield "started (UTC)", [item.started for item in summaries]
    yield "steps", [item.steps for item in summaries]
    yield "training loss", [_change(item.loss_first, item.loss_last) for item in summaries]
    yield "held-out loss", [_change(item.loss_before, item.loss_after) for item in summaries]
    yield "device", [item.device for item in summaries]
    yield "driver", [side.driver for side in sides]
    yield (
        "processes × threads",
        [f"{side.launch.get('world_size', ABSENT)} × {side.device.threads or ABSENT}" for side in sides],
    )
    yield "attention", [side.attention.used for side in sides]
    yield "engine", [side.engine for side in sides]
    yield "environment", ["locked" if side.environment.locked else "recorded, not locked" for side in sides]
    yield "lock", [side.lock_sha256 for side in sides]
    yield "image", [side.image.config_digest for side in sides]
    yield "archive sha256", [archive.sha256 for archive in (left, right)]


def _change(first: float | None, last: float | None) -> str | None:
    if first is None and last is None:
        return None
    return " → ".join("?" if value is None else f"{value:.6g}" for value in (first, last))


def _manifests(found: Sequence[Section]) -> str:
    count = sum(section.differences for section in found)
    total = sum(len(section.facts) for section in found)
    body = "".join(_section(section) for section in found)
    tools = (
        f'<div class="tools"><span>{count} of {total} recorded facts differ</span><span class="js-only"><label>'
        f'<input type="checkbox" data-only{" checked" if count else ""}> only differences</label> '
        '<button type="button" data-open>Open or close all</button></span></div>'
    )
    return f'<section class="manifests"><h2>Both manifests, side by side</h2>{tools}{body}</section>'


def _section(section: Section) -> str:
    number = section.differences
    told = f"<em>{number} differ{'s' if number == 1 else ''}</em>" if number else ""
    rows = "".join(
        f'<tr class="{"same" if fact.same else "other"}"><th>{_escape(fact.name)}</th><td>{_escape(fact.left)}</td>'
        f"<td>{_escape(fact.right)}</td></tr>"
        for fact in section.facts
    )
    head = '<thead><tr><th></th><th class="left">left</th><th class="right">right</th></tr></thead>'
    return (
        f'<details class="{"other" if number else "same"}"{" open" if number else ""}><summary>{_escape(section.title)}'
        f"<span>{len(section.facts)}</span>{told}</summary>"
        f'<table class="pair">{head}<tbody>{rows}</tbody></table></details>'
    )


def _footer(left: Archive, right: Archive) -> str:
    digests = "".join(
        f"<p>{side}: {_escape(archive.path.name)}, archive sha256 <code>{archive.sha256 or 'none'}</code></p>"
        for side, archive in (("left", left), ("right", right))
    )
    return (
        f"{digests}<p>Made by kitbuild {__version__} from the two archives alone. Floats are compared by their bits; an ulp "
        "is a step between neighbouring numbers. The page is one file, loads nothing, and is the same for the same archives.</p>"
    )


def _json(value: object) -> str:
    """For a script element: no text in it can end the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _escape(value: object) -> str:
    return html.escape("" if value is None else str(value))
