"""Regular expressions of a stranger against answers of a stranger, in bounded time.

Python's ``re`` can take longer than the universe is old for a small pattern, and cannot be interrupted; it
runs in a process of its own that is ended when its time is up.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import unicodedata

LONGEST_PATTERN = 2000
LIMIT_S = 2.0
"""For one answer; usual patterns take microseconds."""
LONGEST_ANSWER = 100_000

_CHILD = """
import json, re, sys
pattern, text = json.load(sys.stdin)
print(int(re.search(pattern, text) is not None))
"""


class TooSlowError(Exception):
    """A pattern took longer on an answer than it may."""


def check(pattern: str) -> None:
    """ValueError: it is no regular expression, or too long."""
    if len(pattern) > LONGEST_PATTERN:
        raise ValueError(f"a pattern of {len(pattern)} characters; {LONGEST_PATTERN} are the most")
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{pattern!r:.60} is no regular expression: {error}") from None


def found(pattern: str, answer: str, limit_s: float = LIMIT_S) -> bool:
    """Whether a pattern matches anywhere in an answer (NFKC). TooSlowError: it did not say in time."""
    text = unicodedata.normalize("NFKC", answer[:LONGEST_ANSWER])
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _CHILD],
            input=json.dumps([pattern, text]),
            capture_output=True,
            text=True,
            timeout=limit_s + 1.0,  # a second in which to start
        )
    except subprocess.TimeoutExpired:
        raise TooSlowError(f"the pattern took more than {limit_s:g} s on this answer") from None
    if done.returncode:
        raise TooSlowError(
            "the pattern could not be tried: " + (done.stderr.strip().splitlines() or ["?"])[-1]
        )
    return done.stdout.strip() == "1"
