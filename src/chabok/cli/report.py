"""``chabok report``: a saved run in words and numbers, as a page, or as data; computed from its raw lines."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from chabok.cli.params import Parser, add_prices
from chabok.cli.terminal import console
from chabok.errors import RequestError

if TYPE_CHECKING:
    from chabok.measure.cost import Price
    from chabok.measure.report import Found
    from chabok.measure.slo import Limit

SUFFIXES = (".html", ".json", ".csv", ".md")


def main(arguments: list[str]) -> int:
    """Run the command; the exit code."""
    from chabok.measure.report import recompute

    found = parser().parse_args(arguments)
    for path in found.output:
        if path.suffix not in SUFFIXES:
            raise RequestError(f"{path}: a report is written as {', '.join(SUFFIXES)}")
    run = recompute(found.run, limits=limits_of(found.slo), price=price_of(found))
    for path in found.output:
        path.write_bytes(written(run, path.suffix).encode())
    if found.form is not None:
        sys.stdout.write(written(run, found.form))
    else:
        from chabok.cli.report_text import show

        show(run.report, console(), found.output)
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = Parser(
        "chabok report",
        description="Show a run that `chabok bench` saved, computed again from its raw lines.",
        allow_abbrev=False,
    )
    add = made.add_argument
    add_run(made)
    add("-o", "--output", type=Path, action="append", default=[], metavar="FILE",
        help="write a report; the ending says what: .html, .json, .csv, .md; may be repeated")  # fmt: skip
    form = made.add_mutually_exclusive_group()
    for flag, suffix in (("--json", ".json"), ("--csv", ".csv"), ("--markdown", ".md")):
        form.add_argument(
            flag, dest="form", action="store_const", const=suffix, help=f"print what {suffix} has"
        )
    add("--slo", action="append", default=[], metavar="LIMIT",
        help="other limits than those of the run, as ttft=500ms:p95; may be repeated")  # fmt: skip
    add_prices(made)
    return made


def add_run(made: argparse.ArgumentParser) -> None:
    """Add the run to be named, or the newest."""
    from chabok.measure.run import FOLDER

    made.add_argument("run", nargs="?", type=Path, default=Path(FOLDER), metavar="RUN",
                      help=f"a run's file, or a folder: its newest run (default: {FOLDER})")  # fmt: skip


def price_of(found: argparse.Namespace) -> Price | None:
    """The price that flags name; None: they name none."""
    from chabok.measure.cost import PRICES, Price, find_price

    if (found.watts is None) != (found.per_kwh is None):
        raise RequestError("--watts and --per-kwh belong together")
    if sum(each is not None for each in (found.price, found.per_hour, found.watts)) > 1:
        raise RequestError("--price, --per-hour and --watts are different prices; give one of them")
    if found.prices is not None and found.price is None:
        raise RequestError("--prices needs --price, the name of an entry")
    if found.price is not None:
        return find_price(found.price, found.prices or PRICES)
    if found.per_hour is not None:
        return Price.machine(found.per_hour)
    return None if found.watts is None else Price.own(found.watts, found.per_kwh)


def limits_of(texts: list[str]) -> list[Limit] | None:
    """Limits as typed; None: there are none."""
    from chabok.measure.slo import Limit

    return [Limit.of(text) for text in texts] or None


def written(run: Found, suffix: str) -> str:
    """A run's report in the form that a file's ending names."""
    from chabok.measure.report.data import to_json
    from chabok.measure.report.page import to_html
    from chabok.measure.report.tables import to_csv, to_markdown

    forms: dict[str, Callable[[], str]] = {
        ".html": lambda: to_html(run),
        ".json": lambda: to_json(run.report),
        ".csv": lambda: to_csv(run.report),
        ".md": lambda: to_markdown(run.report),
    }
    return forms[suffix]()
