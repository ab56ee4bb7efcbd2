"""A report as one HTML file: no other file, no request, no script."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from chabok.measure.report.account import Found
from chabok.measure.report.charts import Chart, charts
from chabok.measure.report.data import Report
from chabok.measure.report.definitions import METRICS
from chabok.measure.report.numbers import seconds, share
from chabok.measure.report.tables import columns
from chabok.measure.report.words import failures, footnotes, lengths, sentences, title, warnings

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Whatever a name or an error contains, a browser loads and runs nothing because of it."""


STYLE = Path(__file__).with_name("page.css")


def to_html(found: Found) -> str:
    """The page."""
    report = found.report
    body = [
        _head(report),
        _verdict(report),
        _warned("Notes", warnings(report)),
        _warned("Failures", failures(report)),
        _table(report),
        _breakdown(report),
        _charts(charts(found)),
        _definitions(),
        _foot(report),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title(report))}</title>\n<style>\n{STYLE.read_text(encoding='utf-8')}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main>\n</body>\n</html>\n"
    )


def _head(report: Report) -> str:
    about = [lengths(report), report.server, report.started_at.replace("T", " ")]
    about += [] if report.complete else ["not complete"]
    shown = " · ".join(escape(text) for text in about if text)
    where = escape(report.url) + (f" · {escape(report.dialect)}" if report.dialect else "")
    name = escape(report.model or "A model")
    return f'<header><h1>{name}</h1><p class="where">{where}</p><p>{shown}</p></header>'


def _verdict(report: Report) -> str:
    rows = sentences(report)
    if not rows:
        return "<p>Nothing was measured.</p>"
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in rows)
    return f'<section aria-label="Verdict"><dl class="verdict">{items}</dl></section>'


def _warned(heading: str, texts: Sequence[str]) -> str:
    if not texts:
        return ""
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f'<section class="warned"><h2>{escape(heading)}</h2><ul>{items}</ul></section>'


def _table(report: Report) -> str:
    if not report.levels:
        return ""
    shown = columns(report)
    heads = "".join(
        f'<th scope="col"{_meaning(column.metric)}>{escape(column.heading)}</th>' for column in shown
    )
    lines = []
    for level in report.levels:
        cells = [column.text(level) for column in shown]
        kind = ' class="missed"' if level.kept and not level.met else ""
        lines.append(_row(cells, kind))
    notes = "".join(f"<li>{escape(text)}</li>" for text in footnotes(report))
    return (
        f'<section><h2>Loads</h2><div class="scroll" tabindex="0" role="region" aria-label="Loads"><table>'
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
        f'<ul class="notes">{notes}</ul></section>'
    )


def _row(cells: Sequence[str], kind: str = "") -> str:
    """A row of a table, headed by its first cell."""
    rest = "".join(f"<td>{escape(cell)}</td>" for cell in cells[1:])
    return f'<tr{kind}><th scope="row">{escape(cells[0])}</th>{rest}</tr>'


def _meaning(metric: str) -> str:
    return f' title="{escape(METRICS[metric].text)}"' if metric in METRICS else ""


def _breakdown(report: Report) -> str:
    stages = [stage for stage in report.breakdown.first_token if stage.seconds > 0]
    total = sum(stage.seconds for stage in stages)
    if not total:
        return ""
    parts, items, left = [], [], 0.0
    for place, stage in enumerate(stages):
        width = stage.seconds / total * 1000
        label = f"{stage.name}: {seconds(stage.seconds)}, {share(stage.seconds / total)}"
        parts.append(
            f'<rect class="bar s{place % 6}" x="{left:.1f}" y="0" width="{max(width - 1.5, 0.5):.1f}" '
            f'height="26"><title>{escape(label)}</title></rect>'
        )
        left += width
        origin = {"measured": "measured", "server": "as the server tells", "estimate": "estimated"}[
            stage.origin
        ]
        items.append(
            f'<li><span class="swatch s{place % 6}"></span>{escape(stage.name)} '
            f"<b>{seconds(stage.seconds)}</b> {share(stage.seconds / total)}, {origin}</li>"
        )
    told = "; ".join(f"{stage.name} {seconds(stage.seconds)}" for stage in stages)
    return (
        "<section><h2>Where the time to the first token goes</h2>"
        '<svg class="stack" viewBox="0 0 1000 26" preserveAspectRatio="none" role="img" '
        'aria-labelledby="stages-title stages-text">'
        '<title id="stages-title">Stages of the time to first token</title>'
        f'<desc id="stages-text">{escape(told)}</desc>{"".join(parts)}</svg>'
        f'<ul class="legend">{"".join(items)}</ul>'
        '<p class="hint">One user; medians over requests.</p></section>'
    )


def _charts(made: Sequence[Chart]) -> str:
    return f'<div class="charts">{"".join(map(_figure, made))}</div>' if made else ""


def _figure(chart: Chart) -> str:
    legend = "".join(
        f'<li><span class="swatch {escape(kind)}"></span>{escape(text)}</li>' for kind, text in chart.legend
    )
    heads = "".join(f'<th scope="col">{escape(text)}</th>' for text in chart.headings)
    rows = "".join(_row(row) for row in chart.cells)
    svg = chart.svg
    if chart.wide:
        label = escape(chart.heading)
        svg = f'<div class="scroll" tabindex="0" role="region" aria-label="{label}">{svg}</div>'
    return (
        f"<figure{' class=wide' if chart.wide else ''}><h2>{escape(chart.heading)}</h2>{svg}"
        + (f'<ul class="legend">{legend}</ul>' if legend else "")
        + f"<figcaption>{escape(chart.text)}</figcaption>"
        f'<details><summary>As a table</summary><div class="scroll"><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div></details></figure>"
    )


def _definitions() -> str:
    items = "".join(
        f"<div><dt>{escape(metric.title)}</dt><dd>{escape(metric.text)}</dd></div>"
        for metric in METRICS.values()
    )
    heading = "<summary>What the numbers mean</summary>"
    return f'<section><details class="all">{heading}<dl>{items}</dl></details></section>'


def _foot(report: Report) -> str:
    command = f"<p>Again:</p><pre>{escape(report.command)}</pre>" if report.command else ""
    raw = f"<p>Computed from {escape(report.timelines)} by Chabok.</p>" if report.timelines else ""
    return f"<footer>{command}{raw}</footer>"
