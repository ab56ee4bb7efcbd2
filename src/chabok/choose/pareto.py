"""Which of several are worth choosing: those that nothing else beats in every respect, and those within a
budget."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from chabok.errors import ChabokError

T = TypeVar("T")
Values = Sequence[float]


def dominates(a: Values, b: Values) -> bool:
    """Whether a is as good as b in everything and better in something; less is better."""
    return all(x <= y for x, y in zip(a, b, strict=True)) and any(x < y for x, y in zip(a, b))


def front(members: Mapping[T, Values]) -> set[T]:
    """Those that no other one dominates; equals are all in it. All values known, less is better."""
    return {
        name
        for name, values in members.items()
        if not any(dominates(other, values) for other in members.values())
    }


@dataclass(frozen=True, slots=True)
class Need:
    """Something one can ask for. attribute: of a member. less: whether less is better. unit: of numbers
    without one, as a factor."""

    attribute: str
    title: str
    less: bool = True
    units: Mapping[str, float] | None = None


_TIME = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0}
_BYTES = {"b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30}
_SHARE = {"": 1.0, "%": 0.01}
_PLAIN = {"": 1.0, "tok/s": 1.0, "tokens/s": 1.0, "tokens": 1.0, "$": 1.0, "€": 1.0}

NEEDS = {
    "first token": Need("first_token_s", "first token", units=_TIME),
    "answer": Need("answer_s", "whole answer", units=_TIME),
    "worst gap": Need("worst_gap_s", "worst gap", units=_TIME),
    "pace": Need("pace", "pace", False, _PLAIN),
    "tokens": Need("answer_tokens", "tokens to answer", units=_PLAIN),
    "cost": Need("cost", "cost of 1000 answers", units=_PLAIN),
    "cost per million": Need("cost_per_million", "cost of a million output tokens", units=_PLAIN),
    "memory": Need("memory_bytes", "memory", units=_BYTES),
    "quality": Need("share", "quality", False, _SHARE),
}
_ALIASES = {
    "ttft": "first token",
    "first-token": "first token",
    "stall": "worst gap",
    "worst-gap": "worst gap",
    "speed": "pace",
    "accuracy": "quality",
    "ram": "memory",
}
_LIMIT = re.compile(
    r"\s*([a-z][a-z -]*?)\s*(<=|>=|<|>)\s*([$€]?)\s*([0-9]*\.?[0-9]+(?:e-?[0-9]+)?)\s*([a-zA-Z%$€/]*)\s*"
)


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit: ``first token<200ms``. value: in seconds, tokens/s, bytes, money, or as a share."""

    need: Need
    sign: str
    value: float
    text: str

    @classmethod
    def of(cls, text: str) -> Limit:
        """From what is typed. ChabokError: it is no limit; says what can be limited."""
        found = _LIMIT.fullmatch(text)
        name = found.group(1).strip().lower() if found else ""
        need = NEEDS.get(_ALIASES.get(name, name))
        if found is None or need is None:
            raise ChabokError(
                f"{text!r} is no limit; 'first token<200ms', 'answer<2s', 'cost<0.5', 'quality>60%' are. "
                f"There are {', '.join(NEEDS)}"
            )
        units = need.units or {"": 1.0}
        unit = found.group(5).lower()
        if unit not in units:
            known = ", ".join(each for each in units if each)
            if not unit:
                raise ChabokError(f"{text!r}: the bound has no unit; one of {known}")
            raise ChabokError(f"{text!r}: {need.title} is not measured in {unit}; in {known}")
        value = float(found.group(4)) * units[unit]
        if need.attribute == "share" and not unit and value > 1:
            value /= 100
        if (found.group(2)[0] == "<") != need.less:
            better = "less" if need.less else "more"
            raise ChabokError(f"{text!r}: of {need.title}, {better} is better; turn the sign around")
        return cls(need, found.group(2), value, " ".join(text.split()))

    def keeps(self, value: float | None) -> bool:
        """Whether a value is within; what is unknown is not."""
        if value is None or math.isnan(value):
            return False
        tests: dict[str, Callable[[float, float], bool]] = {
            "<": lambda a, b: a < b,
            "<=": lambda a, b: a <= b,
            ">": lambda a, b: a > b,
            ">=": lambda a, b: a >= b,
        }
        return tests[self.sign](value, self.value)
