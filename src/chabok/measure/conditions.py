"""Conditions on runs, for continuous integration: ``ttft.p95 > +10%``.

    METRIC[.STATISTIC] [@ LOAD] (> | >= | < | <=) VALUE

A statistic (``mean``, ``min``, ``max``, ``p95`` or any percentile) belongs to a metric that every request or
gap has; ``throughput``, ``request_rate``, ``goodput``, ``failed`` and ``cached`` have one number per load;
``cost`` has ``output``, ``prompt``, ``request`` and ``minute``. A value without a sign is the value itself
(``500ms``, ``20``, ``1%`` of failed); one with a sign is the change since the first run (``+10%``, ``-5%``,
``+20ms``); of shares it is in percentage points. Without a load, any of the loads counts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from chabok.measure.cost import Cost
from chabok.measure.diff import common, compare_metric, of_load, value
from chabok.measure.failures import MeasureError
from chabok.measure.report.account import Found
from chabok.measure.report.definitions import METRICS
from chabok.measure.report.numbers import UNKNOWN, change, money, shown

_FORM = re.compile(
    r"\s*(?P<metric>[a-z_0-9]+)(?:\.(?P<statistic>[a-z0-9]+(?:\.\d+)?))?"
    r"(?:\s*@\s*(?P<load>[^<>=]*[^<>=\s]))?"
    r"\s*(?P<sign>>=|<=|>|<)\s*"
    r"(?P<value>[+-]?[^\d\s+-]?(?:\d+(?:\.\d+)?|\.\d+))\s*(?P<unit>[a-z%/]*)\s*"
)
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_RATES = {"tokens/s": ("", "/s", "tok/s", "tokens/s"), "requests/s": ("", "/s", "requests/s")}
COSTS = {"output": "per_million_output", "prompt": "per_million_prompt", "request": "per_request",
         "minute": "per_minute"}  # fmt: skip
"""Statistics of ``cost``, and the fields of ``Cost``."""
Kind = Literal["value", "change", "share"]


@dataclass(frozen=True, slots=True)
class Judged:
    """What became of a condition in one run and load: in words, and whether it is met."""

    run: str
    load: str
    text: str
    met: bool


@dataclass(frozen=True, slots=True)
class Condition:
    """See the module. kind: whether ``bound`` is of the value itself, of its change, or of its change as a
    share of what was. Bounds are in seconds, tokens or requests per second, shares, or money."""

    text: str
    metric: str
    statistic: str
    load: str
    sign: str
    bound: float
    kind: Kind

    @classmethod
    def of(cls, text: str) -> Condition:
        """Read one; MeasureError says what is wrong with it."""
        found = _FORM.fullmatch(text)
        if found is None:
            raise _wrong(text, "a condition is METRIC.STATISTIC > VALUE, as 'ttft.p95 > +10%'")
        metric, statistic = found["metric"], found["statistic"] or ""
        _known(text, metric, statistic)
        digits = re.sub(r"[^\d.+-]", "", found["value"])
        mark = re.sub(r"[\d.+-]", "", found["value"])
        if mark and metric != "cost":
            raise _wrong(text, f"{mark} belongs to cost")
        signed = digits[0] in "+-"
        bound, relative = _bound(text, metric, float(digits), found["unit"], signed)
        kind: Kind = "share" if relative else "change" if signed else "value"
        if metric == "cost" and found["load"]:
            raise _wrong(text, "cost is that of the whole run and takes no load")
        return cls(text.strip(), metric, statistic, (found["load"] or "").strip(), found["sign"], bound, kind)

    @property
    def name(self) -> str:
        """The metric and its statistic."""
        return f"{self.metric}.{self.statistic}" if self.statistic else self.metric

    def judge(self, runs: Sequence[Found], *, surely: bool = False) -> list[Judged]:
        """Judge all runs but the first by the first, or the only one; MeasureError: it cannot be judged.

        surely: a change counts only where the difference is measurable at all.
        """
        if self.kind != "value" and len(runs) < 2:
            raise _wrong(self.text, "a change needs two runs; a value without a sign is absolute")
        judged = []
        for run in runs[1:] or runs:
            loads = [""] if self.metric == "cost" else self._loads([runs[0], run])
            judged += [self._judge(runs[0], run, load, surely) for load in loads]
        return judged

    def _loads(self, runs: Sequence[Found]) -> list[str]:
        loads = common(runs)
        if self.load:
            if self.load not in loads:
                raise _wrong(
                    self.text, f"no load is called {self.load!r}; there are {', '.join(loads) or 'none'}"
                )
            return [self.load]
        if not loads:
            raise _wrong(self.text, "the runs have no load in common")
        return loads

    def _judge(self, first: Found, run: Found, load: str, surely: bool) -> Judged:
        name = run.report.timelines or run.report.url
        now = self._value(run, load)
        before = None if self.kind == "value" else self._value(first, load)
        if now is None or (self.kind != "value" and before is None):
            where = f" with {load}" if load else ""
            raise _wrong(
                self.text,
                f"{self.name} is not known{where}: not measured, or too few requests carry it; "
                "more requests, or a smaller percentile, would do",
            )
        if before is None:
            found, text = now, self._shown(now)
        elif self.kind == "change":
            found, text = now - before, f"{self._shown(before)} to {self._shown(now)}"
        else:
            found = now / before - 1 if before else (0.0 if now == before else float("inf"))
            text = f"{self._shown(before)} to {self._shown(now)}, {change(found)}"
        met = {
            ">": found > self.bound,
            ">=": found >= self.bound,
            "<": found < self.bound,
            "<=": found <= self.bound,
        }[self.sign]
        if met and surely and self.kind != "value" and not self._measurable(first, run, load):
            met, text = False, f"{text}, no measurable difference"
        return Judged(name, load, f"{self.name}: {text}", met)

    def _measurable(self, first: Found, run: Found, load: str) -> bool:
        old, new = of_load(first, load), of_load(run, load)
        if self.metric == "cost" or old is None or new is None:
            return True
        [found] = compare_metric(old, new, METRICS[self.metric], [self.statistic], seed=first.report.seed)
        if found.difference is None:
            raise _wrong(self.text, f"how sure {self.name} is cannot be told; a mean or a percentile can be")
        return found.difference.verdict != "no measurable difference"

    def _value(self, run: Found, load: str) -> float | None:
        if self.metric == "cost":
            cost: Cost | None = run.report.cost
            return None if cost is None else getattr(cost, COSTS[self.statistic])
        of = of_load(run, load)
        return None if of is None else value(of, METRICS[self.metric], self.statistic)

    def _shown(self, found: float) -> str:
        if self.metric == "cost":
            return money(found, "")
        return shown(found, METRICS[self.metric].unit) or UNKNOWN


def _known(text: str, metric: str, statistic: str) -> None:
    if metric == "cost":
        if statistic not in COSTS:
            raise _wrong(text, f"cost needs one of {', '.join(COSTS)}, as cost.output")
        return
    if metric not in METRICS:
        raise _wrong(text, f"there is no metric {metric!r}; there are {', '.join([*METRICS, 'cost'])}")
    of_load_only = METRICS[metric].of == "load"
    if of_load_only and statistic:
        raise _wrong(text, f"{metric} has one number per load and no {statistic!r}")
    if of_load_only:
        return
    if not statistic:
        raise _wrong(
            text, f"{metric} needs a statistic, as {metric}.p95; there are mean, min, max and p1 to p99.9"
        )
    percentile = re.fullmatch(r"p(\d+(?:\.\d+)?)", statistic)
    if statistic not in ("mean", "min", "max") and not (percentile and 0 < float(percentile[1]) < 100):
        raise _wrong(text, f"there is no statistic {statistic!r}; there are mean, min, max and p1 to p99.9")


def _bound(text: str, metric: str, number: float, unit: str, signed: bool) -> tuple[float, bool]:
    """The bound in its unit, and whether it is a share of what was."""
    kind = "money" if metric == "cost" else METRICS[metric].unit
    if kind == "share":
        if unit != "%" and not (unit == "" and number == 0):
            raise _wrong(text, f"{metric} is a share; its value is in percent, as 1%")
        return number / 100, False
    if unit == "%":
        if not signed:
            raise _wrong(text, "a change has a sign, as +10% or -10%")
        return number / 100, True
    if kind == "s":
        if unit not in _TIMES:
            raise _wrong(text, f"{metric} is a time; its value has a unit (us, ms, s), as 500ms")
        return number * _TIMES[unit], False
    allowed = _RATES.get(kind, ("",))
    if unit not in allowed:
        raise _wrong(text, f"the unit {unit!r} is none of {metric}")
    return number, False


def _wrong(text: str, why: str) -> MeasureError:
    return MeasureError(f"{text.strip()!r}: {why}")
