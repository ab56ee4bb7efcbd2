"""A comparison for a terminal: the sentences first, then the table, the chart, and what has to be known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from chabok.choose.figure import text as chart
from chabok.choose.table import Column, columns, methods, remarks
from chabok.cli.terminal import harmless
from chabok.measure.report.numbers import seconds

if TYPE_CHECKING:
    from rich.console import Console

    from chabok.choose.compare import Comparison

DISPENSABLE = (
    "longest silence within any answer",
    "the word for the pace",
    "to answer: output tokens of an answer, mean",
)
"""Meanings of columns that are left out one after the other where a terminal is too narrow for all."""


def show(found: Comparison, out: Console, files: Sequence[Path]) -> None:
    """Print a comparison for a person. files: what was written."""

    def say(text: str = "", style: str | None = None) -> None:
        out.print(harmless(text), style=style, markup=False, highlight=False)

    say()
    for text in found.sentences:
        say(text)
    say()
    _table(found, out)
    for label, why in found.crossed.items():
        say(f"✗ {label}: {'; '.join(why)}", "red")
    lines = chart(found, min(out.width, 80))
    if lines:
        say()
    for line in lines:
        say(line)
    said = [pair.words for pair in found.pairs] + methods(found)
    if said:
        say()
    for text in said:
        say(text)
    for text in remarks(found):
        say(f"Note: {text}", "yellow")
    if not found.complete:
        say(f"Not complete. Go on with: chabok compare --resume {found.folder}", "yellow")
    say(f"\nWritten: {', '.join(map(str, files))}; raw events beside them", "dim")


def _table(found: Comparison, out: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    shown = columns(found)
    for meaning in DISPENSABLE:
        if _width(found, shown) <= out.width:
            break
        shown = [column for column in shown if column.meaning != meaning]
    if _width(found, shown) > out.width:  # without its interval, which the page and the data have
        short = {"Answer": lambda member: seconds(member.answer_s)}
        shown = [column._replace(text=short.get(column.heading, column.text)) for column in shown]
    for place, column in enumerate(shown):
        table.add_column(column.heading, justify="right" if place else "left", no_wrap=True)
    for member in found.members:
        over = member.label in found.crossed
        mark = "✗ " if over else "* " if member.label in found.front else "  "
        cells = [harmless(column.text(member)) for column in shown]
        cells[0] = mark + cells[0]
        table.add_row(*(Text(cell, style="strike" if over else "") for cell in cells))
    out.print(table)


def _width(found: Comparison, shown: Sequence[Column]) -> int:
    cells = ([column.heading, *(column.text(member) for member in found.members)] for column in shown)
    return sum(max(map(len, each)) + 2 for each in cells)  # the mark before each name is 2 wide, too
