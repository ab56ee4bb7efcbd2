"""A report for a terminal: in plain words first, then the table, then how to repeat it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from chabok.cli.terminal import harmless
from chabok.measure.report.tables import Column, columns
from chabok.measure.report.words import failures, footnotes, lengths, sentences, title, warnings

if TYPE_CHECKING:
    from rich.console import Console

    from chabok.measure.report import Report

DISPENSABLE = ("Goodput/s", "E2E p50", "p99", "Lateness p99", "Cached", "Worst gap", "p95", "Requests")
"""Columns left out one after the other where a terminal is too narrow for all."""


def show(report: Report, out: Console, files: Sequence[Path]) -> None:
    """Print a report for a person. files: what was written."""

    def say(text: str = "", style: str | None = None) -> None:
        out.print(harmless(text), style=style, markup=False, highlight=False)

    about = lengths(report)
    say(f"\n{title(report)}" + (f"; {about}" if about else "") + "\n", "dim")
    verdict = sentences(report)
    width = max((len(name) for name, _ in verdict), default=0) + 2
    for name, text in verdict:
        say(f"{name + ':':{width}} {text}")
    if not verdict:
        say("Nothing was measured.")
    if report.levels:
        say()
        _table(report, out)
        for text in footnotes(report):
            say(text, "dim")
    for text in failures(report):
        say(f"Failed: {text}", "red")
    for text in warnings(report):
        say(f"Note: {text}", "yellow")
    if report.command:
        say(f"\nAgain:   {report.command}", "dim")
    if files:
        say(f"Written: {', '.join(str(file) for file in files)}", "dim")


def _table(report: Report, out: Console) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    shown = fitting(report, out.width)
    for place, column in enumerate(shown):
        table.add_column(column.heading, justify="right" if place else "left", no_wrap=True)
    for level in report.levels:
        style = "red" if level.kept and not level.met else None
        table.add_row(*(harmless(column.text(level)) for column in shown), style=style)
    out.print(table)


def fitting(report: Report, width: int) -> list[Column]:
    """The columns for which there is room."""
    found = columns(report)
    for heading in DISPENSABLE:
        if _width(report, found) <= width:
            break
        found = [column for column in found if column.heading != heading]
    return found


def _width(report: Report, shown: Sequence[Column]) -> int:
    cells = ([column.heading, *(column.text(level) for level in report.levels)] for column in shown)
    return sum(max(map(len, each)) + 2 for each in cells) - 2
