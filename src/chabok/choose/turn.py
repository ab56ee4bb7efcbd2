"""What a faster model gives a whole turn of work: a graph of steps, its longest chain, and Amdahl's law.

Amdahl (1967): if a share p of the time becomes f times as fast, the whole becomes 1 / ((1 - p) + p / f) times
as fast, and never more than 1 / (1 - p). That is a turn whose steps follow each other. Where steps run side
by side, the time of a turn is that of the longest chain through its dependencies, which may become another
chain when the model becomes faster; so the graph is walked again for each speed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

from chabok.measure.failures import MeasureError

Kind = Literal["model", "tool", "human", "other"]
KINDS: tuple[Kind, ...] = get_args(Kind)
PARTS = ("prefill", "reasoning", "answer", "model", "tool", "human", "other", "idle")
"""What time is counted under: stages of the model's work (``model`` where they are not told apart), tools,
people, other steps, and time in which no step ran."""
MODEL_PARTS = PARTS[:4]
FACTORS = (1.0, 2.0, 5.0, 10.0)
"""Times as fast that are shown."""


@dataclass(frozen=True, slots=True)
class Step:
    """One model call, tool call or wait.

    seconds: how long it took. after: ids of the steps it waits for. lag_s: how long after the last of them it
    began. prefill_s, reasoning_s, answer_s: stages of a model call, as far as known; what is left of seconds
    is model time that is not told apart. estimated: whether these stages are an estimate.
    Tokens: reasoning_tokens are inside output_tokens, cached_tokens inside prompt_tokens; None: not known.
    """

    id: str
    kind: Kind
    seconds: float
    after: tuple[str, ...] = ()
    lag_s: float = 0.0
    name: str = ""
    prefill_s: float = 0.0
    reasoning_s: float = 0.0
    answer_s: float = 0.0
    estimated: bool = False
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    output_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("seconds", "lag_s", "prefill_s", "reasoning_s", "answer_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise MeasureError(f"step {self.id!r}: {name} is {value:g}; it must be 0 or more")
        if self.prefill_s + self.reasoning_s + self.answer_s > self.seconds * (1 + 1e-9) + 1e-9:
            raise MeasureError(f"step {self.id!r}: its stages take longer than its {self.seconds:g} s")

    @property
    def generation_s(self) -> float:
        """Seconds in which it wrote, where that is known."""
        return self.reasoning_s + self.answer_s

    def parts(self) -> dict[str, float]:
        """Its seconds by part."""
        if self.kind != "model":
            return {self.kind: self.seconds}
        known = {"prefill": self.prefill_s, "reasoning": self.reasoning_s, "answer": self.answer_s}
        return known | {"model": max(self.seconds - sum(known.values()), 0.0)}


@dataclass(frozen=True, slots=True)
class Speed:
    """How many times as fast a model becomes: in reading prompts, and in writing."""

    prefill: float = 1.0
    generation: float = 1.0

    @classmethod
    def of(cls, factor: float) -> Speed:
        """The same for both."""
        return cls(factor, factor)

    def __call__(self, step: Step) -> Step:
        """A step at this speed. Time that is not told apart is taken for writing."""
        if step.kind != "model":
            return step
        rest = max(step.seconds - step.prefill_s - step.generation_s, 0.0)
        prefill, reasoning = step.prefill_s / self.prefill, step.reasoning_s / self.generation
        answer = step.answer_s / self.generation
        total = prefill + reasoning + answer + rest / self.generation
        return replace(step, seconds=total, prefill_s=prefill, reasoning_s=reasoning, answer_s=answer)


@dataclass(frozen=True)
class Turn:
    """A turn of work: steps in an order in which each comes after those it waits for.

    tail_s: time after the last step until the turn was over. notes: what the record did not say, or said
    wrongly. Steps are put in order here; MeasureError: two have the same id, one waits for a step that is not
    there, or some wait for each other.
    """

    steps: tuple[Step, ...]
    tail_s: float = 0.0
    name: str = "turn"
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", in_order(self.steps))

    def walk(self, change: Callable[[Step], Step] = lambda step: step) -> Walk:
        """The turn with every step changed, as it would go then."""
        ends: dict[str, float] = {}
        bound: dict[str, str | None] = {}
        changed: dict[str, Step] = {}
        for step in self.steps:
            new = change(step)
            last = max(step.after, key=lambda each: ends[each], default=None)
            ends[step.id] = (0.0 if last is None else ends[last]) + new.lag_s + new.seconds
            bound[step.id], changed[step.id] = last, new
        return Walk(self, changed, ends, bound)

    def seconds(self, factor: float = 1.0) -> float:
        """How long it takes with a model so many times as fast; infinity is allowed."""
        return self.walk(Speed.of(factor)).seconds

    @property
    def tokens_per_s(self) -> float | None:
        """Pace of the model over all its calls: tokens over seconds of writing; None if not known."""
        calls = [step for step in self.steps if step.kind == "model" and step.output_tokens]
        seconds = sum(step.generation_s or step.seconds - step.prefill_s for step in calls)
        tokens = sum(step.output_tokens or 0 for step in calls)
        return tokens / seconds if seconds > 0 and tokens else None


@dataclass(frozen=True)
class Walk:
    """A turn as it goes with certain steps: when each ends, and which it waited for longest."""

    turn: Turn
    steps: dict[str, Step]
    ends: dict[str, float]
    bound: dict[str, str | None]

    @property
    def seconds(self) -> float:
        """From the beginning to the end of the turn."""
        return max(self.ends.values(), default=0.0) + self.turn.tail_s

    def start(self, step: str) -> float:
        """When a step begins."""
        return self.ends[step] - self.steps[step].seconds

    @cached_property
    def path(self) -> tuple[Step, ...]:
        """The steps that decide how long it takes, first to last."""
        at = max(self.ends, key=lambda each: self.ends[each], default=None)
        found: list[Step] = []
        while at is not None:
            found.append(self.steps[at])
            at = self.bound[at]
        return tuple(reversed(found))

    def parts(self) -> dict[str, float]:
        """Seconds by part along the path; they sum to ``seconds``. Parts without time are left out."""
        found = dict.fromkeys(PARTS, 0.0)
        for step in self.path:
            found["idle"] += step.lag_s
            for part, seconds in step.parts().items():
                found[part] += seconds
        found["idle"] += self.turn.tail_s
        return {part: seconds for part, seconds in found.items() if seconds > 0}

    @property
    def hidden_s(self) -> float:
        """Seconds of steps that took no time of the turn, as they ran beside others."""
        return max(sum(step.seconds for step in self.steps.values()) - sum(s.seconds for s in self.path), 0.0)


@dataclass(frozen=True, slots=True)
class Threshold:
    """From which speed on more of it is not felt: where the next doubling saves less than ``share`` of the
    turn, or less than ``seconds``, whichever comes first."""

    share: float = 0.05
    seconds: float = 0.1

    def felt(self, before: float, after: float) -> bool:
        """Whether a turn that takes ``after`` instead of ``before`` seconds is worth the doubling."""
        saved = before - after
        return saved >= self.share * before and saved >= self.seconds

    def __str__(self) -> str:
        ms = self.seconds * 1000
        return f"the next doubling saves less than {self.share:.0%} of the turn or less than {ms:.0f} ms"


@dataclass(frozen=True, slots=True)
class Gain:
    """What a turn becomes. label: with what; factor: times the model's speed, None if it is another model."""

    label: str
    factor: float | None
    seconds: float
    speedup: float
    parts: dict[str, float]


@dataclass(frozen=True)
class TurnReport:
    """What ``chabok turn`` shows.

    parts: seconds of the turn by part, along its critical path. ceiling: times as fast with a model that
    takes no time; infinity if nothing else takes any. felt_up_to: times today's model speed beyond which more
    is not felt by ``threshold``; below 1, already today's is more than is felt. tokens_per_s: of the recorded
    model.
    """

    turn: Turn
    seconds: float
    parts: dict[str, float]
    model_share: float
    ceiling: float
    gains: tuple[Gain, ...]
    felt_up_to: float
    threshold: Threshold
    tokens_per_s: float | None
    hidden_s: float
    swaps: tuple[Gain, ...] = ()
    curve: tuple[tuple[float, float], ...] = field(default=(), repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; what is infinite is None."""
        pace = self.tokens_per_s
        return {
            "schema": "chabok.turn/1",
            "name": self.turn.name,
            "seconds": self.seconds,
            "parts": self.parts,
            "model_share": self.model_share,
            "ceiling": _finite(self.ceiling),
            "gains": [_gain(each) for each in self.gains],
            "swaps": [_gain(each) for each in self.swaps],
            "felt_up_to": _finite(self.felt_up_to),
            "felt_up_to_tokens_per_s": _finite(self.felt_up_to * pace) if pace else None,
            "felt_means": str(self.threshold),
            "tokens_per_s": pace,
            "hidden_s": self.hidden_s,
            "path": [step.id for step in self.turn.walk().path],
            "steps": len(self.turn.steps),
            "notes": list(self.turn.notes),
        }

    def _repr_html_(self) -> str:
        from chabok.choose.sheet import notebook
        from chabok.choose.turn_charts import charts

        return notebook(charts(self))

    def _repr_svg_(self) -> str:
        from chabok.choose.sheet import alone
        from chabok.choose.turn_charts import curve

        return alone(curve(self).svg)


def examine(
    turn: Turn,
    factors: Sequence[float] = FACTORS,
    *,
    models: Iterable[Callable[[Step], Step]] = (),
    threshold: Threshold | None = None,
) -> TurnReport:
    """Say where a turn's time goes and what a faster model gives it.

    models: measured ones to put in place of the recorded one (``chabok.choose.swap.Measured``). MeasureError:
    a factor is not more than 0, or the turn takes no time.
    """
    threshold = threshold or Threshold()
    now = turn.walk()
    if not now.seconds > 0:
        raise MeasureError(f"{turn.name}: it takes no time at all; nothing can be said of its speed")
    for factor in factors:
        if not factor > 0:
            raise MeasureError(f"a model cannot be {factor:g} times as fast; say a number above 0")
    bare = turn.seconds(math.inf)
    gains = [_gained(f"{factor:g}x", factor, now, turn.walk(Speed.of(factor))) for factor in factors]
    swaps = [_gained(str(model), None, now, turn.walk(model)) for model in models]
    points = [2 ** (n / 8) for n in range(-8, 57)]
    return TurnReport(
        turn,
        now.seconds,
        now.parts(),
        1 - bare / now.seconds,
        now.seconds / bare if bare > 0 else math.inf,
        tuple(gains),
        felt_up_to(turn, threshold),
        threshold,
        turn.tokens_per_s,
        now.hidden_s,
        tuple(swaps),
        tuple((factor, now.seconds / turn.seconds(factor)) for factor in points),
    )


def few(
    *,
    model_seconds: float | None = None,
    tokens: float | None = None,
    speed: float | None = None,
    prefill: float = 0.0,
    tools: float = 0.0,
    human: float = 0.0,
    idle: float = 0.0,
) -> Turn:
    """A turn in a few numbers, one step after the other; seconds, tokens, tokens/s.

    Either of model_seconds (prefill included) and tokens with speed (prefill comes on top). MeasureError:
    neither is said, or they disagree.
    """
    if model_seconds is None:
        if tokens is None or not speed:
            raise MeasureError("say how long the model takes, or how many tokens it writes and how fast")
        writing = tokens / speed
    else:
        if prefill > model_seconds:
            raise MeasureError(
                f"reading the prompt takes {prefill:g} s of only {model_seconds:g} s of the model"
            )
        writing = model_seconds - prefill
        if tokens is None and speed:
            tokens = writing * speed
        elif tokens is not None and speed and abs(tokens / speed - writing) > 0.02 * max(writing, 1e-9):
            raise MeasureError(
                f"{tokens:g} tokens at {speed:g} tokens/s take {tokens / speed:.3g} s, but the model is said "
                f"to write for {writing:.3g} s; leave one of the three out"
            )
    count = None if tokens is None else round(tokens)
    model = Step(
        "model", "model", prefill + writing, (), idle, "model", prefill, 0.0, writing, output_tokens=count
    )
    steps = [model]
    for name, kind, seconds in (("tools", "tool", tools), ("people", "human", human)):
        if seconds:
            steps.append(Step(name, kind, seconds, (steps[-1].id,), name=name))  # type: ignore[arg-type]
    return Turn(tuple(steps))


def amdahl(model_share: float, factor: float) -> float:
    """Times as fast as a turn becomes of which a share becomes ``factor`` times as fast (Amdahl 1967)."""
    if not 0 <= model_share <= 1 or not factor > 0:
        raise MeasureError(f"a share is from 0 to 1 and a factor above 0, not {model_share:g} and {factor:g}")
    rest = (1 - model_share) + model_share / factor
    return 1 / rest if rest > 0 else math.inf


def felt_up_to(turn: Turn, threshold: Threshold) -> float:
    """Times the model's speed at which ``threshold`` is reached; infinity if it never is, 0 if always.

    What a doubling saves, in seconds and as a share, falls with speed: the time of a turn is a maximum of
    lines in 1 / speed, none of which is below zero at an infinite speed. So it can be bisected.
    """

    def felt(log: float) -> bool:
        return threshold.felt(turn.seconds(2.0**log), turn.seconds(2.0 ** (log + 1)))

    low, high = -20.0, 40.0
    if not felt(low):
        return 0.0
    if felt(high):
        return math.inf
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if felt(middle) else (low, middle)
    return float(2.0**high)


def in_order(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Steps so that each follows those it waits for, else as they were. MeasureError: there is no such
    order."""
    known = {step.id: step for step in steps}
    if len(known) != len(steps):
        seen: set[str] = set()
        twice = next(step.id for step in steps if step.id in seen or seen.add(step.id))  # type: ignore[func-returns-value]
        raise MeasureError(f"two steps have the id {twice!r}")
    waiting = {step.id: set(step.after) for step in steps}
    followers: dict[str, list[str]] = {step.id: [] for step in steps}
    for step in steps:
        for before in set(step.after):
            if before not in known:
                raise MeasureError(f"step {step.id!r} waits for {before!r}, which is not there")
            followers[before].append(step.id)
    import heapq

    place = {step.id: n for n, step in enumerate(steps)}
    ready = [(n, step.id) for n, step in enumerate(steps) if not waiting[step.id]]
    found: list[Step] = []
    while ready:
        _, at = heapq.heappop(ready)
        found.append(known[at])
        for follower in followers[at]:
            waiting[follower].discard(at)
            if not waiting[follower]:
                heapq.heappush(ready, (place[follower], follower))
    if len(found) != len(steps):
        stuck = [name for name, left in waiting.items() if left][:5]
        raise MeasureError(f"steps wait for each other: {', '.join(map(repr, stuck))}")
    return tuple(found)


def _gained(label: str, factor: float | None, now: Walk, then: Walk) -> Gain:
    speedup = now.seconds / then.seconds if then.seconds > 0 else math.inf
    return Gain(label, factor, then.seconds, speedup, then.parts())


def _gain(gain: Gain) -> dict[str, Any]:
    return {
        "label": gain.label,
        "factor": gain.factor,
        "seconds": gain.seconds,
        "speedup": _finite(gain.speedup),
        "parts": gain.parts,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
