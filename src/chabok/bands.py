"""What speeds feel like to a person: one table, for everything that puts a number into words."""

from __future__ import annotations

SPEED = (
    (0, "slow"),
    (50, "fair"),
    (90, "keeps pace with a person"),
    (110, "very fast"),
    (200, "faster than one can follow"),
)
"""Tokens per second from which on a word holds, as one reader feels it."""

FIRST_TOKEN = ((0.0, "immediate"), (0.2, "conversational"), (0.5, "a noticeable wait"), (2.0, "a long wait"))
"""Seconds until the first token from which on a word holds."""


def speed(tokens_per_s: float) -> str:
    """The word for a speed."""
    return next(word for least, word in reversed(SPEED) if tokens_per_s >= least)


def first_token(seconds: float) -> str:
    """The word for a time to first token."""
    return next(word for least, word in reversed(FIRST_TOKEN) if max(seconds, 0) >= least)
