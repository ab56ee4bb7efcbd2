"""Speed in words, and the line that ends an answer."""

from __future__ import annotations

from chabok import bands
from chabok.engine.timings import Timings


def summary(timings: Timings) -> str:
    """Where the time of an answer went, in one line."""
    new = timings.prompt_tokens - timings.cached_tokens
    cached = f", {timings.cached_tokens} cached" if timings.cached_tokens else ""
    speed = f", {_rounded(timings.prompt_tokens_per_s)} tok/s" if new and timings.prefill_s else ""
    parts = []
    if timings.output_tokens:
        parts.append(
            f"first token {milliseconds(timings.first_token_s)} "
            f"(prompt {timings.prompt_tokens} tokens{cached}{speed})"
        )
    if timings.tokens_per_s:
        parts.append(f"{_rounded(timings.tokens_per_s)} tok/s")
    parts.append(f"{timings.output_tokens} token{'' if timings.output_tokens == 1 else 's'}")
    if timings.tokens_per_s:
        parts.append(f"band: {bands.speed(timings.tokens_per_s)}")
    return " · ".join(parts)


def milliseconds(seconds: float) -> str:
    """A short duration for a person: 0.42 ms, 31 ms, 2.1 s."""
    ms = seconds * 1000
    if ms >= 1000:
        return f"{seconds:.1f} s"
    return f"{ms:.0f} ms" if ms >= 10 else f"{ms:.1f} ms"


def _rounded(speed: float) -> str:
    return f"{speed:.0f}" if speed >= 10 else f"{speed:.1f}"
