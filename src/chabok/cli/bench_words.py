"""A report in plain words first, then the table, then how to repeat it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from chabok import bands
from chabok.cli.speed import milliseconds
from chabok.cli.terminal import harmless

if TYPE_CHECKING:
    from rich.console import Console

    from chabok.measure.report import Level, Report
    from chabok.measure.stats import Distribution


def show(report: Report, out: Console, files: Sequence[Path]) -> None:
    """Print a report for a person."""

    def say(text: str = "", style: str | None = None) -> None:
        out.print(harmless(text), style=style, markup=False, highlight=False)

    place = f" at {report.url}" if "://" in report.url else f", in {report.url}"
    where = f"{report.model}{place}" + (f" ({report.dialect})" if report.dialect else "")
    counted = report.prompt_tokens.replace("-", "").isdigit()
    prompts = (
        f"prompts of {report.prompt_tokens} tokens" if counted else f"prompts from {report.prompt_tokens}"
    )
    say(f"\n{where}; {prompts}, answers of {report.output_tokens}\n", "dim")
    rows = list(sentences(report))
    width = max((len(name) for name, _ in rows), default=0) + 2
    for name, text in rows:
        say(f"{name + ':':{width}} {text}")
    if report.levels:
        say()
        _table(report, out)
    errors = [(level, error) for level in report.levels for error in level.summary.errors]
    for level, error in errors:
        say(f"{level.load}: {error.count} of {level.summary.requests} failed ({error.kind}): {error.example}")
    for text in report.notes:
        say(f"Note: {text}")
    say(f"\nAgain:   {report.command}", "dim")
    say(f"Written: {', '.join(str(file) for file in files)}", "dim")


def sentences(report: Report) -> list[tuple[str, str]]:
    """The verdict: (about what, in words)."""
    found: list[tuple[str, str]] = []
    one = report.one_user
    if one is not None and one.summary.ttft is not None:
        text = f"first token in {milliseconds(one.summary.ttft.median)}"
        text += f" ({bands.first_token(one.summary.ttft.median)})"
        if one.summary.speed is not None:
            speed = one.summary.speed.median
            text += f", then {_number(speed)} tokens/s ({bands.speed(speed)})"
        found.append(("One user", text))
    found += _capacity(report)
    if report.breakdown.bottleneck:
        found.append(("Bottleneck", report.breakdown.bottleneck))
    found += _probes(report)
    if report.cost is not None:
        found.append(("Cost", _cost(report)))
    return found


def _capacity(report: Report) -> list[tuple[str, str]]:
    if report.capacity is None:
        return []
    limits = " and ".join(report.limits)
    most = report.fastest
    peak = ""
    if most is not None and most.summary.throughput:
        peak = f"; at most {_number(most.summary.throughput)} tokens/s, with {most.load}"
    if report.capacity == 0:
        return [("Capacity", f"not even one user has {limits}{peak}")]
    who = "one user has" if report.capacity == 1 else f"{report.capacity} users at once keep"
    return [("Capacity", f"{who} {limits}{_percent(report)}{peak}")]


def _percent(report: Report) -> str:
    return (
        ", for 95 % of requests" if report.limits and all("%" not in text for text in report.limits) else ""
    )


def _probes(report: Report) -> list[tuple[str, str]]:
    found = []
    parts = report.breakdown
    if parts.first_token:
        stages = [
            f"{stage.name} {milliseconds(stage.seconds)}"
            + (" (estimated)" if stage.origin == "estimate" else "")
            for stage in parts.first_token
            if stage.seconds >= 5e-5
        ]
        found.append(("First token", ", ".join(stages)))
    if parts.fit is not None and parts.fit.clear:
        found.append(
            (
                "Prompts",
                f"read at {_number(parts.fit.tokens_per_s)} tokens/s (estimated from several lengths)",
            )
        )
    if parts.cache is not None:
        gain = parts.cache
        if gain.share < 0.7:
            text = f"a repeated prompt starts in {milliseconds(gain.with_s)} instead of "
            found.append(("Prefix cache", text + milliseconds(gain.without_s)))
        else:
            found.append(("Prefix cache", "none to be noticed: a repeated prompt starts no sooner"))
    if parts.cold_start is not None and parts.cold_start.with_s > 1.5 * parts.cold_start.without_s + 0.02:
        found.append(("Cold start", f"the first request waited {milliseconds(parts.cold_start.with_s)}"))
    return found


def _cost(report: Report) -> str:
    cost = report.cost
    assert cost is not None
    sign, parts = cost.price.currency, []
    if cost.per_million_output is not None:
        parts.append(f"{sign}{_money(cost.per_million_output)} per million output tokens")
    if cost.per_million_prompt is not None:
        parts.append(f"{sign}{_money(cost.per_million_prompt)} per million prompt tokens")
    if cost.per_request is not None:
        parts.append(f"{sign}{_money(cost.per_request)} per request")
    if cost.per_minute is not None:
        parts.append(f"{sign}{_money(cost.per_minute)} per answered minute")
    noted = f", noted {cost.price.noted}" if cost.price.noted else ""
    users = "" if not cost.users else f" with {cost.users} user{'' if cost.users == 1 else 's'}"
    return f"{', '.join(parts) or 'unknown'}{users} ({cost.price.name}{noted})"


def _table(report: Report, out: Console) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("Load", no_wrap=True)
    for name in ("requests", "TTFT p50", "p95", "ITL p50", "p95", "worst gap", "tokens/s each", "tokens/s",
                 "in limits"):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)
    for level in report.levels:
        summary = level.summary
        done = summary.requests - summary.failed
        table.add_row(
            level.load,
            f"{done}/{summary.requests}" if summary.failed else str(done),
            _at(summary.ttft, 50),
            _at(summary.ttft, 95),
            _at(summary.itl, 50),
            _at(summary.itl, 95),
            "-" if summary.worst_gap is None else milliseconds(summary.worst_gap.most),
            "-" if summary.speed is None else _number(summary.speed.median),
            "-"
            if summary.throughput is None
            else _number(summary.throughput) + ("" if summary.steady else "*"),
            f"{min(level.kept.values(), default=0):.0%}{'' if level.met else ' no'}",
        )
    out.print(table)
    if any(not level.summary.steady for level in report.levels):
        out.print("* the load was never steady; over the whole run, ramp-up and drain included", style="dim")
    out.print(_footnote(report.levels), style="dim", markup=False, highlight=False)


def _footnote(levels: Sequence[Level]) -> str:
    sources = {name for level in levels for name in level.summary.sources}
    counted = {
        "usage": "tokens as the server counts them",
        "tokenizer": "tokens as a tokenizer counts them",
        "events": "tokens taken to be one per event, as the server tells no counts",
    }
    spread = {name for level in levels for name in level.summary.spreads}
    text = "; ".join(counted[name] for name in sorted(sources, reverse=True))
    if "by length" in spread:
        text += "; several tokens in one event, spread by length of text"
    return f"From when a request was due; {text}." if text else ""


def _at(distribution: Distribution | None, p: float) -> str:
    value = None if distribution is None else distribution.percentiles.get(float(p))
    return "-" if value is None else milliseconds(value)


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def _money(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"
