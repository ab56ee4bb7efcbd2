"""A saved run is read as it was written, up to where it was cut, and not at all where it was damaged."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.measure.test_timeline import TIMELINES

from chabok.measure import Concurrent, MeasureError, Outcome, Rate, Timeline, Window, read_timelines
from chabok.measure.cost import Price
from chabok.measure.run import MOST_TOKENS, About, Loaded, Run, RunFile, checked, find
from chabok.measure.timeline import Event, Usage


def small(path: Path) -> Path:
    about = About("http://h", "m", limits=["ttft=500ms:p95"], price=Price.machine(0.1), seed=3)
    with RunFile(path, about) as file:
        file.known(round_trip_s=0.001)
        file(Timeline(0, 0.0, "one user", done=1.0))
        file.load(Outcome("one user", Concurrent(1, 1), 0.0, 1.0, Window(0.0, 1.0), cpu_share=0.25))
        file(Timeline(1, 1.0, "2 requests/s, constant", done=2.0))
        file.load(Outcome("rate", Rate(2.0, 1, pattern="constant"), 1.0, 2.0, stopped="Ctrl-C"))
        file.known(complete=True, notes=["n"])
    return path


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = Run(small(tmp_path / "a.jsonl"))
    assert run.about.complete is False
    assert list(run) == [
        Timeline(0, 0.0, "one user", done=1.0),
        Loaded("one user", "one user", 1, None, 0.0, 1.0, Window(0.0, 1.0), 0.25),
        Timeline(1, 1.0, "2 requests/s, constant", done=2.0),
        Loaded("rate", "2 requests/s, constant", 0, 2.0, 1.0, 2.0, stopped="Ctrl-C"),
    ]
    assert run.about == About(
        "http://h",
        "m",
        limits=["ttft=500ms:p95"],
        price=Price.machine(0.1),
        seed=3,
        round_trip_s=0.001,
        complete=True,
        notes=["n"],
    )
    assert not run.cut


def test_whoever_wants_only_the_timelines_gets_them(tmp_path: Path) -> None:
    assert [each.number for each in read_timelines(small(tmp_path / "a.jsonl"))] == [0, 1]


def test_what_about_does_not_know_is_not_written(tmp_path: Path) -> None:
    with RunFile(tmp_path / "a.jsonl") as file, pytest.raises(TypeError, match="colour"):
        file.known(colour=1)


def test_finished_loads_are_on_disk_while_the_run_goes_on(tmp_path: Path) -> None:
    file = RunFile(tmp_path / "a.jsonl", About(model="m"))
    file(Timeline(0, 0.0, "one user", done=1.0))
    file.load(Outcome("one user", Concurrent(1, 1), 0.0))
    assert len(list(Run(tmp_path / "a.jsonl"))) == 2
    file.close()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_run_cut_anywhere_gives_its_whole_lines(tmp_path_factory: pytest.TempPathFactory, data) -> None:  # type: ignore[no-untyped-def]
    path = small(tmp_path_factory.mktemp("cut") / "a.jsonl")
    content = path.read_bytes()
    whole = list(Run(path))
    first = content.index(b"\n") + 1
    end = data.draw(st.integers(first, len(content)))
    path.write_bytes(content[:end])
    run = Run(path)
    found = list(run)
    assert found == whole[: len(found)]
    assert run.cut == (end > 0 and content[end - 1 : end] != b"\n")


@settings(max_examples=40, deadline=None)
@given(st.lists(TIMELINES, max_size=4))
def test_any_timeline_is_read_or_named_as_damaged(
    tmp_path_factory: pytest.TempPathFactory, made: list[Timeline]
) -> None:
    path = tmp_path_factory.mktemp("any") / "a.jsonl"
    with RunFile(path) as file:
        for timeline in made:
            file(timeline)
    if any(_refused(timeline) for timeline in made):
        with pytest.raises(MeasureError, match="line "):
            list(Run(path))
    else:
        assert list(Run(path)) == made


def _refused(timeline: Timeline) -> bool:
    try:
        return checked(timeline) is not timeline
    except MeasureError:
        return True


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"nonsense", "line 2"),
        (b'{"load": {"phase": 3}}', r"line 2: .*phase"),
        (b'{"load": [}', "line 2"),
        (b'{"load"}', "line 2"),
        (b'{"known": {"notes": "x"}}', r"line 2: .*notes"),
        (b'{"known": 3}', "line 2"),
        (b'{"number": 0, "scheduled": "soon"}', "line 2.*scheduled"),
        (b"\xff\xfe", "line 2"),
        (b"[" * 100_000, "line 2"),
        (b'{"number":0,"scheduled":0,"events":[[2,"content"],[1,"content"]]}', "line 2.*1.0 s follows"),
        (b'{"number":0,"scheduled":0,"usage":{"output_tokens":100000000000}}', "line 2.*tokens"),
        (b'{"number":0,"scheduled":1e999}', "line 2"),
        (b'{"number":0,"scheduled":1e300}', "line 2: 1e.300 is no time"),
        (b'{"number":0,"scheduled":0,"server":{"prefill_ms":-1e300}}', "line 2: -1e.300 is no time"),
        (b'{"load":{"phase":"x","load":"x","users":-1}}', "line 2: -1 users"),
        (b'{"load":{"phase":"x","load":"x","window":{"start":0,"end":1e300}}}', "line 2: 1e.300"),
    ],
)
def test_damage_is_named_by_file_and_line(tmp_path: Path, line: bytes, said: str) -> None:
    path = tmp_path / "bad.jsonl"
    with RunFile(path):
        pass
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(MeasureError, match=f"(?s)bad.jsonl, {said}") as caught:
        list(Run(path))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_times_and_counts_no_clock_and_no_endpoint_gives_are_refused() -> None:
    checked(Timeline(0, 0.0, events=[Event(1.0, "content"), Event(1.0, "content")]))
    for wrong in (
        Timeline(0, float("nan")),
        Timeline(0, 0.0, done=float("inf")),
        Timeline(0, 0.0, usage=Usage(prompt_tokens=-1)),
        Timeline(0, 0.0, events=[Event(1.0, "content", "", MOST_TOKENS + 1)]),
    ):
        with pytest.raises(MeasureError):
            checked(wrong)


def test_a_run_is_found_by_its_report_or_its_folder(tmp_path: Path) -> None:
    old, new = small(tmp_path / "old.jsonl"), small(tmp_path / "new.jsonl")
    os.utime(old, (1, 1))
    (tmp_path / "old.json").write_text("{}")
    assert find(old) == find(tmp_path / "old.json") == old
    assert find(tmp_path) == new
    (tmp_path / "empty").mkdir()
    with pytest.raises(MeasureError, match="no run in this folder"):
        find(tmp_path / "empty")
    with pytest.raises(MeasureError, match="no such file"):
        find(tmp_path / "gone")
