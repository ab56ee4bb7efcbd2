"""From the logits of one row to one token.

The order of operations is llama.cpp's: logit bias and penalties change the logits; then top-k, typical, top-p
and min-p cut the candidates, each looking at what the one before left, renormalised; temperature shapes what
remains; one uniform number picks. Without a cut, temperature shapes the whole vocabulary.

The common settings look at the best 64 candidates and ask the logits for their sum of exponentials; only when
those 64 do not decide (a flat distribution) does the work grow with the vocabulary. The distribution is the
same either way.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chabok.engine.request import SamplingParams
from chabok.errors import CheckpointError
from chabok.models.batch import Logits, best_first

NO_NUMBERS = (
    "the model's scores are not numbers (NaN or infinite): its file is damaged, "
    "or its weights are beyond what 32-bit floats hold"
)

HEAD = 64
"""Candidates looked at first."""

DEEPEST = 4096.0
"""So far below the best, no token has a share that 64 bits can tell from nothing."""

COLDEST = 1e-30
"""Temperatures below are taken for this one: its inverse is still a number in 32 bits."""

_MASK = 2**64 - 1
_TINY = float(np.finfo(np.float64).tiny)


def _mix(state: int) -> int:
    """The finaliser of SplitMix64: 64 well-mixed bits of a counter."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


class Uniforms:
    """SplitMix64 as a counter-based generator: number i depends on the seed and i alone.

    So a request's text depends on its seed, never on what else ran in the batch, nor on whether it was
    pre-empted.
    """

    def __init__(self, seed: int) -> None:
        # Mixed first: seeds 1, 2, 3 must not give streams that are shifts of each other.
        self._origin = _mix((seed + 0x9E3779B97F4A7C15) & _MASK)

    def at(self, index: int) -> float:
        """Number ``index`` in [0, 1)."""
        return (_mix((self._origin + (index + 1) * 0x9E3779B97F4A7C15) & _MASK) >> 11) * 2.0**-53


class Choice(NamedTuple):
    """A chosen token, and what was asked about it."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Chooses the tokens of one sequence.

    prompt: its token ids, which the repetition penalty counts. end_ids: tokens that may not come before
    min_tokens. shunned: tokens that are not to come under a mask which leaves others.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        vocab_size: int,
        end_ids: Iterable[int] = (),
        shunned: Iterable[int] = (),
    ) -> None:
        self.params = params
        self._uniforms = Uniforms(
            int.from_bytes(os.urandom(8), "little") if params.seed is None else params.seed
        )
        self._chosen = 0
        self._shunned = [token for token in shunned if token < vocab_size]
        self._edits = _Edits(params, prompt, vocab_size, end_ids) if _has_edits(params) else None
        self.greedy = params.temperature == 0 and self._edits is None and params.logprobs is None
        """Whether a row's best token is all there is to it."""
        self.scale = 1.0
        """What a segment should prepare for: see ``Segment.scale``."""
        if params.logprobs is None and not cuts(params):
            self.scale = 0.0 if params.temperature == 0 else inverse(params.temperature)

    def choose(self, logits: Logits, row: int, mask: NDArray[np.uint32] | None = None) -> Choice:
        """The next token from a row of logits; its values may be edited in place.

        mask: a bit for each token that may be chosen, uint32[ceil(vocab / 32)]. Where all of those are ruled
        out by other parameters (a bias of -inf, min_tokens), it is one of those nevertheless.
        Raises CheckpointError if the logits are not numbers.
        """
        best = logits.argmax(row)
        if not math.isfinite(logits.values[row, best]):
            raise CheckpointError(NO_NUMBERS)
        if self.greedy and (mask is None or (_allows(mask, best) and best not in self._shunned)):
            return Choice(best)
        try:
            with np.errstate(over="ignore", invalid="ignore"):  # what comes of it is looked at below
                choice = self._choose(logits, row, mask)
        except (ValueError, IndexError):
            # Nothing compares with NaN: single ones among the logits leave too few candidates.
            if np.isnan(logits.values[row]).any():
                raise CheckpointError(NO_NUMBERS) from None
            raise
        if math.isnan(choice.logprob or 0.0):
            raise CheckpointError(NO_NUMBERS)
        return choice

    def skip(self, token: int) -> None:
        """Count a token of the answer, chosen here or dictated by what constrains it."""
        self._chosen += 1
        if self._edits is not None:
            self._edits.note(token)

    def _choose(self, logits: Logits, row: int, mask: NDArray[np.uint32] | None) -> Choice:
        params = self.params
        raw: NDArray[np.float32] | None = None
        top: tuple[tuple[int, float], ...] = ()
        total = 0.0
        if params.logprobs is not None:
            total = logits.log_sum_exp(row)
            ids, best = logits.top(row, params.logprobs) if params.logprobs else ((), ())
            top = tuple((int(i), float(v) - total) for i, v in zip(ids, best, strict=True))
        if params.logprobs is not None or (mask is not None and self._edits is not None):
            raw = logits.values[row]
            if self._edits is not None or mask is not None:
                raw = raw.copy()  # it is about to change
        if self._edits is not None:
            self._edits.apply(logits.values[row], self._chosen)
            logits.changed(row)
        if mask is not None:
            token = self._choose_allowed(logits, row, mask, raw)
        else:
            token = self._pick(logits, row)
        self.skip(token)
        if raw is None or params.logprobs is None:
            return Choice(token)
        return Choice(token, float(raw[token]) - total, top)

    def _choose_allowed(
        self, logits: Logits, row: int, mask: NDArray[np.uint32], raw: NDArray[np.float32] | None
    ) -> int:
        """Choose among the tokens of a mask. raw: the values before they were edited, if they were."""
        values = logits.values[row]
        bits = np.unpackbits(mask.view(np.uint8), count=len(values), bitorder="little")
        if self._shunned:
            kept = bits[self._shunned]
            bits[self._shunned] = 0
            if not bits.any():
                bits[self._shunned] = kept
        if 2 * np.count_nonzero(bits) > len(bits):
            logits.exclude(row, np.flatnonzero(bits == 0))
            if logits.values[row, logits.argmax(row)] > -np.inf:
                return self._pick(logits, row)
        ids = np.flatnonzero(bits)
        left = values[ids]
        if left.max() == -np.inf and raw is not None:
            left = raw[ids]  # what the mask allows is ruled out by a bias or min_tokens: the mask is stronger
        return int(ids[self._pick(Logits(left[None]), 0)])

    def _pick(self, logits: Logits, row: int) -> int:
        if self.params.temperature == 0:
            return logits.argmax(row)
        return pick(logits, row, self.params, self._uniforms.at(self._chosen))


def _allows(mask: NDArray[np.uint32], token: int) -> bool:
    return bool(int(mask[token >> 5]) >> (token & 31) & 1)


def cuts(params: SamplingParams) -> bool:
    """Whether candidates are cut before one is drawn."""
    return params.top_k > 0 or params.typical_p < 1 or params.top_p < 1 or params.min_p > 0


def inverse(temperature: float) -> float:
    """1 / temperature, as a number of 32 bits."""
    return float(np.float32(1 / max(temperature, COLDEST)))


def pick(logits: Logits, row: int, params: SamplingParams, uniform: float) -> int:
    """The token that ``uniform`` in [0, 1) falls on, temperature above 0."""
    temperature = max(params.temperature, COLDEST)
    if cuts(params):
        ids, values = candidates(logits, row, params)
        weights = np.exp((values.astype(np.float64) - float(values.max())) / temperature)
        return int(ids[_find(weights, uniform)])
    return logits.draw(row, uniform, inverse(temperature))


def _find(weights: NDArray[np.float64], uniform: float) -> int:
    """Index that a uniform number falls on, among weights that need not sum to 1."""
    sums = weights.cumsum()
    return min(int(sums.searchsorted(uniform * sums[-1], side="right")), len(sums) - 1)


def _number(total: float) -> float:
    """The sum over a row, which a single NaN in it spoils."""
    if math.isnan(total):
        raise ValueError("a logit is not a number")
    return total


def candidates(
    logits: Logits, row: int, params: SamplingParams
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """What the cuts leave of a row: token ids and their logits, best first."""
    vocab = logits.values.shape[1]
    if params.top_k > 0:
        ids, values = logits.top(row, params.top_k)
        return _cut(ids, values, _normalised(values), params)
    if params.typical_p < 1:
        # Typicality needs the entropy of the whole row.
        ids, values = _sorted_row(logits.values[row])
        return _cut(ids, values, _normalised(values), params)
    total = _number(logits.log_sum_exp(row))
    ids, values = logits.top(row, HEAD)
    left = _cut(ids, values, np.exp(values.astype(np.float64) - total), params)
    if len(left[0]) < len(ids) or len(ids) == vocab:
        return left
    # Too flat for the head: take all down to a floor, and further down until they hold what top_p asks for.
    floor, step = float(values[-1]), 1.0
    if params.min_p > 0:
        floor = float(values[0]) + math.log(params.min_p) - 1e-3  # a hair more for the cut to decide on
    while True:
        reached = logits.reaching(row, floor)
        values = logits.values[row, reached]
        mass = float(np.exp(values - np.float32(total)).sum(dtype=np.float64))
        # A hair more than top_p, for the cut to decide on.
        if params.min_p > 0 or len(reached) == vocab or mass > params.top_p + 1e-4 or step > DEEPEST:
            ids, values = best_first(reached, values)
            return _cut(ids, values, np.exp(values.astype(np.float64) - total), params)
        floor, step = floor - step, 2 * step


def _sorted_row(values: NDArray[np.float32]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    return best_first(np.arange(len(values)), values)


def _normalised(values: NDArray[np.float32]) -> NDArray[np.float64]:
    shares = np.exp(values.astype(np.float64) - float(values[0]))
    shares /= shares.sum()
    return shares


def _cut(
    ids: NDArray[np.int32], values: NDArray[np.float32], shares: NDArray[np.float64], params: SamplingParams
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Apply typical_p, top_p and min_p to candidates sorted best first, of known probabilities."""
    if params.typical_p < 1:
        surprise = -np.log(np.maximum(shares, _TINY))
        distance = np.abs(surprise - float((shares * surprise).sum()))
        order = np.argsort(distance, kind="stable")
        kept = np.sort(order[: _count(shares[order], params.typical_p)])
        ids, values, shares = ids[kept], values[kept], shares[kept] / shares[kept].sum()
    n = len(ids)
    if params.top_p < 1:
        n = _count(shares, params.top_p)
    if params.min_p > 0:
        n = min(n, int((shares >= shares[0] * params.min_p).sum()))
    return ids[:n], values[:n]


def _count(shares: NDArray[np.float64], mass: float) -> int:
    """The fewest leading entries whose sum reaches a mass, at least 1."""
    return min(int(shares.cumsum().searchsorted(mass, side="left")) + 1, len(shares))


def _has_edits(params: SamplingParams) -> bool:
    return bool(
        params.repetition_penalty != 1
        or params.frequency_penalty
        or params.presence_penalty
        or params.logit_bias
        or params.min_tokens
    )


class _Edits:
    """Changes to the logits of one sequence: bias, penalties, and the ban of end tokens before min_tokens.

    The repetition penalty (of CTRL, Keskar et al. 2019) divides positive and multiplies negative logits of
    every token of the prompt and the answer; frequency and presence penalties (OpenAI's) count the answer
    alone.
    """

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int], vocab_size: int, end_ids: Iterable[int]
    ) -> None:
        self._params = params
        self._seen = _Counts(prompt if params.repetition_penalty != 1 else ())
        self._said = _Counts(())
        bias = {token: value for token, value in params.logit_bias.items() if token < vocab_size}
        self._bias_ids = np.array(list(bias), np.int32)
        with np.errstate(over="ignore"):  # what 32 bits cannot hold is as good as infinite
            self._bias = np.array(list(bias.values()), np.float32)
        self._end_ids = np.array([token for token in end_ids if token < vocab_size], np.int32)

    def note(self, token: int) -> None:
        """Count a token of the answer."""
        if self._params.repetition_penalty != 1:
            self._seen.add(token)
        if self._params.frequency_penalty or self._params.presence_penalty:
            self._said.add(token)

    def apply(self, values: NDArray[np.float32], n_chosen: int) -> None:
        """Edit a row in place, float32[vocab]."""
        params = self._params
        if len(self._bias):
            values[self._bias_ids] += self._bias
        if params.repetition_penalty != 1:
            ids = self._seen.ids
            found = values[ids]
            factor = np.float32(params.repetition_penalty)
            values[ids] = np.where(found > 0, found / factor, found * factor)
        if params.frequency_penalty or params.presence_penalty:
            values[self._said.ids] -= self._said.counts * np.float32(params.frequency_penalty) + np.float32(
                params.presence_penalty
            )
        if n_chosen < params.min_tokens:
            values[self._end_ids] = -np.inf


class _Counts:
    """How often each token occurred, as arrays that grow in place."""

    def __init__(self, tokens: Sequence[int]) -> None:
        ids, counts = np.unique(np.asarray(tokens, np.int32), return_counts=True)
        self._n = len(ids)
        self._ids, self._counts = ids, counts.astype(np.float32)
        self._at = {int(token): i for i, token in enumerate(ids)}

    @property
    def ids(self) -> NDArray[np.int32]:
        return self._ids[: self._n]

    @property
    def counts(self) -> NDArray[np.float32]:
        return self._counts[: self._n]

    def add(self, token: int) -> None:
        at = self._at.get(token)
        if at is not None:
            self._counts[at] += 1
            return
        if self._n == len(self._ids):
            self._ids = np.append(self._ids, np.zeros(self._n + 64, np.int32))
            self._counts = np.append(self._counts, np.zeros(self._n + 64, np.float32))
        self._ids[self._n], self._counts[self._n] = token, 1
        self._at[token] = self._n
        self._n += 1
