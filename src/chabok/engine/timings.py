"""Where a request's time went, measured once, here, on the monotonic clock."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from time import perf_counter


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds (``_s``) and counts of one request.

    tokenize_s: text to token ids, chat template included.
    queue_s: from submission until its first row is computed.
    prefill_s: from there until the logits of the last prompt token are known.
    first_token_s: from the caller's call until the first token can be read.
    decode_s: from the first token to the last.
    sample_s, detokenize_s: choosing tokens and turning them into text, summed over all tokens.
    total_s: from the caller's call to the end.
    worst_gap_s: the longest time between two tokens of the answer.
    cached_tokens: prompt tokens whose keys and values were in the prefix cache already, in memory
    (cached_tokens_memory) or on disk (cached_tokens_disk).
    preemptions: how often the sequence gave its pages up to others and was recomputed.
    """

    tokenize_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    decode_s: float = 0.0
    sample_s: float = 0.0
    detokenize_s: float = 0.0
    total_s: float = 0.0
    worst_gap_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cached_tokens_memory: int = 0
    cached_tokens_disk: int = 0
    output_tokens: int = 0
    preemptions: int = 0

    @property
    def prompt_tokens_per_s(self) -> float:
        """Speed of reading the part of the prompt that was not cached; 0 if unknown."""
        return (self.prompt_tokens - self.cached_tokens) / self.prefill_s if self.prefill_s > 0 else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Speed of the answer after its first token; 0 if it has fewer than two."""
        return (
            (self.output_tokens - 1) / self.decode_s if self.decode_s > 0 and self.output_tokens > 1 else 0.0
        )

    def to_dict(self) -> dict[str, float | int]:
        """All fields and the two speeds, as plain numbers."""
        return asdict(self) | {
            "prompt_tokens_per_s": self.prompt_tokens_per_s,
            "tokens_per_s": self.tokens_per_s,
        }


class Timeline:
    """The instants of one request as they pass; None: not yet."""

    __slots__ = (
        "arrived", "detokenize_s", "finished", "first", "last", "preemptions", "prefilled", "sample_s",
        "started", "submitted", "tokenize_s", "worst_gap",
    )  # fmt: skip

    def __init__(self, arrived: float | None, tokenize_s: float) -> None:
        self.submitted = perf_counter()
        self.arrived = self.submitted if arrived is None else arrived
        self.tokenize_s = tokenize_s
        self.started: float | None = None
        self.prefilled: float | None = None
        self.first: float | None = None
        self.last: float | None = None
        self.finished: float | None = None
        self.sample_s = 0.0
        self.detokenize_s = 0.0
        self.worst_gap = 0.0
        self.preemptions = 0

    def timings(
        self, prompt_tokens: int, cached_tokens: int, output_tokens: int, cached_disk: int = 0
    ) -> Timings:
        """Derive the durations; a stage that was never reached counts up to the end.

        cached_tokens: of both tiers; cached_disk: those of them that came from disk.
        """
        end = perf_counter() if self.finished is None else self.finished
        started = end if self.started is None else self.started
        prefilled = end if self.prefilled is None else self.prefilled
        return Timings(
            tokenize_s=self.tokenize_s,
            queue_s=started - self.submitted,
            prefill_s=prefilled - started,
            first_token_s=0.0 if self.first is None else self.first - self.arrived,
            decode_s=0.0 if self.first is None or self.last is None else self.last - self.first,
            sample_s=self.sample_s,
            detokenize_s=self.detokenize_s,
            total_s=end - self.arrived,
            worst_gap_s=self.worst_gap,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            cached_tokens_memory=cached_tokens - cached_disk,
            cached_tokens_disk=cached_disk,
            output_tokens=output_tokens,
            preemptions=self.preemptions,
        )
