"""``chabok diff``: runs side by side, and an exit code by which continuous integration can decide."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from chabok.cli.params import Parser, add_prices
from chabok.cli.report import limits_of, price_of
from chabok.cli.terminal import console, harmless
from chabok.errors import ChabokError, RequestError

if TYPE_CHECKING:
    from rich.console import Console

    from chabok.measure.conditions import Judged
    from chabok.measure.diff import Comparison
    from chabok.measure.report import Found

FINE, MET, MISUSE = 0, 1, 2
"""Exit codes: nothing to object to; a condition of --fail-if is met; what was asked cannot be answered."""
STYLES = {"better": "green", "worse": "red"}


def main(arguments: list[str]) -> int:
    """Run the command; the exit code."""
    found = parser().parse_args(arguments)
    try:
        return _diff(found)
    except ChabokError as error:
        print(f"chabok: {harmless(str(error))}", file=sys.stderr)
        return MISUSE
    except OSError as error:
        print(f"chabok: {harmless(f'{error.filename}: {error.strerror}')}", file=sys.stderr)
        return MISUSE


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = Parser(
        "chabok diff",
        description="Compare runs that `chabok bench` saved with the first of them: better, worse, or no "
        "measurable difference. Exit status: 0; 1 if a condition of --fail-if is met; 2 if runs cannot be "
        "read, compared or judged.",
        epilog="A condition is METRIC.STATISTIC [@ LOAD] > VALUE, with > >= < or <=: 'ttft.p95 > +10%' (the "
        "change since the first run), 'itl.p99 @ 8 users > 80ms' (the value itself; takes one run, too), "
        "'throughput < -5%', 'failed > 1%', 'cost.output > 0.20'.",
        allow_abbrev=False,
    )
    add = made.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="a run's file, or a folder: its newest run")
    add("--fail-if", action="append", default=[], metavar="CONDITION",
        help="exit with 1 if it is met; may be repeated")  # fmt: skip
    add("--surely", action="store_true", help="let a change count only where the difference is measurable")
    add("--anyway", action="store_true", help="compare although prompts or answers differ in length")
    add("--json", action="store_true", help="print the comparison as JSON")
    add("--slo", action="append", default=[], metavar="LIMIT",
        help="limits for the goodput of all runs (default: those of the first)")  # fmt: skip
    add_prices(made)
    return made


def _diff(found: argparse.Namespace) -> int:
    from chabok.measure.conditions import Condition
    from chabok.measure.diff import asides, unlike
    from chabok.measure.report import recompute

    conditions = [Condition.of(text) for text in found.fail_if]
    if len(found.runs) == 1 and not conditions:
        raise RequestError("one run can only be held to conditions (--fail-if); to compare, name two")
    price = price_of(found)
    runs = [recompute(found.runs[0], limits=limits_of(found.slo), price=price)]
    runs += [recompute(path, limits=runs[0].limits, price=price) for path in found.runs[1:]]
    notes: list[str] = []
    for path, run in zip(found.runs[1:], runs[1:]):
        if reasons := unlike(runs[0], run):
            text = f"{found.runs[0]} and {path} are of different loads: {'; '.join(reasons)}"
            if not found.anyway or reasons[-1].startswith("no load in common"):
                hint = "" if reasons[-1].startswith("no load") else "; --anyway compares them all the same"
                raise RequestError(text + hint)
            notes.append(text)
        notes += asides(runs[0], run)
    judged = [(each, each.judge(runs, surely=found.surely)) for each in conditions]
    met = [one for _, of in judged for one in of if one.met]
    if found.json:
        print(json.dumps(_plain(runs, [(each.text, of) for each, of in judged], notes), indent=2))
    else:
        out = console()
        for run in runs[1:]:
            _show(runs[0], run, out)
        for text in dict.fromkeys(notes):
            out.print(harmless(f"Note: {text}"), style="yellow", markup=False, highlight=False)
        for condition, of in judged:
            _conclude(condition.text, of, out)
    return MET if met else FINE


def _show(first: Found, run: Found, out: Console) -> None:
    from rich.table import Table

    from chabok.measure.diff import pairs

    names = _names(first, run)
    compared = 0
    for pair in pairs(first, run, seed=first.report.seed):
        table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left",
                      title=harmless(f"\n{pair.load}"), title_style="bold")  # fmt: skip
        table.add_column("", no_wrap=True)
        for name in (*names, "change", "95 % interval"):
            table.add_column(harmless(name), justify="right", no_wrap=True)
        table.add_column("verdict", no_wrap=True)
        for each in pair.comparisons:
            compared += each.difference is not None
            verdict = "too little to tell" if each.difference is None else each.difference.verdict
            table.add_row(*_cells(each), verdict, style=STYLES.get(verdict))
        out.print(table)
    out.print(
        f"\nOf {compared} comparisons at 95 % about {compared * 0.05:.2g} differ by chance alone. "
        "Intervals tell the chance within the runs, not what else changed between them.",
        style="dim",
        highlight=False,
    )


def _cells(each: Comparison) -> list[str]:
    from chabok.measure.report.numbers import UNKNOWN, change, shown

    unit = each.metric.unit
    title = each.metric.title + (f" {each.statistic}" if each.statistic else "")
    found = each.difference
    if found is None:
        return [title, shown(each.before, unit), shown(each.after, unit), UNKNOWN, UNKNOWN]
    points = " points" if each.points else " %"
    low, high = change(found.interval.low), change(found.interval.high)
    return [
        title,
        shown(each.before, unit),
        shown(each.after, unit),
        change(found.share).replace(" %", points),
        f"{low} to {high}",
    ]


def _names(first: Found, run: Found) -> tuple[str, str]:
    """What tells two runs apart: their models, their addresses, or their files."""
    for name in ("model", "url", "timelines", "started_at"):
        one, other = getattr(first.report, name), getattr(run.report, name)
        if one != other and one and other:
            return one, other
    return "before", "after"


def _conclude(condition: str, judged: Sequence[Judged], out: Console) -> None:
    met = [each for each in judged if each.met]
    text = f"\n{'FAILED' if met else 'fine'}: {condition}"
    out.print(harmless(text), style="bold red" if met else "green", markup=False, highlight=False)
    for each in met or judged:
        where = f"{each.run}, {each.load}" if each.load else each.run
        out.print(harmless(f"  {where}: {each.text}"), markup=False, highlight=False)


def _plain(
    runs: Sequence[Found], judged: Sequence[tuple[str, list[Judged]]], notes: list[str]
) -> dict[str, object]:
    """The comparison as plain data."""
    from chabok.measure.diff import pairs

    first = runs[0]
    return {
        "schema": "chabok.diff/1",
        "first": first.report.timelines,
        "runs": [
            {
                "run": run.report.timelines,
                "loads": [
                    {"load": pair.load, "comparisons": [_entry(each) for each in pair.comparisons]}
                    for pair in pairs(first, run, seed=first.report.seed)
                ],
            }
            for run in runs[1:]
        ],
        "conditions": [
            {
                "condition": text,
                "met": any(each.met for each in of),
                "judged": [{"run": x.run, "load": x.load, "text": x.text, "met": x.met} for x in of],
            }
            for text, of in judged
        ],
        "notes": list(dict.fromkeys(notes)),
    }


def _entry(each: Comparison) -> dict[str, object]:
    found = each.difference
    told: dict[str, object] = {
        "metric": each.name,
        "unit": each.metric.unit,
        "before": each.before,
        "after": each.after,
        "verdict": "too little to tell" if found is None else found.verdict,
    }
    if found is not None and abs(found.share) < float("inf"):
        told |= {"change": found.share, "low": found.interval.low, "high": found.interval.high}
    return told
