"""What a comparison says of one contestant, computed from its raw files."""

from __future__ import annotations

from dataclasses import dataclass, field

from chabok import bands
from chabok.choose.contest import Contestant, Place, Plan
from chabok.choose.quality.asking import Answered
from chabok.choose.quality.statistics import wilson
from chabok.errors import ChabokError
from chabok.measure.cost import Price, cost
from chabok.measure.failures import MeasureError
from chabok.measure.report import Level, recompute
from chabok.measure.run import Run
from chabok.measure.stats import Distribution, Interval
from chabok.measure.timeline import Timeline


@dataclass(slots=True)
class Quality:
    """Shares of right answers.

    asked: questions that could be asked. right: of these. share, interval: right / asked, and its 95 %
    Wilson interval. unread: answers in which nothing could be read, counted as wrong. failed: questions
    that could not be asked, which count neither way. cut: wrong answers that the limit of tokens ended.
    methods: how many questions by which. plain, normalised: of rated choices, the share by plain log
    probability and by that per character. sets: name -> (right, asked).
    """

    asked: int
    right: int
    share: float
    interval: Interval
    unread: int = 0
    failed: int = 0
    cut: int = 0
    methods: dict[str, int] = field(default_factory=dict)
    plain: float | None = None
    normalised: float | None = None
    sets: dict[str, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, answers: list[Answered]) -> Quality | None:
        """From answers; None: none could be asked."""
        good = [each for each in answers if not each.error]
        if not good:
            return None
        right = sum(each.right for each in good)
        rated = [each for each in good if each.right_plain is not None]
        sets: dict[str, tuple[int, int]] = {}
        methods: dict[str, int] = {}
        for each in good:
            before = sets.get(each.set, (0, 0))
            sets[each.set] = (before[0] + each.right, before[1] + 1)
            methods[each.method] = methods.get(each.method, 0) + 1
        return cls(
            len(good),
            right,
            right / len(good),
            wilson(right, len(good)),
            sum(not each.answered for each in good),
            len(answers) - len(good),
            sum(each.method == "text" and each.finish == "length" and not each.right for each in good),
            methods,
            sum(bool(each.right_plain) for each in rated) / len(rated) if rated else None,
            sum(bool(each.right_normalised) for each in rated) / len(rated) if rated else None,
            sets,
        )


@dataclass(slots=True)
class Member:
    """One contestant and what was measured. None: not known; ``missing`` says why.

    first_token_s, answer_s: medians over the prompts, from when the request was due to the first token and
    to the end; their intervals beside them. pace: tokens/s as one reader feels it, 1 / TPOT, the median;
    band: the word for it. worst_gap_s: the longest silence within any answer. answer_tokens: mean. cut:
    answers that the limit of tokens ended. cost: of 1000 answers; cost_per_million: of output tokens, the
    prompts' cost aside. memory_bytes: most that was resident. quality: of the questions. requests, failed:
    of the speed part. raw: the files it is computed from.
    """

    label: str
    target: str
    kind: str
    model: str = ""
    server: str = ""
    first_token_s: float | None = None
    first_token_interval: Interval | None = None
    pace: float | None = None
    pace_interval: Interval | None = None
    band: str = ""
    worst_gap_s: float | None = None
    answer_tokens: float | None = None
    answer_s: float | None = None
    answer_interval: Interval | None = None
    cut: int = 0
    requests: int = 0
    failed: int = 0
    cost: float | None = None
    cost_per_million: float | None = None
    currency: str = ""
    price: str = ""
    memory_bytes: int | None = None
    load_s: float | None = None
    quality: Quality | None = None
    failure: str = ""
    complete: bool = False
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    raw: list[str] = field(default_factory=list)

    @property
    def share(self) -> float | None:
        """The share of right answers."""
        return None if self.quality is None else self.quality.share

    @property
    def measured(self) -> bool:
        """Whether anything is known of it."""
        return self.answer_s is not None or self.quality is not None


def member_of(place: Place, plan: Plan, price: Price | None, memory: int | None = None) -> Member:
    """What the files of a contestant say. memory: bytes that its owner told."""
    contestant, state = place.contestant, place.state()
    found = Member(contestant.label, _shown(contestant), contestant.kind, state.model, state.server)
    found.failure, found.load_s, found.notes = state.failure, state.load_s, list(state.notes)
    found.memory_bytes = memory if memory is not None else state.memory_bytes
    found.complete = state.speed_done and (state.quality_done or not plan.evals)
    if found.memory_bytes is None:
        found.missing.append(
            "memory: an endpoint does not tell" if contestant.kind == "endpoint" else "memory"
        )
    _speed(found, place, plan, price)
    answers = place.answers()
    if contestant.kind == "run" and plan.evals and answers:
        try:
            wanted = {(each.name, question.id) for each in plan.sets() for question in each}
        except ChabokError:  # the comparison says so; which of these answers are to the same questions?
            wanted = set()
        answers = [each for each in answers if (each.set, each.question) in wanted]
    found.quality = Quality.of(answers)
    if found.quality is not None:
        found.raw.append(str(place.quality))
    elif plan.evals:
        found.missing.append("quality: no question was answered")
    return found


def _shown(contestant: Contestant) -> str:
    return contestant.target + (f"#{contestant.model}" if contestant.model else "")


def _speed(found: Member, place: Place, plan: Plan, price: Price | None) -> None:
    try:
        report = recompute(place.speed, price=price).report
    except (MeasureError, OSError) as error:
        if found.kind == "run":
            found.failure = found.failure or str(error)
        found.missing.append("speed: nothing was measured")
        return
    level = report.one_user or (report.levels[0] if report.levels else None)
    found.raw.append(str(place.speed))
    if found.kind == "run":
        found.model, found.server, found.complete = report.model, report.server, report.complete
        work = f"prompts of {report.prompt_tokens or '?'} tokens, answers of {report.output_tokens or '?'}"
        found.notes.append(f"a saved run with work of its own ({work}): compare its speed with care")
    if level is None or level.summary.e2e is None:
        found.missing.append("speed: no request succeeded" if level else "speed: nothing was measured")
        return
    _timed(found, level)
    found.cut = sum(
        each.ok and each.finish in ("length", "max_tokens")
        for each in Run(place.speed)
        if isinstance(each, Timeline) and each.phase == level.phase
    )
    if found.cut and found.kind != "run":
        found.notes.append(
            f"{found.cut} of {found.requests} answers were cut off at {plan.output_tokens} tokens"
        )
    price = price or (None if report.cost is None else report.cost.price)
    if price is None:
        found.missing.append("cost: no price was given (--price, --per-hour, or --watts with --per-kwh)")
        return
    paid = cost(price, level.summary, max(level.users, 1), level.prefill_share)
    found.price, found.currency = price.name, price.currency
    found.cost = None if paid.per_request is None else paid.per_request * 1000
    found.cost_per_million = paid.per_million_output
    if found.cost is None:
        found.missing.append("cost: " + (", ".join(paid.missing) or "it cannot be told") + " is not known")


def _timed(found: Member, level: Level) -> None:
    summary = level.summary
    good = summary.requests - summary.failed
    found.requests, found.failed = summary.requests, summary.failed
    found.first_token_s, found.first_token_interval = _middle(summary.ttft)
    found.answer_s, found.answer_interval = _middle(summary.e2e)
    found.pace, found.pace_interval = _middle(summary.speed)
    found.band = "" if found.pace is None else bands.speed(found.pace)
    found.worst_gap_s = None if summary.worst_gap is None else summary.worst_gap.most
    found.answer_tokens = summary.output_tokens / good if good else None
    for error in summary.errors:
        found.notes.append(
            f"{error.count} of {summary.requests} requests failed ({error.kind}): {error.example}"
        )
    if level.client_bound:
        found.notes.append(level.client_bound)


def _middle(values: Distribution | None) -> tuple[float | None, Interval | None]:
    return (None, None) if values is None else (values.median, values.intervals.get(50.0))
