"""A run as it is saved: one file of JSON lines, from which everything that is shown can be computed again.

The first line says what is known before the run begins; then there is a line for each request as it ends, one
for each load when it is over, and lines of what was found out meanwhile::

    {"schema": "chabok.timelines/1", "url": ..., "model": ..., "limits": ["ttft=500ms:p95"], "seed": 1}
    {"number": 0, "scheduled": 0.0, "phase": "one user", "events": [...], ...}
    {"load": {"phase": "one user", "users": 1, "window": {"start": 0.0, "end": 12.0}, ...}}
    {"known": {"round_trip_s": 0.0004, "complete": true}}

A run that was killed is read up to its last whole line.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec

from chabok.measure.cost import Price
from chabok.measure.failures import MeasureError
from chabok.measure.outcome import Outcome, Window
from chabok.measure.schedule import Concurrent, Rate
from chabok.measure.timeline import OTHER_LINES, ServerTimings, Timeline, TimelineFile, decode, read_about

FOLDER = "chabok-bench"
"""Where runs are kept unless another folder is named."""
LONGEST_LINE = 1 << 27
"""Bytes; one answer of a million events is shorter."""
LONGEST_S = 1e9
"""No instant lies farther from the run's start, either way: thirty years."""
MOST_USERS = 10_000
"""At once, as of a load that can be asked for."""
MOST_TOKENS = 10_000_000
"""Of one request; more than that is damage, and would take the memory to be believed."""


@dataclass(slots=True)
class About:
    """What is known of a run beside its requests.

    limits: as they are typed (``ttft=500ms:p95``). lengths: how exactly prompts are as long as asked:
    ``usage`` or ``assumed``. price: what its cost is computed from. round_trip_s, connect_s: of the network.
    complete: False if it was stopped, or is not over. looked: whether more and more users were tried, to find
    how many the limits allow. rate_capacity: highest rate within the limits that was
    found, requests per second; None: not looked for.
    """

    url: str = ""
    model: str = ""
    dialect: str = ""
    server: str = ""
    started_at: str = ""
    command: str = ""
    seed: int = 0
    prompt_tokens: str = ""
    output_tokens: str = ""
    lengths: str = ""
    limits: list[str] = field(default_factory=list)
    price: Price | None = None
    round_trip_s: float | None = None
    connect_s: float | None = None
    notes: list[str] = field(default_factory=list)
    complete: bool = False
    looked: bool = False
    rate_capacity: float | None = None


@dataclass(slots=True)
class Loaded:
    """One load that is over, beside its requests, which bear the same ``phase``.

    load: in words. users: requests at once; 0 in an open loop. per_s: requests per second; None in a closed
    loop. window: when it was steady, seconds since the run's start; None: never. cpu_share: of one core, what
    the client used. stopped: why it ended early, if it did.
    """

    phase: str
    load: str
    users: int = 0
    per_s: float | None = None
    began: float = 0.0
    ended: float = 0.0
    window: Window | None = None
    cpu_share: float = 0.0
    stopped: str = ""

    @classmethod
    def of(cls, outcome: Outcome) -> Loaded:
        """From what a load did."""
        load = outcome.load
        return cls(
            outcome.phase,
            str(load),
            load.streams if isinstance(load, Concurrent) else 0,
            load.per_s if isinstance(load, Rate) else None,
            outcome.began,
            outcome.ended,
            outcome.window,
            outcome.cpu_share,
            outcome.stopped,
        )


class RunFile(TimelineFile):
    """Writes a run while it goes on: a sink for timelines that is told of loads and of what is found out."""

    def __init__(self, path: str | os.PathLike[str], about: About | None = None) -> None:
        super().__init__(path, asdict(about or About()))

    def load(self, outcome: Outcome) -> None:
        """A load is over; what was measured until now is on disk after this."""
        self._line({"load": Loaded.of(outcome)})

    def known(self, **found: Any) -> None:
        """Fields of ``About`` that are known now; they replace what was said before."""
        unknown = set(found) - {item.name for item in fields(About)}
        if unknown:
            raise TypeError(f"About has no field {min(unknown)!r}")
        self._line({"known": found})

    def _line(self, content: dict[str, Any]) -> None:
        self._file.write(msgspec.json.encode(content) + b"\n")
        self._file.flush()


class Run:
    """Reads a run: iterating gives its timelines and loads in the order of their lines.

    about: of the first line, and of the lines read so far. cut: whether the last line was cut short.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """MeasureError: it is no run, or of a newer schema."""
        self.path = find(path)
        self.cut = False
        self._told = read_about(self.path)
        self.about = self._about(1)

    def __iter__(self) -> Iterator[Timeline | Loaded]:
        with open(self.path, "rb") as file:
            file.readline()
            number = 1
            while line := file.readline(LONGEST_LINE):
                number += 1
                if not line.endswith(b"\n"):
                    if len(line) == LONGEST_LINE:
                        raise self._damaged(number, "the line is longer than any of a run")
                    self.cut = True
                    return
                if found := self._read(number, line):
                    yield found

    def _read(self, number: int, line: bytes) -> Timeline | Loaded | None:
        try:
            if not line.startswith(OTHER_LINES):
                return checked(decode(line))
            content = msgspec.json.decode(line)
            if "load" in content:
                return checked_load(msgspec.convert(content["load"], Loaded))
            self._told |= msgspec.convert(content["known"], dict[str, Any])
        except (MeasureError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self._damaged(number, str(error)) from None
        self.about = self._about(number)
        return None

    def _about(self, number: int) -> About:
        try:
            return msgspec.convert(self._told, About)
        except msgspec.MsgspecError as error:
            raise self._damaged(number, str(error)) from None

    def _damaged(self, number: int, why: str) -> MeasureError:
        return MeasureError(f"{self.path}, line {number}: {why}; the file is damaged, or was edited")


def find(path: str | os.PathLike[str]) -> Path:
    """The file of a run, named by itself, by its report beside it, or by a folder: the newest in there.

    MeasureError: there is none.
    """
    path = Path(path)
    if path.is_dir():
        runs = sorted(path.glob("*.jsonl"), key=lambda each: (each.stat().st_mtime, each.name))
        if not runs:
            raise MeasureError(f"{path}: there is no run in this folder; `chabok bench` writes them")
        return runs[-1]
    if not path.exists():
        raise MeasureError(f"{path}: there is no such file; `chabok bench` writes runs to {FOLDER}/")
    raw = path.with_suffix(".jsonl")
    if path.suffix in (".json", ".html", ".md", ".csv") and raw.exists():
        return raw
    return path


def checked(timeline: Timeline) -> Timeline:
    """The timeline itself; MeasureError if no clock and no endpoint can have produced it."""
    _within(timeline.scheduled, timeline.sent, timeline.headers, timeline.done, timeline.connect_s)
    if timeline.server is not None:
        _within(*(value for name, value in _fields(timeline.server) if name != "source"))
    before = -LONGEST_S
    for event in timeline.events:
        if not before <= event.at <= LONGEST_S:
            raise MeasureError(f"an event at {event.at} s follows one at {before} s")
        before = event.at
    usage = timeline.usage
    counts = [usage.prompt_tokens, usage.output_tokens, usage.reasoning_tokens, usage.cached_tokens]
    counts += [timeline.counted, *(event.tokens for event in timeline.events)]
    if not all(count is None or 0 <= count <= MOST_TOKENS for count in counts):
        raise MeasureError(f"a count of tokens is not from 0 to {MOST_TOKENS}")
    return timeline


def checked_load(load: Loaded) -> Loaded:
    """The load itself; MeasureError if there can be no such load."""
    _within(load.began, load.ended, load.cpu_share, load.per_s)
    if load.window is not None:
        _within(load.window.start, load.window.end)
    if not 0 <= load.users <= MOST_USERS:
        raise MeasureError(f"{load.users} users at once: from 0 to {MOST_USERS} are possible")
    return load


def _within(*values: float | None) -> None:
    for value in values:
        if value is not None and not abs(value) <= LONGEST_S:
            raise MeasureError(f"{value:g} is no time that was measured")


def _fields(of: ServerTimings) -> Iterator[tuple[str, Any]]:
    return ((item.name, getattr(of, item.name)) for item in fields(of))
