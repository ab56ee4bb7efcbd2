"""Which tokens constraints allow, for all constrained sequences of a step together."""

from __future__ import annotations

from collections.abc import Sequence as Items
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from chabok.engine.sequence import Sequence


class Masks:
    """One bit per token of the vocabulary, for each sequence that is about to choose under a constraint."""

    def __init__(self, vocab_size: int) -> None:
        self._rows = np.zeros((0, -(-vocab_size // 32)), np.uint32)

    def fill(self, sequences: Items[Sequence]) -> None:
        """Set ``mask`` of those sequences that have a constraint and a token to choose; valid until the next
        call. One that failed says so when its matcher is asked to ``check``."""
        kinds: dict[type, list[Sequence]] = {}
        for sequence in sequences:
            if sequence.matcher is not None and sequence.segment.outputs and not sequence.opening:
                kinds.setdefault(type(sequence.request.constraint), []).append(sequence)
        for members in kinds.values():
            started = perf_counter()
            rows = self._room(len(members)) if len(kinds) == 1 else np.zeros_like(self._room(len(members)))
            constraint = members[0].request.constraint
            assert constraint is not None
            constraint.fill_masks([member.matcher for member in members], rows)
            each = (perf_counter() - started) / len(members)
            for member, row in zip(members, rows, strict=True):
                member.mask = row
                member.timeline.sample_s += each

    def _room(self, n: int) -> NDArray[np.uint32]:
        if len(self._rows) < n:
            self._rows = np.zeros((n, self._rows.shape[1]), np.uint32)
        return self._rows[:n]
