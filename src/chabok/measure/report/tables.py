"""One row per load: as text for a person (console, Markdown, HTML), and as CSV for a spreadsheet."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chabok.measure.metrics import Summary
from chabok.measure.report.data import Level, Report
from chabok.measure.report.definitions import METRICS
from chabok.measure.report.numbers import UNKNOWN, at, number, seconds, share
from chabok.measure.stats import NEEDED, Distribution

_EMPTY = Summary()
_HARMLESS = {sign: f"\\{sign}" for sign in "\\`*_[]|#~$"} | {"<": "&lt;", ">": "&gt;", "&": "&amp;"}


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its heading, the metric it is of ("" for none), and its text for a load. worth: whether it
    says anything new of these loads; without it, if it is not all dashes."""

    heading: str
    metric: str
    text: Callable[[Level], str]
    worth: Callable[[Sequence[Level]], bool] | None = None

    def told(self, levels: Sequence[Level]) -> bool:
        """Whether it is to be shown."""
        if self.worth is not None and not self.worth(levels):
            return False
        return any(self.text(level) != UNKNOWN for level in levels)


def _percentile(name: str, p: float) -> Callable[[Level], str]:
    return lambda level: seconds(at(getattr(level.summary, name), p))


def _requests(level: Level) -> str:
    done = level.summary.requests - level.summary.failed
    return f"{done} of {level.summary.requests}" if level.summary.failed else str(done)


def _longest(level: Level) -> str:
    return seconds(None if level.summary.worst_gap is None else level.summary.worst_gap.most)


def _speed(level: Level) -> str:
    return number(None if level.summary.speed is None else level.summary.speed.median)


def _throughput(level: Level) -> str:
    text = number(level.summary.throughput)
    return text if level.summary.steady or text == UNKNOWN else text + "*"


def _kept(level: Level) -> str:
    if not level.kept:
        return UNKNOWN
    return f"{int(min(level.kept.values()) * 100)} %{'' if level.met else ' no'}"


def _cached(level: Level) -> str:
    summary = level.summary
    if summary.cached_tokens is None or not summary.prompt_tokens:
        return UNKNOWN
    return share(summary.cached_tokens / summary.prompt_tokens)


COLUMNS = (
    Column("Load", "", lambda level: level.load),
    Column("Requests", "", _requests),
    Column("TTFT p50", "ttft", _percentile("ttft", 50)),
    Column("p95", "ttft", _percentile("ttft", 95)),
    Column("p99", "ttft", _percentile("ttft", 99)),
    Column("Visible p50", "ttfvt", _percentile("ttfvt", 50),
           lambda levels: any(level.summary.reasoning_tokens for level in levels)),
    Column("ITL p50", "itl", _percentile("itl", 50)),
    Column("p95", "itl", _percentile("itl", 95)),
    Column("p99", "itl", _percentile("itl", 99)),
    Column("Worst gap", "worst_gap", _longest),
    Column("E2E p50", "e2e", _percentile("e2e", 50)),
    Column("Tokens/s each", "speed", _speed),
    Column("Tokens/s", "throughput", _throughput),
    Column("Goodput/s", "goodput", lambda level: number(level.goodput)),
    Column("Cached", "cached", _cached, lambda levels: any(level.summary.cached_tokens for level in levels)),
    Column("Lateness p99", "lateness", lambda level: seconds(level.lateness_p99_s),
           lambda levels: any(level.per_s or level.lateness_p99_s > 0.001 for level in levels)),
    Column("In limits", "", _kept),
)  # fmt: skip


def columns(report: Report) -> list[Column]:
    """Those that say something: one that would be all dashes is left out."""
    return [
        column
        for column in COLUMNS
        if column.heading in ("Load", "Requests", "TTFT p50") or column.told(report.levels)
    ]


def rows(report: Report) -> tuple[list[str], list[list[str]]]:
    """Headings and cells."""
    shown = columns(report)
    return [column.heading for column in shown], [
        [column.text(level) for column in shown] for level in report.levels
    ]


def markdown_cell(text: str) -> str:
    """Text that means nothing to Markdown, in one line."""
    return "".join(_HARMLESS.get(sign, sign) for sign in " ".join(text.split()))


def to_csv(report: Report) -> str:
    """CSV (RFC 4180): a line per load, seconds and shares as plain numbers; what is unknown is empty."""
    out = io.StringIO()
    found = [_record(report, level) for level in report.levels]
    writer = csv.DictWriter(out, list(found[0]) if found else list(_record(report, Level("", "", 0, _EMPTY))))
    writer.writeheader()
    writer.writerows(found)
    return out.getvalue()


def _record(report: Report, level: Level) -> dict[str, object]:
    summary = level.summary
    found: dict[str, object] = {
        "model": _plain(report.model),
        "url": _plain(report.url),
        "started_at": _plain(report.started_at),
        "load": _plain(level.load),
        "users": level.users or None,
        "requests_per_s": level.per_s,
        "requests": summary.requests,
        "failed": summary.failed,
        "window_s": summary.window_s if summary.steady else None,
        "throughput_tokens_per_s": summary.throughput,
        "prompt_tokens_per_s": summary.prompt_throughput,
        "request_rate_per_s": summary.request_rate,
        "goodput_per_s": level.goodput,
        "prompt_tokens": summary.prompt_tokens,
        "cached_tokens": summary.cached_tokens,
        "output_tokens": summary.output_tokens,
        "reasoning_tokens": summary.reasoning_tokens,
        "limits_met": (level.met if level.kept else None),
        "client_cpu_share": level.cpu_share,
        "client_bound": _plain(level.client_bound),
    }
    for name, metric in METRICS.items():
        if metric.of != "load":
            unit = "tokens_per_s" if metric.unit == "tokens/s" else "s"
            found |= _statistics(f"{name}_%s_{unit}", getattr(summary, name))
    return found


def _statistics(name: str, of: Distribution | None) -> dict[str, object]:
    found: dict[str, object] = {name % "mean": None if of is None else of.mean}
    for p in NEEDED:
        found[name % f"p{p:g}"] = at(of, p)
        interval = None if of is None or at(of, p) is None else of.intervals.get(p)
        found[name % f"p{p:g}_low"] = None if interval is None else interval.low
        found[name % f"p{p:g}_high"] = None if interval is None else interval.high
    found[name % "max"] = None if of is None else of.most
    return found


def _plain(text: str) -> str:
    """Text that a spreadsheet does not take for a formula."""
    return "'" + text if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


def markdown_table(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """A table; the first column to the left, numbers to the right."""
    lines = [
        "| " + " | ".join(map(markdown_cell, headings)) + " |",
        "|" + "|".join([":--"] + ["--:"] * (len(headings) - 1)) + "|",
    ]
    lines += ["| " + " | ".join(map(markdown_cell, row)) + " |" for row in cells]
    return "\n".join(lines)


def to_markdown(report: Report) -> str:
    """A report to paste: the verdict, the table, what to know about it, and how to repeat it."""
    from chabok.measure.report.words import failures, footnotes, lengths, sentences, title, warnings

    parts = [f"### {markdown_cell(title(report))}"]
    about = [text for text in (lengths(report), report.started_at) if text]
    if about:
        parts.append(markdown_cell("; ".join(about)))
    verdict = [f"- **{name}:** {markdown_cell(text)}" for name, text in sentences(report)]
    parts.append("\n".join(verdict) if verdict else "Nothing was measured.")
    if report.levels:
        parts.append(markdown_table(*rows(report)))
    said = [*failures(report), *(f"Note: {text}" for text in warnings(report))]
    if said:
        parts.append("\n".join(f"- {markdown_cell(text)}" for text in said))
    parts.append("  \n".join(f"<sub>{markdown_cell(text)}</sub>" for text in footnotes(report)))
    shown = [METRICS[name] for name in dict.fromkeys(column.metric for column in columns(report)) if name]
    items = "\n".join(f"- **{metric.title}**: {metric.text}" for metric in shown)
    parts.append(f"<details><summary>What the numbers mean</summary>\n\n{items}\n\n</details>")
    if report.command:
        fence = "`" * max(3, _longest_run(report.command) + 1)
        parts.append(f"{fence}\n{' '.join(report.command.split())}\n{fence}")
    return "\n\n".join(parts) + "\n"


def _longest_run(text: str) -> int:
    longest = run = 0
    for sign in text:
        run = run + 1 if sign == "`" else 0
        longest = max(longest, run)
    return longest
