"""How fast an engine works of late, and how long its answers get."""

from __future__ import annotations

MEMORY_S = 30.0
"""Seconds of work after which a measurement counts a third."""

_USUAL_ANSWER = 128.0
_NEW_SHARE = 1 / 32


class Rate:
    """Measures the speed of the steps so far; seconds without work do not count."""

    __slots__ = ("_rows", "_seconds", "answer")

    def __init__(self) -> None:
        self._rows = 0.0
        self._seconds = 0.0
        self.answer = _USUAL_ANSWER
        """Tokens of an answer, on average; a guess until some have ended."""

    @property
    def row_s(self) -> float:
        """Seconds per token, of prompts and answers alike; 0 while nothing was measured."""
        return self._seconds / self._rows if self._rows else 0.0

    def step(self, rows: int, seconds: float) -> None:
        """Learn from a step."""
        kept = max(1 - seconds / MEMORY_S, 0.0)
        self._rows = self._rows * kept + rows
        self._seconds = self._seconds * kept + seconds

    def ended(self, n_output: int) -> None:
        """Learn from an answer's length."""
        self.answer += (n_output - self.answer) * _NEW_SHARE

    def expected(self, limit: int) -> float:
        """Tokens of an answer that may have ``limit`` at most."""
        return min(float(limit), self.answer)
