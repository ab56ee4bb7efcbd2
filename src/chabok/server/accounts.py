"""What an answer cost, as clients are told it: tokens, times, and which model exactly answered."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from chabok import __version__
from chabok.engine.timings import Timings
from chabok.server.events import Answer, Ended

if TYPE_CHECKING:
    from chabok.server.roster import Served


def fingerprint(served: Served) -> str:
    """Changes when the model's weights or this program do; the same seed then gives other text."""
    model = served.llm.llm.engine.model.fingerprint
    return "fp_" + hashlib.sha256(f"{model} {__version__}".encode()).hexdigest()[:12]


def usage_dict(ended: Sequence[Ended], n: int) -> dict[str, Any]:
    """OpenAI's usage object; a prompt counts once for its n answers, which follow each other."""
    all_ = [one.usage for one in ended]
    prompt = sum(usage.prompt for usage in all_[::n])
    output = sum(usage.output for usage in all_)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached for usage in all_[::n])},
        "completion_tokens_details": {"reasoning_tokens": sum(usage.reasoning for usage in all_)},
    }


def merged_timings(answers: Sequence[Answer] | Sequence[Ended]) -> Timings:
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


def timings_dict(timings: Timings, load_s: float) -> dict[str, float | int]:
    """The ``timings`` object: durations in milliseconds, counts and speeds.

    load_s: seconds the request waited for its model to be loaded.
    """
    found: dict[str, float | int] = {}
    for name, value in timings.to_dict().items():
        if name.endswith("_per_s"):
            found[name] = round(value, 2)
        elif name.endswith("_s"):
            found[f"{name[:-2]}_ms"] = round(value * 1000, 3)
        else:
            found[name] = value
    found["load_ms"] = round(load_s * 1000, 3)
    return found
