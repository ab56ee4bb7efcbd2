"""The columns in which members are shown, on a terminal and on a page."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from chabok.choose.words import quality, size
from chabok.measure.report.numbers import money, number, seconds

if TYPE_CHECKING:
    from chabok.choose.compare import Comparison
    from chabok.choose.member import Member


class Column(NamedTuple):
    """A column. meaning: how the value is defined."""

    heading: str
    text: Callable[[Member], str]
    meaning: str


def _spread(member: Member) -> str:
    interval = member.answer_interval
    text = seconds(member.answer_s)
    return text if interval is None else f"{text} ({seconds(interval.low)}–{seconds(interval.high)})"


COLUMNS = (
    Column("", lambda m: m.label, ""),
    Column("First token", lambda m: seconds(m.first_token_s), "median over the prompts, one user"),
    Column("Pace", lambda m: number(m.pace), "tokens/s as one reader feels it: 1 / TPOT, median"),
    Column("", lambda m: m.band, "the word for the pace"),
    Column("Worst gap", lambda m: seconds(m.worst_gap_s), "longest silence within any answer"),
    Column("Tokens", lambda m: number(m.answer_tokens), "to answer: output tokens of an answer, mean"),
    Column("Answer", _spread, "time to the whole answer: median, with its 95 % interval (bootstrap)"),
    Column("Cost", lambda m: money(m.cost, m.currency or "$"), "of 1000 answers"),
    Column("Memory", lambda m: size(m.memory_bytes), "most that was resident of a local model's process"),
    Column("Quality", quality, "share of right answers in %, with its 95 % interval (Wilson)"),
)


def columns(found: Comparison) -> list[Column]:
    """Those in which anything is known."""
    shown = {"Cost": "cost", "Memory": "memory_bytes", "Quality": "share"}
    return [
        column
        for column in COLUMNS
        if column.heading not in shown
        or any(getattr(member, shown[column.heading]) is not None for member in found.members)
    ]


def remarks(found: Comparison) -> list[str]:
    """What a reader has to know of each member, and of the whole."""
    lines = list(found.notes)
    for member in found.members:
        if member.failure:
            lines.append(f"{member.label} failed: {member.failure}")
        elif not member.complete:
            lines.append(f"{member.label}: not complete")
        lines += [f"{member.label}: {note}" for note in member.notes]
        made = member.quality
        if made is not None and made.unread:
            lines.append(
                f"{member.label}: nothing could be read from {made.unread} of {made.asked} answers (wrong)"
            )
        if made is not None and made.cut:
            lines.append(f"{member.label}: of the wrong answers, {made.cut} cut off at the limit of tokens")
        if made is not None and made.failed:
            lines.append(
                f"{member.label}: {made.failed} questions could not be asked; they count neither way"
            )
        if not member.failure:  # it says enough
            lines += [f"{member.label}: unknown {each}" for each in member.missing]
    methods = {tuple(sorted(m.quality.methods)) for m in found.members if m.quality is not None}
    if len(methods) > 1:
        lines.append(
            "choices were read in different ways (see methods); such shares are not quite comparable"
        )
    lines += [f"left out of the Pareto front: {each}" for each in found.left_out if ":" in each]
    lines += [f"left out: {each}" for each in found.broken[:10]]
    if len(found.broken) > 10:
        lines.append(f"left out: {len(found.broken) - 10} more lines that are no questions")
    return lines


def methods(found: Comparison) -> list[str]:
    """How quality was found out, in words."""
    lines = []
    for member in found.members:
        made = member.quality
        if made is None:
            continue
        ways = ", ".join(f"{count} by {_WAYS[way]}" for way, count in made.methods.items())
        rated = ""
        if made.plain is not None and made.normalised is not None:
            rated = f"; rated choices: {made.normalised:.0%} per character, {made.plain:.0%} plain"
        sets = ""
        if len(made.sets) > 1:
            sets = "; " + ", ".join(f"{name} {right}/{asked}" for name, (right, asked) in made.sets.items())
        lines.append(f"{member.label}: {made.right} of {made.asked} right, {ways}{rated}{sets}")
    return lines


_WAYS = {"logprob": "log-probability", "text": "the text of the answer", "raw": "a continued text"}
