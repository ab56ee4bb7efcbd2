"""A comparison in words: which one under which need."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from chabok.measure.report import numbers

if TYPE_CHECKING:
    from chabok.choose.compare import Comparison
    from chabok.choose.member import Member


def share(value: float | None) -> str:
    """A share of right answers: 62 %."""
    return numbers.UNKNOWN if value is None else f"{value * 100:.0f} %"


def size(value: float | None) -> str:
    """Bytes: 312 MB, 1.9 GB."""
    if value is None:
        return numbers.UNKNOWN
    return f"{value / 1e6:.0f} MB" if value < 995e6 else f"{value / 1e9:.1f} GB"


def worth(attribute: str, value: float | None, currency: str = "$") -> str:
    """A value as it is shown; ``unknown`` where it is."""
    if value is None:
        return "unknown"
    if attribute.endswith("_s"):
        return numbers.seconds(value)
    if attribute == "memory_bytes":
        return size(value)
    if attribute == "share":
        return share(value)
    if attribute.startswith("cost"):
        return numbers.money(value, currency)
    return numbers.number(value) + (" tokens/s" if attribute == "pace" else "")


def quality(member: Member) -> str:
    """62 % (52-71)."""
    found = member.quality
    if found is None:
        return numbers.UNKNOWN
    return f"{share(found.share)} ({found.interval.low * 100:.0f}–{found.interval.high * 100:.0f})"


def sentences(found: Comparison) -> list[str]:
    """What to choose, most important first."""
    members = [member for member in found.members if member.measured]
    said = _budget(found)
    if len(members) < 2:
        return said
    said += _best_answers(found, members)
    fastest = _least(members, "answer_s")
    if fastest is not None:
        first = f"first token in {numbers.seconds(fastest.first_token_s)}, {fastest.band}"
        said.append(
            f"For speed: {fastest.label}, a whole answer in {numbers.seconds(fastest.answer_s)} ({first})."
        )
    if "cost" in found.axes and (cheapest := _least(members, "cost")) is not None:
        paid = numbers.money(cheapest.cost, cheapest.currency)
        said.append(f"For the price: {cheapest.label}, {paid} for 1000 answers.")
    smallest = _least(members, "memory_bytes")
    if smallest is not None and sum(m.memory_bytes is not None for m in members) > 1:
        said.append(f"For little memory: {smallest.label}, {size(smallest.memory_bytes)}.")
    beaten = [member.label for member in members if member.label not in found.front]
    if found.front and beaten and len(found.axes) > 1:
        said.append(
            f"No need for {_and(beaten)}: another is as good in {_and(found.axes)}, and better in one."
        )
    return said


def _budget(found: Comparison) -> list[str]:
    if not found.budget:
        return []
    told = ", ".join(found.budget)
    if found.best is None:
        return [f"Within the budget ({told}): none."]
    best = found[found.best]
    what = (
        f"quality {quality(best)}"
        if best.quality is not None
        else f"an answer in {numbers.seconds(best.answer_s)}"
    )
    kind = "best quality" if best.quality is not None else "fastest"
    text = f"Within the budget ({told}): {best.label}, the {kind} that fits ({what})"
    return [text + ("." if best.quality is not None else "; quality was not measured.")]


def _best_answers(found: Comparison, members: list[Member]) -> list[str]:
    judged = [member for member in members if member.quality is not None]
    if len(judged) < 2:
        return []
    best = max(judged, key=lambda member: member.share or 0.0)
    assert best.quality is not None
    text = f"For the best answers: {best.label}, {quality(best)} of {best.quality.asked} questions right."
    equal = []
    for pair in found.pairs:
        if best.label in (pair.a, pair.b) and not pair.measurable:
            equal.append(found[pair.b if pair.a == best.label else pair.a])
    quicker = [
        m
        for m in equal
        if m.answer_s is not None
        and best.answer_s is not None
        and m.answer_s < best.answer_s
        and m.label not in found.crossed
    ]
    said = [text]
    if equal:
        others = _and([member.label for member in equal])
        said.append(
            f"No measurable difference in quality between {best.label} and {others} on these questions."
        )
    if quicker:
        quick = min(quicker, key=lambda member: member.answer_s or 0.0)
        times = (best.answer_s or 0.0) / (quick.answer_s or 1.0)
        said.append(
            f"Good enough and faster: {quick.label}, whose answers are complete {times:.1f} times as soon."
        )
    return said


def _least(members: list[Member], attribute: str) -> Member | None:
    get: Callable[[Member], float | None] = lambda member: getattr(member, attribute)  # noqa: E731
    known = [member for member in members if get(member) is not None]
    return min(known, key=lambda member: get(member) or 0.0) if known else None


def _and(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
