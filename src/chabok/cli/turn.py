"""``chabok turn``: where the time of a turn of work goes, and what a faster model would give it."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from chabok.cli.params import Parser
from chabok.cli.terminal import console, harmless, note
from chabok.errors import RequestError

if TYPE_CHECKING:
    from chabok.choose.turn import Gain, Turn, TurnReport

_LETTERS = {"prefill": "▒", "reasoning": "▓", "answer": "█", "model": "█",
            "tool": "═", "human": "─", "other": "·", "idle": " "}  # fmt: skip


def main(arguments: list[str]) -> int:
    """Run the command; the exit code."""
    from chabok.choose.sheet import alone, page
    from chabok.choose.swap import Measured
    from chabok.choose.turn import FACTORS, Threshold, examine
    from chabok.choose.turn_charts import charts, curve

    found = parser().parse_args(arguments)
    turn = _turn(found)
    models = [model for path in found.swap for model in Measured.read_all(path)]
    threshold = Threshold(found.felt_share / 100, found.felt_ms / 1000)
    report = examine(turn, _factors(found.times) or FACTORS, models=models, threshold=threshold)
    if found.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        show(report)
    if found.html is not None:
        verdict = sentences(report)
        found.html.write_text(page("A turn of work", verdict, charts(report), turn.notes), encoding="utf-8")
        note(f"written: {found.html}")
    if found.svg is not None:
        found.svg.write_text(alone(curve(report).svg), encoding="utf-8")
        note(f"written: {found.svg}")
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = Parser(
        "chabok turn",
        description="What a faster model gives a whole turn of work: from a recorded agent trace "
        "(OpenTelemetry spans as JSON, or JSON lines), or from a few numbers.",
        allow_abbrev=False,
    )
    add = made.add_argument
    add("trace", nargs="?", metavar="TRACE", help="a file of spans or of JSON lines")
    few = made.add_argument_group("a turn in a few numbers, instead of a trace")
    few.add_argument("--model-seconds", type=_seconds, metavar="S", help="the model takes in all")
    few.add_argument("--tokens", type=_seconds, metavar="N", help="it writes, with --speed")
    few.add_argument("--speed", type=_seconds, metavar="N", help="its tokens per second")
    few.add_argument("--prefill", type=_seconds, default=0.0, metavar="S", help="it takes to read prompts")
    few.add_argument("--tools", type=_seconds, default=0.0, metavar="S", help="tools take")
    few.add_argument("--human", type=_seconds, default=0.0, metavar="S", help="people take")
    few.add_argument("--idle", type=_seconds, default=0.0, metavar="S", help="nothing runs")
    add("--times", metavar="F,F", help="model speeds to show, as times today's (1,2,5,10)")
    add("--swap", action="append", default=[], metavar="RUN",
        help="put in place what `chabok bench` or `chabok compare` measured; repeatable")  # fmt: skip
    add("--felt-share", type=_seconds, default=5.0, metavar="PERCENT",
        help="a doubling that saves less of the turn is not felt (5)")  # fmt: skip
    add("--felt-ms", type=_seconds, default=100.0, metavar="MS", help="nor one that saves less time (100)")
    add("--html", type=Path, metavar="FILE", help="write a page with charts")
    add("--svg", type=Path, metavar="FILE", help="write the chart of speeds")
    add("--json", action="store_true", help="for programs")
    return made


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {text!r}") from None
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"must be 0 or more, not {text}")
    return value


def _factors(text: str | None) -> list[float]:
    if text is None:
        return []
    try:
        found = [float(each.rstrip("xX")) for each in text.split(",")]
    except ValueError:
        raise RequestError(f"--times takes numbers such as 2,5,10, not {text!r}") from None
    return sorted(dict.fromkeys([1.0, *found]))


def _turn(found: argparse.Namespace) -> Turn:
    from chabok.choose.agent_trace import read_turn
    from chabok.choose.turn import few

    said = found.model_seconds is not None or found.tokens is not None
    if found.trace is not None:
        if said or found.tools or found.human or found.idle:
            raise RequestError("give either a trace or the numbers of a turn, not both")
        return read_turn(found.trace)
    if not said:
        raise RequestError(
            "give a trace, or a turn in numbers: chabok turn --model-seconds 6.25 --tools 2.5 --human 1.25"
        )
    if found.tokens is not None and not found.speed and found.model_seconds is None:
        raise RequestError("--tokens needs --speed, or --model-seconds")
    return few(
        model_seconds=found.model_seconds,
        tokens=found.tokens,
        speed=found.speed,
        prefill=found.prefill,
        tools=found.tools,
        human=found.human,
        idle=found.idle,
    )


def sentences(report: TurnReport) -> list[tuple[str, str]]:
    """What was found, in words: (heading, sentence)."""
    from chabok.choose.turn_charts import times
    from chabok.measure.report.numbers import number, seconds, share

    found = [("Turn", f"{seconds(report.seconds)}; the model's share of it is {share(report.model_share)}")]
    faster = [gain for gain in report.gains if gain.factor not in (None, 1.0)]
    if faster:
        told = ", ".join(f"{gain.label} the model speed: {times(gain.speedup)}" for gain in faster)
        found.append(("Faster", f"{told} the turn"))
    if math.isfinite(report.ceiling):
        found.append(("Ceiling", f"{times(report.ceiling)}, with a model that takes no time at all"))
    else:
        found.append(("Ceiling", "none: the turn consists of the model alone"))
    pace = report.tokens_per_s
    if report.felt_up_to == 0:
        text = "more speed is not felt at all"
    elif math.isinf(report.felt_up_to):
        text = "more speed is always felt"
    else:
        at = f"{number(report.felt_up_to * pace)} tokens/s, " if pace else ""
        text = f"up to {at}{report.felt_up_to:.2g}x the model speed; beyond, {report.threshold}"
    found.append(("Felt", text))
    found += [
        (f"With {gain.label}", f"{seconds(gain.seconds)}, {times(gain.speedup)} as fast a turn")
        for gain in report.swaps
    ]
    if report.hidden_s > 0.0005:
        found.append(("Beside", f"{seconds(report.hidden_s)} of steps ran beside others and took no time"))
    return found


def show(report: TurnReport) -> None:
    """Print it."""
    from rich.table import Table
    from rich.text import Text

    from chabok.choose.turn_charts import TITLES
    from chabok.measure.report.numbers import seconds, share

    out = console()
    words = Table(box=None, show_header=False, pad_edge=False)
    words.add_column(style="bold", no_wrap=True)
    words.add_column(overflow="fold")
    for heading, text in sentences(report):
        words.add_row(harmless(heading), Text(harmless(text)))
    out.print(words)
    out.print()
    for part, took in sorted(report.parts.items(), key=lambda pair: -pair[1]):
        line = f"  {_LETTERS[part]}  {TITLES[part]:26} {seconds(took):>8} {share(took / report.seconds):>7}"
        out.print(line, markup=False, highlight=False)
    out.print()
    rows = [*report.gains, *report.swaps]
    width = min(shutil.get_terminal_size((80, 24)).columns, 120) - 34
    most = max(gain.seconds for gain in rows)
    for gain in rows:
        out.print(_bar(gain, most, max(width, 10)), markup=False, highlight=False, no_wrap=True)
    for text in report.turn.notes:
        print(f"note: {harmless(text)}", file=sys.stderr)


def _bar(gain: Gain, most: float, width: int) -> str:
    """A line of the terminal's chart: label, time, speed-up, and parts drawn to scale."""
    from chabok.choose.turn_charts import times
    from chabok.measure.report.numbers import seconds

    drawn, at = "", 0.0
    for part, took in gain.parts.items():
        at += took
        drawn += _LETTERS[part] * (round(at / most * width) - len(drawn))
    label = harmless(gain.label)[:12]
    return f"  {label:12} {seconds(gain.seconds):>8} {times(gain.speedup):>7}  {drawn}"
