"""Measures this machine, and a model on it, in seconds."""

from __future__ import annotations

import os
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

from chabok.choose.roofline import Machine

READ_BYTES = 256 << 20
GENERATED = 48
"""Tokens that are generated to measure a pace."""


def measure_machine(threads: int | None = None, *, rounds: int = 5) -> Machine:
    """Read bandwidth and multiply-add peak with as many threads as models use, the best of some rounds;
    chabok.compute.isa.UnsupportedCPUError: there are no kernels for this processor."""
    from chabok.checkpoints.memory import available_memory
    from chabok.checkpoints.paths import kernels_dir
    from chabok.compute import isa
    from chabok.compute.bandwidth import read_bandwidth
    from chabok.compute.library import Library
    from chabok.compute.peak import multiply_add_peak
    from chabok.compute.pool import usable_cores

    chosen = isa.choose()
    library, count = Library(chosen, kernels_dir()), threads or usable_cores()
    peak = multiply_add_peak(library, count, rounds=rounds)
    bandwidth = read_bandwidth(library, count, n_bytes=READ_BYTES, rounds=rounds)
    return Machine(bandwidth, max(peak, multiply_add_peak(library, count, rounds=rounds)), count, chosen.name,
                   available_memory())  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reached:
    """What a model reached here: tokens/s of one answer and of reading a prompt; medians of token gaps, best
    of some prompts. disturbed: slowest tenth of gaps against the median; above 1.5 others were at work."""

    tokens_per_s: float
    prompt_tokens_per_s: float
    first_token_s: float
    disturbed: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {name: getattr(self, name) for name in self.__slots__}


def measure_model(
    path: str | os.PathLike[str], *, prompt: int = 512, context: int = 512, threads: int | None = None
) -> Reached:
    """Generate after a context, and read prompts nobody has read before; through the Python API."""
    import numpy as np

    from chabok import LLM, SamplingParams

    room = max(prompt, context) + GENERATED + 2
    with LLM(path, context=room, threads=threads) as llm:
        rng = np.random.default_rng(0)
        # Of any vocabulary the middle: neither special tokens nor single bytes.
        words = [token for token in llm.tokenize(_TEXT) if token > 300] or llm.tokenize(_TEXT)

        def fresh(n: int) -> list[int]:
            return [int(words[i]) for i in rng.integers(0, len(words), n)]

        llm.generate(fresh(8), SamplingParams(max_tokens=4, ignore_eos=True))
        prefill = [llm.generate(fresh(prompt), SamplingParams(max_tokens=1)).timings for _ in range(3)]
        gaps: list[float] = []
        with llm.stream(fresh(context), SamplingParams(max_tokens=GENERATED, ignore_eos=True)) as stream:
            before = None
            for _ in stream:
                now = perf_counter()
                if before is not None:
                    gaps.append(now - before)
                before = now
    best = min(timings.prefill_s for timings in prefill)
    middle = median(gaps)
    slow = sorted(gaps)[int(len(gaps) * 0.9)]
    return Reached(1 / middle, prompt / best, min(t.first_token_s for t in prefill), slow / middle)


_TEXT = (
    "Rivers carry sand, gravel and stories from the mountains down to the sea, where harbours, bridges and "
    "old markets have waited for ships since people first learned to count, to write letters and to trade. "
) * 4
