"""Invented runs with known properties, for tests of what is made of runs."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from chabok.measure import (
    Concurrent,
    Event,
    Failure,
    Outcome,
    Rate,
    ServerTimings,
    Timeline,
    Usage,
    Window,
)
from chabok.measure.run import About, RunFile

LIMITS = ["ttft=500ms:p95", "speed=20:p95"]


def answer(
    number: int, due: float, *, phase: str = "one user", ttft: float = 0.05, gap: float = 0.01,
    tokens: int = 8, prompt: int = 128, jitter: random.Random | None = None,
    failure: Failure | None = None, cached: int = 0,
) -> Timeline:  # fmt: skip
    """A request that was sent when it was due, with even gaps (a few percent uneven with ``jitter``)."""
    at = due + ttft * (jitter.lognormvariate(0, 0.15) if jitter else 1)
    events = [Event(due + ttft / 2, "role")]
    for count in range(tokens):
        events.append(Event(at, "content", "word ", count + 1))
        at += gap * (jitter.lognormvariate(0, 0.3) * (12 if jitter.random() < 0.004 else 1) if jitter else 1)
    last = events[-1].at
    made = Timeline(number, due, phase, sent=due + 1e-5, headers=due + ttft / 3, done=last, status=200)
    made.finish, made.asked_prompt, made.asked_output = "length", prompt, tokens
    made.events, made.usage = events, Usage(prompt, tokens, None, cached)
    made.server = ServerTimings("chabok", prefill_ms=ttft * 800, decode_ms=gap * (tokens - 1) * 1000)
    if failure is not None:
        made.failure, made.events = failure, events[:2]
    return made


def write_run(
    path: Path, *, users: Iterable[int] = (1, 2, 4, 8, 16), rates: Iterable[float] = (), rounds: int = 12,
    slow: float = 1.0, seed: int = 1, tokens: int = 48, failing: float = 0.0, prompt: int = 128, **about: Any,
) -> Path:  # fmt: skip
    """A run of a machine that reads a prompt in 40 ms and shares 200 tokens/s among its users."""
    chance = random.Random(seed)
    known = {"url": "http://127.0.0.1:8000", "model": "smollm2", "dialect": "openai-chat", "seed": seed}
    known |= {
        "prompt_tokens": str(prompt),
        "output_tokens": str(tokens),
        "lengths": "usage",
        "limits": LIMITS,
    }
    known |= {
        "command": "chabok bench http://127.0.0.1:8000",
        "started_at": "2026-05-01T10:00:00+00:00",
    } | about
    clock, number = 0.5, 0
    with RunFile(path, About(**known)) as file:
        for phase, ttft, prompts in _probes():
            file(answer(number, clock, phase=phase, ttft=ttft, tokens=2, prompt=prompts, jitter=chance))
            clock, number = clock + 1, number + 1
        for count in users:
            began, gap = clock, (0.005 + 0.0016 * count) * slow
            phase = str(Concurrent(count, 1))
            free = [began] * count
            for _ in range(rounds * count if count > 1 else 3 * rounds):
                seat = min(range(count), key=lambda each: free[each])
                ttft = 0.04 * slow * (1 + 0.9 * count * chance.random())
                failure = (
                    Failure("http 500", "the model <b>fell</b> | over") if chance.random() < failing else None
                )
                made = answer(number, free[seat], phase=phase, ttft=ttft, gap=gap, tokens=tokens,
                              jitter=chance, failure=failure, prompt=prompt)  # fmt: skip
                file(made)
                number, free[seat] = number + 1, made.done or 0.0
            clock = max(free)
            steady = Window(began if count == 1 else began + 0.1, min(free))
            file.load(Outcome(phase, Concurrent(count, 1), began, clock, steady, cpu_share=0.02))
            clock += 0.5
        for rate in rates:
            load, began = Rate(rate, rounds * 4), clock
            for due in load.due(seed):
                ttft = 0.04 * slow * (1 + rate * chance.random())
                file(answer(number, began + due, phase=str(load), ttft=ttft, gap=0.01 * slow, tokens=tokens,
                            jitter=chance, prompt=prompt))  # fmt: skip
                number, clock = number + 1, began + due + 1
            file.load(
                Outcome(str(load), load, began, clock, Window(began + 0.1, clock - 0.5), cpu_share=0.03)
            )
        file.known(round_trip_s=0.0004, connect_s=0.0007, server="chabok/0.1", complete=True, looked=True)
    return path


def _probes() -> Iterable[tuple[str, float, int]]:
    yield "warm-up", 0.9, 128
    for turn in range(16):
        length = (64, 128, 256, 512)[turn % 4]
        yield "prompt lengths", 0.01 + length * 0.0003, length
    for turn in range(6):
        yield "repeated prompt", 0.16 if turn % 2 == 0 else 0.02, 512
