"""Traces: requests when they are due, turns after their pauses, with what was said before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.measure.formats import FORMATS, Answer, Said, openai_chat
from tests.measure.scripted import ScriptedServer

from chabok.measure import Endpoint, MeasureError, Synthetic, Trace, run_load

ANSWER = openai_chat(Answer([Said(5, "fine"), Said(2, " so")], {"prompt": 5, "output": 2}))


def write(path: Path, *turns: dict[str, object]) -> Path:
    path.write_text("\n".join(json.dumps(turn) for turn in turns))
    return path


def test_a_trace_is_replayed_with_its_sessions(server: ScriptedServer, tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.jsonl",
        {"at": 0.2, "prompt_tokens": 9, "output_tokens": 2},
        {"at": 0.0, "prompt": "first", "session": "a"},
        {"pause": 0.1, "prompt": "second", "session": "a"},
        {"pause": 0.25, "prompt": "third", "session": "a"},
    )
    trace = Trace.read(path)
    assert trace.requests == 4
    url = server.script(ANSWER)
    outcome = run_load(Endpoint.at(url, model="m"), trace, prompts=Synthetic(9, 2), warm_up=0)
    assert outcome.failed == 0
    played = {each.body["messages"][-1]["content"]: each.body["messages"] for each in server.played(url)}
    assert [message["content"] for message in played["third"]] == [
        "first", "fine so", "second", "fine so", "third"
    ]  # fmt: skip
    turns = sorted((t for t in outcome.timelines if t.session == "a"), key=lambda t: t.number)
    assert len(turns) == 3
    for before, after, pause in zip(turns, turns[1:], (0.1, 0.25)):
        assert before.done is not None
        assert after.scheduled - before.done == pytest.approx(pause, abs=0.05)
    alone = next(t for t in outcome.timelines if not t.session)
    assert alone.scheduled - turns[0].scheduled == pytest.approx(0.2, abs=1e-6)


def test_a_trace_may_be_replayed_faster(server: ScriptedServer, tmp_path: Path) -> None:
    path = write(tmp_path / "t", {"at": 0, "prompt": "a"}, {"at": 1, "prompt": "b"})
    url = server.script(ANSWER)
    outcome = run_load(Endpoint.at(url, model="m"), Trace.read(path, 10), prompts=Synthetic(9, 2), warm_up=0)
    first, second = sorted(t.scheduled for t in outcome.timelines)
    assert second - first == pytest.approx(0.1, abs=1e-6)


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        ({"prompt": "a"}, "line 1: a first turn needs `at`"),
        ({"at": 0}, "line 1: a turn has either of"),
        ({"at": 0, "prompt": "a", "prompt_tokens": 3}, "line 1: a turn has either of"),
        ({"at": -1, "prompt": "a"}, "line 1"),
        ({"at": 0, "promt": "a"}, "line 1.*promt"),
        ({"at": 0, "prompt_tokens": 0}, "line 1"),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path: Path, turn: dict[str, object], said: str) -> None:
    with pytest.raises(MeasureError, match=said):
        Trace.read(write(tmp_path / "t", turn))


def test_a_trace_that_is_empty_or_not_there_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("")
    with pytest.raises(MeasureError, match="no request"):
        Trace.read(tmp_path / "t")
    with pytest.raises(MeasureError, match="cannot be read"):
        Trace.read(tmp_path / "none")


@pytest.mark.parametrize("dialect", ["openai-completions", "ollama-generate"])
def test_earlier_turns_are_a_transcript_where_a_dialect_knows_no_turns(
    server: ScriptedServer, tmp_path: Path, dialect: str
) -> None:
    path = write(
        tmp_path / "trace.jsonl",
        {"at": 0.0, "prompt": "first", "session": "a"},
        {"pause": 0.0, "prompt": "second", "session": "a"},
    )
    answer = FORMATS[dialect](Answer([Said(1, "fine"), Said(1, " so")], {"prompt": 5, "output": 2}))
    url = server.script(answer)
    endpoint = Endpoint.at(url, model="m", dialect=dialect)
    outcome = run_load(endpoint, Trace.read(path), prompts=Synthetic(9, 2), warm_up=0)
    assert outcome.failed == 0
    first, second = [each.body["prompt"] for each in server.played(url)]
    assert first == "first"
    assert second == "User: first\n\nAssistant: fine so\n\nUser: second\n\nAssistant:"
