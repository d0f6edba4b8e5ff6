"""The report of `commlib compare` as one HTML page that loads nothing: figures, sortable tables, assumptions."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from commlib.reports.advice import NEAR, advice, forms_left_out, losses, misfits, network_advice, presets_of
from commlib.reports.assumptions import ACCURACY, CLASSES, LIMITS, UNTRIED, assumptions, machines, summary
from commlib.reports.rows import Row, explained, rows_of, sent
from commlib.simulation.compare import Comparison

_COMPUTE, _EXPOSED, _LIMIT = "#9aa5b1", "#3b6fb6", "#b3261e"
#: Sizes in a figure, in pixels: of a line of text, of a bar, and the gap below it.
_LINE, _BAR, _GAP = 15, 12, 7
#: Width of the longest bar, in percent. The remaining width is for its value.
_LONGEST = 80.0

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.45 system-ui, sans-serif; color: #1c1f23; background: #fff; max-width: 1180px;
  margin: 0 auto; padding: 16px; overflow-wrap: anywhere; }
h1 { font-size: 1.5em; line-height: 1.2; } h2 { font-size: 1.2em; margin-top: 2em; } h3 { font-size: 1em; }
.advice { border-left: 4px solid #3b6fb6; background: #f1f5fa; padding: 10px 14px; }
figure { margin: 16px 0; max-width: 760px; } figcaption, .note { font-size: 13px; color: #4a5058; }
figure svg { font-size: 12px; display: block; } figure img { max-width: 100%; height: auto; }
.key { display: inline-block; margin-right: 12px; }
.key i { display: inline-block; width: 11px; height: 11px; margin-right: 4px; vertical-align: -1px; }
.table { overflow-x: auto; border: 1px solid #d5dae0; background:
  linear-gradient(to left, #fff 50%, #fff0) right / 48px 100% no-repeat local,
  linear-gradient(to left, #9aa5b1, #fff0) right / 16px 100% no-repeat; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: 4px 7px; text-align: right; white-space: nowrap; border-bottom: 1px solid #eceff2; }
tbody tr:hover > * { background: #f1f5fa; }
th:first-child, th[data-text], .class { text-align: left; }
thead th { white-space: normal; vertical-align: bottom; min-width: 62px; }
tbody th { font-weight: normal; white-space: normal; min-width: 130px; }
tr > :first-child { position: sticky; left: 0; background: #fff; }
.variant th { padding-left: 20px; }
th button { font: inherit; font-weight: 600; border: 0; background: none; padding: 0; cursor: pointer; color: #1d4f91; }
th[aria-sort=ascending] button::after { content: " \\25b2"; }
th[aria-sort=descending] button::after { content: " \\25bc"; }
dt { font-weight: 600; margin-top: 8px; } dd { margin-left: 0; }
pre { white-space: pre-wrap; background: #f5f6f8; padding: 10px; }
"""
# A click on a title sorts by it, ascending first; cells without a number, such as "?", are last in both directions.
_SCRIPT = """
const number = text => parseFloat(text.replace(/[,%+]/g, ""));
for (const button of document.querySelectorAll("th button")) button.onclick = () => {
  const title = button.parentNode, body = title.closest("table").tBodies[0], at = title.cellIndex;
  const sign = title.ariaSort === "ascending" ? -1 : 1;
  for (const other of title.parentNode.cells) other.removeAttribute("aria-sort");
  title.ariaSort = sign > 0 ? "ascending" : "descending";
  const text = row => row.cells[at].textContent, is_text = title.dataset.text !== undefined;
  const compare = (a, b) => {
    if (is_text) return sign * text(a).localeCompare(text(b));
    const [x, y] = [number(text(a)), number(text(b))];
    return isNaN(x) || isNaN(y) ? isNaN(x) - isNaN(y) : sign * (x - y);
  };
  body.append(...[...body.rows].sort(compare));
};
"""
#: Titles of columns that sort as text.
_TEXTS = ("algorithm", "class")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(comparisons: Sequence[Comparison], command: str, plots: Sequence[Path] = ()) -> str:
    """Return the page.

    Args:
        comparisons: One workload on one or several networks.
        command: The command that made the comparisons.
        plots: PNG files to embed.
    """
    workload = comparisons[0].workload.name
    title = f"{workload} on {', '.join(dict.fromkeys(each.network.name for each in comparisons))}"
    parts = [
        f"<h1>{escape(title)}: simulated training steps</h1>",
        *_paragraphs([network_advice(comparisons)], "advice"),
        *(part for each in comparisons for part in _section(each)),
        *(["<h2>Plots</h2>"] if plots else []),
        *map(_picture, plots),
        "<h2>Classes</h2>",
        _definitions(CLASSES),
        "<h2>Accuracy and limits</h2>",
        *_paragraphs([ACCURACY, LIMITS, UNTRIED]),
        "<h2>Command</h2>",
        f"<pre>{escape(command)}</pre>",
    ]
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">',
            f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
            *parts,
            f"<script>{_SCRIPT}</script>\n</body>\n</html>\n",
        ]
    )


def _section(comparison: Comparison) -> Iterator[str]:
    rows = rows_of(comparison)
    yield f"<h2>{escape(comparison.network.name)}</h2>"
    yield from _paragraphs([summary(comparison) + ".", machines(comparison)])
    yield from _paragraphs([advice(comparison)], "advice")
    yield _figure(comparison, [row for row in rows if not row.is_variant])
    yield _table(rows)
    forms = forms_left_out(comparison)
    refused = [f"Not simulated: {name}: {reason}" for name, reason in comparison.refused.items()]
    notes = [note(comparison) for note in (sent, explained, presets_of, losses, misfits)]
    yield from _paragraphs([*notes, *refused, forms], "note")
    yield "<h3>Assumptions</h3>"
    yield _definitions(assumptions(comparison))


def _paragraphs(texts: Sequence[str], kind: str = "") -> Iterator[str]:
    yield from (f'<p class="{kind}">{escape(text)}</p>' for text in texts if text)


def _definitions(found: Mapping[str, str]) -> str:
    lines = [f"<dt>{escape(subject)}</dt><dd>{escape(text)}</dd>" for subject, text in found.items()]
    return "\n".join(["<dl>", *lines, "</dl>"])


def _table(rows: Sequence[Row]) -> str:
    """Return a table that sorts by a click on a title."""
    titles = ["algorithm", *rows[0].cells]
    heads = [
        f"<th scope=col{' data-text' * (title in _TEXTS)}><button>{escape(title)}</button></th>" for title in titles
    ]
    lines = ['<div class="table"><table>', f"<thead><tr>{''.join(heads)}</tr></thead>", "<tbody>", *map(_line, rows)]
    return "\n".join([*lines, "</tbody></table></div>"])


def _line(row: Row) -> str:
    kinds = {"class": " class=class"}
    cells = [f"<td{kinds.get(title, '')}>{escape(cell)}</td>" for title, cell in row.cells.items()]
    name = ",<br>".join(_breakable(name) for name in row.names)
    return f"<tr{' class=variant' * row.is_variant}><th scope=row>{name}</th>{''.join(cells)}</tr>"


def _breakable(name: str) -> str:
    """Return a name that may break after a bracket or an underscore."""
    return re.sub(r"([(_])", r"\1<wbr>", escape(name))


def _figure(comparison: Comparison, rows: Sequence[Row]) -> str:
    """Return bars of the step times: computation, and communication that is not hidden behind it.

    Widths are percentages and texts have a fixed size, so that the figure is readable at any width.
    """
    ordered = sorted(rows, key=lambda row: row.result.step_s)
    limit_s = NEAR * comparison.ddp.compute_s
    longest_s = max(limit_s, *(row.result.step_s for row in rows))
    scale = _LONGEST / longest_s
    shapes, y = [], 0
    for row in ordered:
        for name in row.names:
            y += _LINE
            shapes.append(f'<text x="0" y="{y - 4}">{escape(name)}</text>')
        result = row.result
        exposed_s = min(max(result.exposed_s, 0.0), result.step_s)
        compute_s = result.step_s - exposed_s
        for start_s, length_s, colour in ((0.0, compute_s, _COMPUTE), (compute_s, exposed_s, _EXPOSED)):
            box = f'x="{start_s * scale:.2f}%" y="{y}" width="{length_s * scale:.2f}%" height="{_BAR}"'
            shapes.append(f'<rect {box} fill="{colour}"/>')
        place = max(result.step_s, limit_s) * scale + 1  # right of the line, too
        shapes.append(f'<text x="{place:.2f}%" y="{y + _BAR - 2}">{row.cells["step ms"]} ms</text>')
        at, bottom = f"{limit_s * scale:.2f}%", y + _BAR
        shapes.append(f'<line x1="{at}" x2="{at}" y1="{y}" y2="{bottom}" stroke="{_LIMIT}" stroke-width="2"/>')
        y = bottom + _GAP
    label = f"Time of a training step on {comparison.network.name}"
    return "\n".join(
        [
            f"<figure><figcaption><strong>{escape(label)}</strong>, in ms: the fastest compared form of each.<br>",
            *(_key(_COMPUTE, "computation"), _key(_EXPOSED, "exposed communication")),
            _key(_LIMIT, f"line: {NEAR - 1:.0%} above a step without communication") + "</figcaption>",
            f'<svg width="100%" height="{y}" role="img" aria-label="{escape(label)}">',
            *shapes,
            "</svg></figure>",
        ]
    )


def _key(colour: str, text: str) -> str:
    return f'<span class="key"><i style="background: {colour}"></i>{escape(text)}</span>'


def _picture(path: Path) -> str:
    content = base64.b64encode(path.read_bytes()).decode("ascii")
    return f'<figure><img src="data:image/png;base64,{content}" alt="{escape(path.stem)}"></figure>'
