"""What an answer cost, as clients are told it: tokens, times, and which model exactly answered."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from chabok import __version__
from chabok.engine.timings import Timings
from chabok.server.events import Answer, Ended, Usage

if TYPE_CHECKING:
    from chabok.server.roster import Served


def fingerprint(served: Served) -> str:
    """Changes when the model's weights or this program do; the same seed then gives other text."""
    model = served.llm.llm.engine.model.fingerprint
    return "fp_" + hashlib.sha256(f"{model} {__version__}".encode()).hexdigest()[:12]


def usage_dict(usages: Iterable[Usage]) -> dict[str, Any]:
    """OpenAI's usage object; the prompt of several answers counts once."""
    all_ = list(usages)
    prompt = all_[0].prompt
    output = sum(usage.output for usage in all_)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": all_[0].cached},
        "completion_tokens_details": {"reasoning_tokens": sum(usage.reasoning for usage in all_)},
    }


def merged_timings(answers: Sequence[Answer] | Sequence[Ended], served: Served) -> Timings:
    """The timings of several answers as those of one: times of the slowest, tokens of all."""
    every = [
        (answer.ended if isinstance(answer, Answer) else answer).completion.timings for answer in answers
    ]
    if len(every) == 1:
        return every[0]
    merged = {item.name: max(getattr(one, item.name) for one in every) for item in fields(Timings)}
    for name in ("sample_s", "detokenize_s", "output_tokens", "preemptions"):
        merged[name] = sum(getattr(one, name) for one in every)
    return Timings(**merged)


def timings_dict(timings: Timings) -> dict[str, float | int]:
    """The ``timings`` object: durations in milliseconds, counts and speeds."""
    found: dict[str, float | int] = {}
    for name, value in timings.to_dict().items():
        if name.endswith("_per_s"):
            found[name] = round(value, 2)
        elif name.endswith("_s"):
            found[f"{name[:-2]}_ms"] = round(value * 1000, 3)
        else:
            found[name] = value
    return found
