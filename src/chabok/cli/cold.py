"""``chabok cold``: what a first request costs, by stage, and what removes it."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from typing import TYPE_CHECKING

from chabok.cli.params import Parser, is_address, whole
from chabok.cli.terminal import console, harmless, note
from chabok.errors import RequestError

if TYPE_CHECKING:
    from chabok.choose.cold import ColdReport


def main(arguments: list[str]) -> int:
    """Run the command; the exit code."""
    from chabok.choose.cold import endpoint, local

    found = parser().parse_args(arguments)
    tell = (lambda text: None) if found.json or found.quiet else note
    if "://" in found.target or is_address(found.target):
        key = ""
        if found.api_key_env is not None:
            key = os.environ.get(found.api_key_env, "")
            if not key:
                raise RequestError(f"the environment variable {found.api_key_env} is empty")
        rounds = found.rounds or 1
        report = asyncio.run(
            endpoint(found.target, idle_s=found.idle, rounds=rounds, tell=tell, model=found.model, key=key)
        )
    else:
        if found.idle:
            raise RequestError("--idle is for endpoints; a local model is started anew each time")
        report = local(found.target, rounds=found.rounds or 3, threads=found.threads, tell=tell)
    if found.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        _show(report)
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = Parser(
        "chabok cold",
        description="What a first request costs, by stage, and what removes it: of a local model, started in "
        "fresh processes with and without what is kept on disk; or of an endpoint, after a wait.",
        allow_abbrev=False,
    )
    add = made.add_argument
    add("target", nargs="?", default="smollm2", metavar="TARGET", help="a local model (smollm2), or a URL")
    add("--idle", type=_wait, default=0.0, metavar="S", help="endpoints: wait so long without a request")
    add("--rounds", type=_count, metavar="N", help="measure so often (3; of endpoints 1)")
    add("--threads", type=_count, metavar="N", help="of a local model")
    add("-m", "--model", default="", help="endpoints: the served model to ask (the first one)")
    add("--api-key-env", metavar="NAME", help="the environment variable that holds the API key")
    add("--json", action="store_true", help="for programs")
    add("-q", "--quiet", action="store_true", help="no progress")
    return made


def _count(text: str) -> int:
    value = whole(text)
    if not 1 <= value <= 1000:
        raise argparse.ArgumentTypeError(f"must be from 1 to 1000, not {text}")
    return value


def _wait(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be seconds, not {text!r}") from None
    if not 0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"must be from 0 to 1000000 seconds, not {text}")
    return value


def _show(report: ColdReport) -> None:
    from rich.table import Table
    from rich.text import Text

    from chabok.measure.report.numbers import seconds

    out = console()
    many = f", medians of {report.rounds}" if report.rounds > 1 else ""
    out.print(f"First token of {harmless(report.target)}, a prompt of {report.prompt_tokens} tokens{many}",
              markup=False, highlight=False)  # fmt: skip
    names = list(dict.fromkeys(name for each in report.starts for name in each.stages))
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in [*names, "first token"]:
        table.add_column(name, justify="right")
    for each in report.starts:
        row = [seconds(each.stages[name]) if name in each.stages else "" for name in names]
        table.add_row(each.name, *row, seconds(each.seconds))
    out.print(table)
    out.print()
    fixes = Table(box=None, pad_edge=False)
    for heading in ("what removes it", "without", "with", "how"):
        fixes.add_column(heading, justify="right" if heading.startswith("with") else "left")
    for remedy in report.remedies:
        name = remedy.name
        if name == "prefix cache on disk":
            name += f" ({report.long_prompt_tokens} tokens)"
        fixes.add_row(name, seconds(remedy.before_s), seconds(remedy.after_s), Text(harmless(remedy.how)))
    out.print(fixes)
    for text in report.notes:
        print(f"note: {harmless(text)}", file=sys.stderr)
