"""Raw timelines survive a round trip, so that everything can be computed again."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chabok.measure import (
    Event,
    Failure,
    MeasureError,
    ServerTimings,
    Timeline,
    TimelineFile,
    Usage,
    read_about,
    read_timelines,
    write_timelines,
)
from chabok.measure.timeline import SCHEMA, decode, encode

INSTANTS = st.floats(0, 1e6)
COUNTS = st.none() | st.integers(0, 10**6)
EVENTS = st.builds(
    Event, INSTANTS, st.sampled_from(["role", "content", "usage"]), st.text(max_size=5), COUNTS
)
TIMELINES = st.builds(
    Timeline,
    st.integers(0, 10**9),
    INSTANTS,
    phase=st.text(max_size=5),
    sent=st.none() | INSTANTS,
    done=st.none() | INSTANTS,
    status=st.none() | st.integers(100, 599),
    failure=st.none() | st.builds(Failure, st.text(max_size=5), st.text(max_size=5), st.none() | INSTANTS),
    usage=st.builds(Usage, COUNTS, COUNTS, COUNTS, COUNTS),
    server=st.none() | st.builds(ServerTimings, st.text(max_size=5), st.none() | INSTANTS),
    events=st.lists(EVENTS, max_size=5),
)


@given(TIMELINES)
def test_a_timeline_survives_its_line_of_json(timeline: Timeline) -> None:
    line = encode(timeline)
    assert b"\n" not in line
    assert decode(line) == timeline


def test_a_file_is_read_one_by_one_and_tells_about_its_run(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    made = [Timeline(n, 0.5, events=[Event(1.0, "content", "ü")]) for n in range(3)]
    write_timelines(path, made, {"model": "m"})
    assert read_about(path) == {"schema": SCHEMA, "model": "m"}
    assert list(read_timelines(path)) == made


def test_a_last_line_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with TimelineFile(path) as file:
        file(Timeline(0, 0.0))
        file(Timeline(1, 0.0))
    path.write_bytes(path.read_bytes()[:-9])
    assert [timeline.number for timeline in read_timelines(path)] == [0]


def test_what_is_no_file_of_timelines_is_said_so(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    for content, message in (
        (b"", "not a file of timelines"),
        (b"\x00\xff", "not a file of timelines"),
        (b'{"schema": "chabok.timelines/99"}\n', "schema chabok.timelines/99"),
        (b'{"schema": "chabok.timelines/1"}\n{"number": "x"}\n', "line 2: not a timeline"),
    ):
        path.write_bytes(content)
        with pytest.raises(MeasureError, match=message):
            list(read_timelines(path))
