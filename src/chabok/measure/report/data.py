"""What a run found, as plain data: written as JSON, read again, and compared."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import msgspec

from chabok.measure.breakdown import Breakdown
from chabok.measure.cost import Cost, prefill_share_of
from chabok.measure.failures import MeasureError
from chabok.measure.metrics import Request, Summary, measure, summarize_requests
from chabok.measure.outcome import Outcome, Window
from chabok.measure.schedule import Rate
from chabok.measure.slo import Limit, goodput
from chabok.measure.timeline import Timeline

SCHEMA = "chabok.report/1"


@dataclass(slots=True)
class Level:
    """One load and its metrics. users: requests at once; 0 in an open loop. kept: share of requests per
    limit. met: whether all limits are. client_bound: a sentence if the client was the bottleneck. per_s: the
    rate of an open loop. prefill_share: of the requests' time in prefill and decode, if the server tells."""

    load: str
    phase: str
    users: int
    summary: Summary
    window: Window | None = None
    goodput: float | None = None
    kept: dict[str, float] = field(default_factory=dict)
    met: bool = False
    cpu_share: float = 0.0
    lateness_p99_s: float = 0.0
    client_bound: str = ""
    stopped: str = ""
    per_s: float | None = None
    prefill_share: float | None = None


@dataclass(slots=True)
class Report:
    """A whole run against one target.

    capacity: most users at once for whom the limits were met; 0: not even for one, None: not looked for.
    rate_capacity: highest rate, requests per second, at which the limits were met; as capacity else.
    complete: False if it was stopped before its end; then it holds what was measured until then.
    """

    url: str
    model: str
    dialect: str = ""
    server: str = ""
    started_at: str = ""
    command: str = ""
    seed: int = 0
    prompt_tokens: str = ""
    output_tokens: str = ""
    lengths: str = ""
    limits: list[str] = field(default_factory=list)
    round_trip_s: float | None = None
    connect_s: float | None = None
    levels: list[Level] = field(default_factory=list)
    capacity: int | None = None
    breakdown: Breakdown = field(default_factory=Breakdown)
    cost: Cost | None = None
    notes: list[str] = field(default_factory=list)
    timelines: str = ""
    complete: bool = False
    rate_capacity: float | None = None
    schema: str = SCHEMA

    @property
    def one_user(self) -> Level | None:
        """The level of one user."""
        return next((level for level in self.levels if level.users == 1), None)

    @property
    def at_capacity(self) -> Level | None:
        """The level of as many users as the limits allow."""
        if not self.capacity:
            return None
        return next((level for level in self.levels if level.users == self.capacity), None)

    @property
    def fastest(self) -> Level | None:
        """The level of the highest throughput."""
        known = [level for level in self.levels if level.summary.throughput]
        return max(known, key=lambda level: level.summary.throughput or 0, default=None)


def level_of(
    outcome: Outcome, timelines: list[Timeline], limits: list[Limit], users: int, *, seed: int = 0
) -> tuple[Level, list[Request]]:
    """A level from the outcome of its load, and the requests' own metrics."""
    return level_of_requests(outcome, [measure(each) for each in timelines], limits, users, seed=seed)


def level_of_requests(
    outcome: Outcome, requests: list[Request], limits: list[Limit], users: int, *, seed: int = 0
) -> tuple[Level, list[Request]]:
    """As ``level_of``, of requests whose metrics are known; gives those that count."""
    # What was cut off by the end of the run is neither a success nor the server's failure.
    requests = [
        each
        for each in requests
        if each.timeline.failure is None or each.timeline.failure.kind != "cancelled"
    ]
    found = Level(
        str(outcome.load),
        outcome.phase,
        users,
        summarize_requests(requests, outcome.window, seed=seed),
        outcome.window,
        goodput(requests, limits, outcome.window),
        {str(limit): limit.share(requests) for limit in limits},
        bool(requests) and all(limit.met(requests) for limit in limits),
        outcome.cpu_share,
        outcome.lateness_p99_s,
        outcome.client_bound,
        outcome.stopped,
        outcome.load.per_s if isinstance(outcome.load, Rate) else None,
        prefill_share_of(requests),
    )
    return found, requests


def to_json(report: Report) -> str:
    """A report as indented JSON; docs/report.schema.json describes it."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n"


def write_report(path: str | os.PathLike[str], report: Report) -> None:
    """Write a report as JSON."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(to_json(report))


def json_schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of a report, made from its classes."""
    schema = msgspec.json.schema(Report)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "What chabok bench and chabok report --json write",
        **schema,
    }


def read_report(path: str | os.PathLike[str]) -> Report:
    """Read a report; MeasureError if it is none, or of another schema."""
    with open(path, "rb") as file:
        content = file.read()
    try:
        schema = msgspec.json.decode(content).get("schema")
        if schema != SCHEMA:
            raise MeasureError(f"{os.fspath(path)} is of schema {schema}; this version reads {SCHEMA}")
        return msgspec.json.decode(content, type=Report, strict=False)
    except (msgspec.MsgspecError, AttributeError, UnicodeDecodeError) as error:
        raise MeasureError(
            f"{os.fspath(path)} is no report ({error}); `chabok bench` writes them as JSON"
        ) from None
