"""How likely the tokens of a prompt were, chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence

from chabok.models.batch import Logits


class PromptScores:
    """Log probabilities of a prompt's tokens as its rows are computed; never more than a chunk's logits are
    kept.

    n_best: how many of the most likely tokens to name at each position.
    """

    __slots__ = ("_n_best", "logprobs", "top")

    def __init__(self, n_best: int) -> None:
        self._n_best = n_best
        self.logprobs: list[float | None] = [None]
        """Of each prompt token so far; the first follows nothing."""
        self.top: list[tuple[tuple[int, float], ...]] = [()]
        """The most likely tokens in its place, (id, logprob), best first."""

    def take(self, logits: Logits, row: int, position: int, n: int, prompt: Sequence[int]) -> None:
        """Look at n rows of logits from ``row`` on, of consecutive positions; those seen before (the sequence
        lost its pages) are passed over."""
        for i in range(len(self.logprobs) - 1 - position, n):
            at = position + i + 1
            if at >= len(prompt):
                break
            total = logits.log_sum_exp(row + i)
            self.logprobs.append(float(logits.values[row + i, prompt[at]]) - total)
            ids, values = logits.top(row + i, self._n_best) if self._n_best else ((), ())
            self.top.append(tuple((int(t), float(v) - total) for t, v in zip(ids, values, strict=True)))
