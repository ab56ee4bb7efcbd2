"""A report in plain words."""

from __future__ import annotations

from chabok import bands
from chabok.measure.cost import Cost
from chabok.measure.report.data import Level, Report
from chabok.measure.report.definitions import COUNTED
from chabok.measure.report.numbers import money, number, seconds


def sentences(report: Report) -> list[tuple[str, str]]:
    """The verdict: (about what, in words); what was not measured is not spoken of."""
    found: list[tuple[str, str]] = []
    one = report.one_user
    if one is not None and one.summary.ttft is not None:
        ttft = one.summary.ttft.median
        text = f"first token in {seconds(ttft)} ({bands.first_token(ttft)})"
        if one.summary.speed is not None:
            speed = one.summary.speed.median
            text += f", then {number(speed)} tokens/s ({bands.speed(speed)})"
        found.append(("One user", text))
    found += _capacity(report)
    if report.breakdown.bottleneck:
        found.append(("Bottleneck", report.breakdown.bottleneck))
    found += _probes(report)
    most = report.fastest
    if not found and most is not None and most.summary.throughput:
        found.append(("Throughput", f"{number(most.summary.throughput)} tokens/s, with {most.load}"))
    if report.cost is not None:
        found.append(("Cost", costs(report.cost)))
    return found


def title(report: Report) -> str:
    """What was measured, in a line."""
    url = report.url or "an unknown place"
    where = (report.model or "a model") + (f" at {url}" if "://" in url else f", in {url}")
    return where + (f" ({report.dialect})" if report.dialect else "")


def lengths(report: Report) -> str:
    """The load's texts, in a line; empty if they are not known."""
    parts = []
    if report.prompt_tokens.replace("-", "").isdigit():
        about = "about " if report.lengths == "assumed" else ""
        parts.append(f"prompts of {about}{report.prompt_tokens} tokens")
    elif report.prompt_tokens:
        parts.append(f"prompts from {report.prompt_tokens}")
    if report.output_tokens:
        parts.append(f"answers of {report.output_tokens}")
    return ", ".join(parts)


def costs(cost: Cost) -> str:
    """What it costs; ``footnotes`` say how that was reckoned."""
    sign, parts = cost.price.currency, []
    for value, per in (
        (cost.per_million_output, "million output tokens"),
        (cost.per_million_prompt, "million prompt tokens"),
        (cost.per_request, "request"),
        (cost.per_minute, "answered minute"),
    ):
        if value is not None:
            parts.append(f"{money(value, sign)} per {per}")
    users = "" if not cost.users else f" with {cost.users} user{'' if cost.users == 1 else 's'}"
    noted = f", noted {cost.price.noted}" if cost.price.noted else ""
    return f"{', '.join(parts) or 'unknown'}{users} ({cost.price.name}{noted})"


def footnotes(report: Report) -> list[str]:
    """How the numbers are to be read."""
    levels = report.levels
    found = []
    if any(not level.summary.steady for level in levels):
        found.append("* the load was never steady: over its whole time, ramp-up and drain included")
    sources = {name for level in levels for name in level.summary.sources}
    counted = "; ".join(COUNTED[name] for name in COUNTED if name in sources)
    if any("by length" in level.summary.spreads for level in levels):
        counted += "; several tokens in one event, spread by length of text"
    found.append("Times count from when a request was due" + (f"; {counted}." if counted else "."))
    if any(level.summary.ttft and 99.0 not in level.summary.ttft.percentiles for level in levels):
        found.append("A percentile is shown only where enough requests carry it: p95 from 20, p99 from 100.")
    cost = report.cost
    if cost is not None and cost.split:
        found.append(f"Cost: {cost.split}.")
    if cost is not None and cost.missing:
        found.append(f"Cost: not known: {', '.join(cost.missing)}.")
    if cost is not None and cost.price.source:
        found.append(f"Cost: prices from {cost.price.source}.")
    return found


def failures(report: Report) -> list[str]:
    """What failed, by load and class, with an example of each."""
    return [
        f"{level.load}: {error.count} of {level.summary.requests} failed ({error.kind}): {error.example}"
        for level in report.levels
        for error in level.summary.errors
    ]


def warnings(report: Report) -> list[str]:
    """What makes the numbers doubtful; what the run itself noted comes after."""
    found = [f"{level.load}: {level.client_bound}" for level in report.levels if level.client_bound]
    found += [f"{level.load}: {level.stopped}" for level in report.levels if level.stopped]
    return found + [text for text in report.notes if text not in found]


def _capacity(report: Report) -> list[tuple[str, str]]:
    if report.rate_capacity is not None:
        limits = " and ".join(report.limits)
        if report.rate_capacity == 0:
            return [("Capacity", f"no rate that was tried keeps {limits}")]
        return [("Capacity", f"{report.rate_capacity:.3g} requests/s keep {limits}")]
    if report.capacity is None:
        return []
    most = report.fastest
    peak = ""
    if most is not None and most.summary.throughput:
        peak = f"; at most {number(most.summary.throughput)} tokens/s, with {most.load}"
    limits = " and ".join(report.limits)
    if report.capacity == 0:
        first = report.levels[0] if report.levels else None
        did = f" often enough: {_least(first)} of requests did" if first is not None and first.kept else ""
        return [("Capacity", f"not even one user has {limits}{did}{peak}")]
    who = "one user has" if report.capacity == 1 else f"{report.capacity} users at once keep"
    level = report.at_capacity
    kept = f", for {_least(level)} of requests" if level is not None and level.kept else ""
    return [("Capacity", f"{who} {limits}{kept}{peak}")]


def _least(level: Level) -> str:
    return f"{int(min(level.kept.values()) * 100)} %"


def _probes(report: Report) -> list[tuple[str, str]]:
    found, parts = [], report.breakdown
    if parts.first_token:
        stages = [
            f"{stage.name} {seconds(stage.seconds)}" + (" (estimated)" if stage.origin == "estimate" else "")
            for stage in parts.first_token
            if stage.seconds >= 5e-5
        ]
        found.append(("First token", ", ".join(stages)))
    if parts.fit is not None and parts.fit.clear:
        speed = number(parts.fit.tokens_per_s)
        found.append(("Prompts", f"read at {speed} tokens/s (estimated from several lengths)"))
    if parts.cache is not None:
        gain = parts.cache
        text = "none to be noticed: a repeated prompt starts no sooner"
        if gain.share < 0.7:
            text = f"a repeated prompt starts in {seconds(gain.with_s)} instead of {seconds(gain.without_s)}"
        found.append(("Prefix cache", text))
    if parts.cold_start is not None and parts.cold_start.with_s > 1.5 * parts.cold_start.without_s + 0.02:
        found.append(("Cold start", f"the first request waited {seconds(parts.cold_start.with_s)}"))
    return found
