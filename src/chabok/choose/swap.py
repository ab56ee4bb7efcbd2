"""A measured model in place of the recorded one: its line of time to first token, and its pace."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from chabok.choose.turn import Step
from chabok.measure.failures import MeasureError


@dataclass(frozen=True, slots=True)
class Measured:
    """A model as it was measured.

    fixed_s: time to first token of no prompt at all. prompt_token_s: what each new prompt token adds.
    token_s: seconds from one token to the next. answer_scale: output tokens for one of the recorded model's.
    """

    name: str
    fixed_s: float
    prompt_token_s: float
    token_s: float
    answer_scale: float = 1.0

    def __str__(self) -> str:
        return self.name

    def __call__(self, step: Step) -> Step:
        """A model call as this model would do it; MeasureError if its tokens are not known."""
        if step.kind != "model":
            return step
        if step.prompt_tokens is None or step.output_tokens is None:
            raise MeasureError(
                f"step {step.id!r} does not say its prompt and output tokens; without them a measured model "
                "cannot stand in for the recorded one"
            )
        new = max(step.prompt_tokens - (step.cached_tokens or 0), 1)
        prefill = self.fixed_s + new * self.prompt_token_s
        # The first token is there when the prompt has been read.
        tokens = step.output_tokens * self.answer_scale
        writing = max(tokens - 1, 0.0) * self.token_s
        share = (step.reasoning_tokens or 0) / step.output_tokens if step.output_tokens else 0.0
        reasoning = writing * share
        return replace(
            step,
            seconds=prefill + writing,
            prefill_s=prefill,
            reasoning_s=reasoning,
            answer_s=writing - reasoning,
            estimated=True,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.name,
            "fixed_s": self.fixed_s,
            "prompt_token_s": self.prompt_token_s,
            "token_s": self.token_s,
        }

    @classmethod
    def read_all(cls, path: str | os.PathLike[str]) -> list[Measured]:
        """As ``read``; of the folder of a comparison (``chabok compare``), all its members."""
        runs = sorted(Path(path).glob("*/speed.jsonl")) if Path(path).is_dir() else []
        own = Path(path) / "speed.jsonl"
        if own.exists():
            runs = [own]
        return [cls.read(run) for run in runs] if runs else [cls.read(path)]

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Measured:
        """From a saved run of ``chabok bench`` (its .jsonl or .json, or the folder); MeasureError if it does
        not hold what is needed.

        The line is the one fitted through prompts of several lengths; where there is none, it goes through
        the median first token, all of it taken for reading the prompt.
        """
        from chabok.measure.report import Report, read_report, recompute
        from chabok.measure.run import find

        name = os.fspath(path)
        try:
            found = find(path)
            report: Report = read_report(found) if found.suffix == ".json" else recompute(found).report
        except OSError as error:
            raise MeasureError(f"{name}: {error.strerror or error}") from None
        level = report.one_user
        if level is None or level.summary.tpot is None or level.summary.ttft is None:
            raise MeasureError(
                f"{name} holds no answers of more than a token with one user at a time; "
                "`chabok bench --users 1 TARGET` measures them"
            )
        model, fit, pace = report.model or name, report.breakdown.fit, level.summary.tpot.median
        if fit is not None and fit.clear:
            return cls(model, fit.fixed_s, fit.per_token_s, pace)
        done = level.summary.requests - level.summary.failed
        if not level.summary.prompt_tokens or not done:
            raise MeasureError(f"{name} does not say how long its prompts were")
        return cls(model, 0.0, level.summary.ttft.median * done / level.summary.prompt_tokens, pace)
