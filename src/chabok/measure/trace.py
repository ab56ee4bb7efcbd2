"""A trace to replay: requests as they once came, sessions of several turns with their pauses among them.

A file of JSON lines; each is a turn::

    {"at": 0.0, "prompt_tokens": 800, "output_tokens": 120}
    {"at": 1.5, "prompt": "Which files are there?", "output_tokens": 40, "session": "a"}
    {"pause": 2.0, "prompt_tokens": 300, "output_tokens": 60, "session": "a"}

``at``: seconds after the beginning at which it is due. A later turn of a session is due ``pause`` seconds
after the answer before it (a person reads, a tool runs), and is asked with all that was said before.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Annotated

import msgspec

from chabok.measure.failures import MeasureError

_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e7)]
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]


class Turn(msgspec.Struct, forbid_unknown_fields=True):
    """One request of a trace; either of ``prompt`` and ``prompt_tokens``."""

    at: _Seconds | None = None
    pause: _Seconds | None = None
    prompt: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    prompt_tokens: _Tokens | None = None
    output_tokens: _Tokens = 128
    session: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """Sessions in the order in which they begin; a request of its own is a session of one turn.

    speed: replayed so many times as fast; pauses, which are people's and tools', stay as they are.
    """

    sessions: tuple[tuple[Turn, ...], ...]
    name: str = "trace"
    speed: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.speed < math.inf:
            raise MeasureError(f"a trace cannot be replayed {self.speed:g} times as fast")

    @classmethod
    def read(cls, path: str | os.PathLike[str], speed: float = 1.0) -> Trace:
        """Read a file; MeasureError names the line that is wrong."""
        name = os.fspath(path)
        sessions: dict[str, list[Turn]] = {}
        try:
            with open(path, "rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        turn = _turn(f"{name}, line {number}", line)
                        key = turn.session or f"\0{number}"
                        if key not in sessions and turn.at is None:
                            raise MeasureError(f"{name}, line {number}: a first turn needs `at`")
                        sessions.setdefault(key, []).append(turn)
        except OSError as error:
            raise MeasureError(f"{name}: the trace cannot be read: {error.strerror or error}") from None
        if not sessions:
            raise MeasureError(f"{name}: there is no request in this trace")
        ordered = sorted(sessions.values(), key=lambda turns: turns[0].at or 0.0)
        return cls(tuple(tuple(turns) for turns in ordered), os.path.basename(name), speed)

    @property
    def requests(self) -> int:
        """How many turns there are in all."""
        return sum(len(turns) for turns in self.sessions)

    def __str__(self) -> str:
        faster = "" if self.speed == 1 else f", {self.speed:g} times as fast"
        return f"{self.name}{faster}"


def _turn(where: str, line: bytes) -> Turn:
    try:
        turn = msgspec.json.decode(line, type=Turn)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise MeasureError(f"{where}: {error}") from None
    if (turn.prompt is None) == (turn.prompt_tokens is None):
        raise MeasureError(f"{where}: a turn has either of `prompt` and `prompt_tokens`")
    return turn
