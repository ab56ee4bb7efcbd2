"""Asks a target one question, and keeps all that its score is made of."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any, Literal, Protocol

from chabok.choose.quality import rating
from chabok.choose.quality.questions import Question
from chabok.choose.quality.rating import Rated, UnratedError
from chabok.choose.quality.scoring import judge
from chabok.errors import ChabokError
from chabok.measure.endpoint import Endpoint, Target
from chabok.measure.metrics import measure
from chabok.measure.timeline import Timeline

Method = Literal["auto", "logprob", "text"]
METHODS = ("auto", "logprob", "text")


@dataclass(slots=True)
class Answered:
    """One question, answered: a line of ``quality.jsonl``.

    question: its id. set: of which set. method: ``logprob``, ``text``, or ``raw`` (a text continued). right:
    by the headline way; right_plain, right_normalised: of rated choices, by the plain log probability and by
    that per character. answered: False where nothing could be read from the answer, which counts as wrong.
    error: it could not be asked; it counts neither way, and is asked again on resuming. rated: each choice's
    log probability and number of tokens. began_s: since the run of questions began.
    """

    question: str
    set: str
    method: str
    right: bool = False
    answered: bool = True
    right_plain: bool | None = None
    right_normalised: bool | None = None
    answer: str = ""
    read: str = ""
    why: str = ""
    error: str = ""
    rated: list[Rated] = field(default_factory=list)
    began_s: float = 0.0
    took_s: float | None = None
    first_token_s: float | None = None
    output_tokens: int | None = None
    finish: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


class _Asked(Protocol):
    """What an ask is timed by: a target, or its raw twin."""

    async def __call__(self, client: Any, ask: Any, timeline: Timeline, start: float) -> Timeline: ...


class Asker:
    """Asks questions of one target, one after the other."""

    def __init__(self, target: Target, client: Any, method: Method = "auto") -> None:
        self._target = target
        self._client = client
        self._method = method
        self._start = perf_counter()
        self.note = ""
        """Why choices are read from the text, where they are and ``auto`` was asked."""

    async def __call__(self, question: Question, name: str) -> Answered:
        """Ask a question of the set ``name``; what fails is in ``error``."""
        began = perf_counter() - self._start
        answered = None
        if question.way == "choices" and self._method != "text" and not self.note:
            answered = await self._rate(question, name)
        if answered is None:
            answered = await self._write(question, name)
        answered.began_s = round(began, 6)
        return answered

    async def _rate(self, question: Question, name: str) -> Answered | None:
        found = Answered(question.id, name, "logprob")
        contexts = question.contexts or (question.context,) * len(question.choices)
        began = perf_counter()
        try:
            if isinstance(self._target, Endpoint):
                found.rated = await rating.rate(self._target, self._client, contexts, question.continuations)
            else:
                found.rated = await self._target.rate(contexts, question.continuations)  # type: ignore[attr-defined]
        except UnratedError as error:
            if self._method == "logprob":
                found.error = str(error)
                return found
            self.note = str(error)
            return None
        except ChabokError as error:
            found.error = str(error)
            return found
        found.took_s = round(perf_counter() - began, 6)
        plain = [each.logprob for each in found.rated]
        per = [
            each.logprob / max(len(text.strip()), 1)
            for each, text in zip(found.rated, question.continuations)
        ]
        found.right_plain = _best(plain) == question.answer
        found.right_normalised = _best(per) == question.answer
        best = _best(per if question.normalise == "characters" else plain)
        found.right = best == question.answer
        found.read = found.answer = question.choices[best]
        return found

    async def _write(self, question: Question, name: str) -> Answered:
        found = Answered(question.id, name, "text")
        time: _Asked = self._target.time
        ask = self._target.ask(
            str(question.messages[-1]["content"]), question.limit, exact=False, messages=question.messages
        )
        if question.raw and (twin := self._raw(question)) is not None:
            time, ask = twin
            found.method = "raw"
        began = perf_counter()
        timeline = Timeline(0, 0.0, asked_output=question.limit)
        await time(self._client, ask, timeline, began)
        metrics = measure(timeline)
        found.answer, found.finish = timeline.text, timeline.finish
        found.took_s, found.first_token_s = metrics.e2e_s, metrics.ttft_s
        found.output_tokens = metrics.output_tokens
        if timeline.failure is not None:
            found.error = f"{timeline.failure.kind}: {timeline.failure.message}"
            return found
        verdict = judge(question, found.answer)
        found.right, found.answered = verdict.right, verdict.answered
        found.read, found.why = verdict.read, verdict.why
        return found

    def _raw(self, question: Question) -> tuple[_Asked, Any] | None:
        target = self._target
        if isinstance(target, Endpoint):
            twin = rating.raw(target)
            if twin is None:
                return None
            return twin.time, twin.ask(question.context, question.limit, exact=False)
        timed: _Asked = target.time_raw  # type: ignore[attr-defined]
        return timed, target.ask(question.context, question.limit, exact=False)


def _best(values: list[float]) -> int:
    """The place of the highest value; the first of equals."""
    return max(range(len(values)), key=values.__getitem__)
