"""Measures this machine, and a model on it, in seconds."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

from chabok.choose.roofline import Machine
from chabok.errors import RequestError

READ_BYTES = 256 << 20
CALM = 0.8
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
    """What a model reached here: tokens/s of one answer and of reading a prompt.

    Medians of the gaps between tokens, best of some prompts. cpu_share: of its cores, what this process got
    meanwhile; its threads wait by spinning, so less than ``CALM`` means that others were at work.
    """

    tokens_per_s: float
    prompt_tokens_per_s: float
    first_token_s: float
    cpu_share: float

    @property
    def disturbed(self) -> bool:
        """Whether others had a part of the cores."""
        return self.cpu_share < CALM

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def measure_model(
    path: str | os.PathLike[str], *, prompt: int = 512, context: int = 512, threads: int | None = None
) -> Reached:
    """Generate after a context, and read prompts nobody has read before; through the Python API.

    RequestError: the model's context has no room for that.
    """
    import numpy as np

    from chabok import LLM, SamplingParams
    from chabok.checkpoints.gguf import GGUF
    from chabok.compute.pool import usable_cores

    room = max(prompt, context) + GENERATED + 2
    gguf = GGUF.open(Path(path))
    limit = gguf.get(f"{gguf.architecture}.context_length", int, room)
    if room > limit:
        raise RequestError(
            f"the model's context is {limit} tokens: it can be measured with {limit - GENERATED - 2} at most "
            "(--context N --prompt N), or not at all (--no-measure)",
            "context",
        )
    with LLM(path, context=room, threads=threads) as llm:
        rng = np.random.default_rng(0)
        # Of any vocabulary the middle: neither special tokens nor single bytes.
        words = [token for token in llm.tokenize(_TEXT) if token > 300] or llm.tokenize(_TEXT)

        def fresh(n: int) -> list[int]:
            return [int(words[i]) for i in rng.integers(0, len(words), n)]

        llm.generate(fresh(8), SamplingParams(max_tokens=4, ignore_eos=True))
        began, used = perf_counter(), process_time()
        prefill = [llm.generate(fresh(prompt), SamplingParams(max_tokens=1)).timings for _ in range(3)]
        gaps: list[float] = []
        with llm.stream(fresh(context), SamplingParams(max_tokens=GENERATED, ignore_eos=True)) as stream:
            before = None
            for _ in stream:
                now = perf_counter()
                if before is not None:
                    gaps.append(now - before)
                before = now
        share = (process_time() - used) / (perf_counter() - began) / (threads or usable_cores())
    best = min(timings.prefill_s for timings in prefill)
    return Reached(1 / median(gaps), prompt / best, min(t.first_token_s for t in prefill), share)


_TEXT = (
    "Rivers carry sand, gravel and stories from the mountains down to the sea, where harbours, bridges and "
    "old markets have waited for ships since people first learned to count, to write letters and to trade. "
) * 4
