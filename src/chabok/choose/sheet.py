"""Charts of this package on a page of their own, in a notebook, or as one SVG file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from chabok.measure.report.charts import Chart
from chabok.measure.report.page import POLICY, STYLE

ALONE = (
    "text{font:12px system-ui,sans-serif;fill:#5d636e}.grid{stroke:#eceef0;fill:none}.axis{stroke:#9aa1ab;"
    "fill:none}.line{fill:none;stroke-width:2}.line.a{stroke:#1a66c9}.line.b{stroke:#c2520b}"
    ".line.limit,.line.middle{stroke:#b3122e;stroke-width:1;stroke-dasharray:4 3}.dot.a{fill:#1a66c9}"
    ".dot.b{fill:#c2520b}.band{opacity:.18}.band.a{fill:#1a66c9}.s0{fill:#8f98a6}.s1{fill:#1a66c9}"
    ".s2{fill:#12908a}.s3{fill:#c2520b}.s4{fill:#8a4bb8}.s5{fill:#5b7a1f}"
)
"""The colours of a chart that is shown without the page's style sheet."""


def alone(svg: str) -> str:
    """An SVG that brings its own style, as a file or for a notebook."""
    head, _, rest = svg.partition(">")
    if "xmlns" not in head:
        head += ' xmlns="http://www.w3.org/2000/svg"'
    return f"{head}><style>{ALONE}</style>{rest}"


def table(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """A table in HTML; the first cell of a row heads it."""
    heads = "".join(f'<th scope="col">{escape(text)}</th>' for text in headings)
    rows = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in cells
    )
    return f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'


def notebook(charts: Sequence[Chart]) -> str:
    """Charts with their tables, as part of somebody else's page."""
    return "".join(
        f"<figure><figcaption><b>{escape(chart.heading)}</b></figcaption>{alone(chart.svg)}"
        f"{table(chart.headings, chart.cells)}<p>{escape(chart.text)}</p></figure>"
        for chart in charts
    )


def page(
    title: str, verdict: Sequence[tuple[str, str]], charts: Sequence[Chart], notes: Sequence[str] = ()
) -> str:
    """One HTML file that loads and runs nothing: a verdict, charts with their tables, and notes."""
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in verdict)
    figures = "".join(map(_figure, charts))
    told = "".join(f"<li>{escape(text)}</li>" for text in notes)
    warned = f'<section class="warned"><h2>Notes</h2><ul>{told}</ul></section>' if told else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{STYLE.read_text(encoding='utf-8')}</style>\n</head>\n"
        f'<body>\n<main>\n<header><h1>{escape(title)}</h1></header>\n<section aria-label="Verdict">'
        f'<dl class="verdict">{items}</dl></section>\n{warned}<div class="charts">{figures}</div>\n'
        "</main>\n</body>\n</html>\n"
    )


def _figure(chart: Chart) -> str:
    legend = "".join(
        f'<li><span class="swatch {escape(kind)}"></span>{escape(text)}</li>' for kind, text in chart.legend
    )
    return (
        f"<figure{' class=wide' if chart.wide else ''}><h2>{escape(chart.heading)}</h2>{chart.svg}"
        + (f'<ul class="legend">{legend}</ul>' if legend else "")
        + f"<figcaption>{escape(chart.text)}</figcaption><details><summary>As a table</summary>"
        + table(chart.headings, chart.cells)
        + "</details></figure>"
    )
