"""A comparison as one HTML file in the style of the measuring reports: no other file, no script."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from chabok.choose.figure import standalone, svg
from chabok.choose.table import columns, methods, remarks
from chabok.measure.report.page import POLICY, STYLE

if TYPE_CHECKING:
    from chabok.choose.compare import Comparison


def to_html(found: Comparison) -> str:
    """The page."""
    body = [
        _head(found),
        _list("Which one", found.sentences, "verdict-list"),
        _warned("Notes", remarks(found)),
        f"<section><h2>Side by side</h2>{table(found)}{_meanings()}</section>",
        _chart(found),
        _list("Over the budget", [f"{label}: {'; '.join(why)}" for label, why in found.crossed.items()]),
        _list("Quality, pair by pair", [pair.words for pair in found.pairs]),
        _list("How quality was found out", methods(found)),
        _list("Computed from", [path for member in found.members for path in member.raw]),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(_title(found))}</title>\n<style>\n{STYLE.read_text(encoding='utf-8')}</style>\n</head>\n"
        "<body>\n<main>\n" + "\n".join(part for part in body if part) + "\n</main>\n</body>\n</html>\n"
    )


def _chart(found: Comparison) -> str:
    chart = svg(found)
    if not chart:
        return ""
    text = f"Blue: no other is as good in {', '.join(found.axes)} and better in one."
    return (
        f'<div class="charts"><figure class=wide><h2>The Pareto front</h2>{chart}'
        f"<figcaption>{escape(text)}</figcaption></figure></div>"
    )


def notebook(found: Comparison) -> str:
    """What a notebook shows: sentences, table, chart."""
    said = "".join(f"<li>{escape(text)}</li>" for text in found.sentences)
    return f"<div><ul>{said}</ul>{table(found)}{standalone(found)}</div>"


def _title(found: Comparison) -> str:
    return "Compared: " + ", ".join(member.label for member in found.members)


def _head(found: Comparison) -> str:
    plan = found.plan
    work = f"{len(plan.prompts)} prompts, answers of {plan.output_tokens} tokens at most"
    asked = f" · questions: {', '.join(plan.evals)}" if plan.evals else ""
    asked += f" ({plan.limit} of each, seed {plan.seed})" if plan.evals and plan.limit else ""
    state = "" if found.complete else " · not complete"
    return f"<header><h1>{escape(_title(found))}</h1><p>{escape(work + asked + state)}</p></header>"


def table(found: Comparison) -> str:
    """The members side by side; what is over the budget is struck through."""
    shown = columns(found)
    heads = "".join(f'<th scope="col" title="{escape(c.meaning)}">{escape(c.heading)}</th>' for c in shown)
    rows = []
    for member in found.members:
        cells = [escape(column.text(member)) for column in shown]
        if member.label in found.crossed:
            cells = [f"<s>{cell}</s>" for cell in cells]
        if member.label in found.front:
            cells[0] += ' <span class="swatch a" title="on the Pareto front"></span>'
        rest = "".join(f"<td>{cell}</td>" for cell in cells[1:])
        rows.append(f'<tr><th scope="row">{cells[0]}</th>{rest}</tr>')
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Side by side"><table>'
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _meanings() -> str:
    from chabok.choose.table import COLUMNS

    items = "".join(
        f"<li>{escape(c.heading)}: {escape(c.meaning)}</li>" for c in COLUMNS if c.heading and c.meaning
    )
    return f'<ul class="notes">{items}</ul>'


def _list(heading: str, texts: Sequence[str], kind: str = "") -> str:
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f'<section class="{kind}"><h2>{escape(heading)}</h2><ul>{items}</ul></section>' if texts else ""


def _warned(heading: str, texts: Sequence[str]) -> str:
    return _list(heading, texts, "warned")
