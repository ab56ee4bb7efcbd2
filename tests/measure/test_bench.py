"""A whole run: what it concludes, what it writes, and what is left of it when it is stopped."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from tests.measure.formats import Answer, Said, openai_chat
from tests.measure.scripted import Script, ScriptedServer, Step

from chabok.measure import Concurrent, Endpoint, Lengths, MeasureError, Timeline
from chabok.measure.bench import Bench, Plan
from chabok.measure.cost import Price
from chabok.measure.report import read_report, write_report
from chabok.measure.run import Loaded, Run, RunFile
from chabok.measure.slo import Limit

ANSWER = openai_chat(Answer([Said(20, "one ")] + [Said(4, "x ")] * 15, {"prompt": 30, "output": 16}))


def bench(server: ScriptedServer, plan: Plan, *scripts: Script) -> Bench:
    return Bench(Endpoint.at(server.script(*(scripts or (ANSWER,))), model="m"), plan)


def test_a_run_finds_one_users_speed_and_how_many_the_limits_allow(
    server: ScriptedServer, tmp_path: Path
) -> None:
    plan = Plan(seconds=3.0, most_users=2, price=Price.machine(3.6), limits=(Limit.of("ttft=2s:p50"),))
    made = bench(server, plan)
    with RunFile(tmp_path / "run.jsonl", made.about) as log:
        made.log = log
        report = asyncio.run(made.run())
    assert report.complete
    assert [level.users for level in report.levels] == [1, 2]
    one = report.one_user
    assert one is not None
    assert one.summary.ttft is not None
    assert one.summary.speed is not None
    assert one.summary.ttft.median == pytest.approx(0.020, abs=0.015)
    assert one.summary.speed.median == pytest.approx(250, rel=0.2)
    assert report.capacity == 2
    assert report.cost is not None
    assert report.cost.per_million_output is not None
    assert report.breakdown.bottleneck
    assert any("about as long as asked" in text for text in report.notes)
    run = Run(tmp_path / "run.jsonl")
    kinds = [type(each) for each in run]
    assert kinds.count(Loaded) == 2
    assert run.about.complete
    assert run.about.limits == ["ttft=2s:p50"]
    phases = {each.phase for each in run if isinstance(each, Timeline)}
    assert {"warm-up", "one user", "2 users", "prompt lengths", "repeated prompt"} <= phases
    write_report(tmp_path / "run.json", report)
    assert read_report(tmp_path / "run.json") == report


def test_limits_that_one_user_misses_leave_a_capacity_of_none(server: ScriptedServer) -> None:
    plan = Plan(seconds=1.5, most_users=2, probes=False, limits=(Limit.of("ttft=1ms"),))
    report = asyncio.run(bench(server, plan).run())
    assert report.capacity == 0
    assert report.at_capacity is None


def test_the_highest_rate_that_meets_the_limits_is_searched_for(server: ScriptedServer) -> None:
    plan = Plan(seconds=2.0, probes=False, find_rate=True, limits=(Limit.of("e2e=5s"),))
    report = asyncio.run(bench(server, plan).run())
    rates = [float(level.load.split()[0]) for level in report.levels[1:]]
    assert report.rate_capacity is not None
    assert min(rates) * 0.99 <= report.rate_capacity <= max(rates) * 1.01
    assert len(rates) >= 2
    assert rates[1] == pytest.approx(2 * rates[0], rel=0.01)
    never = Plan(seconds=1.0, probes=False, find_rate=True, limits=(Limit.of("ttft=1ms"),))
    assert asyncio.run(bench(server, never).run()).rate_capacity == 0


def test_loads_that_are_given_are_the_only_ones(server: ScriptedServer) -> None:
    plan = Plan(seconds=1.0, loads=(Concurrent(2, requests=4), Concurrent(3, requests=3)))
    report = asyncio.run(bench(server, plan).run())
    assert [(level.users, level.summary.requests) for level in report.levels] == [(2, 4), (3, 3)]
    assert report.capacity is None


def test_a_run_that_is_stopped_keeps_what_was_measured(server: ScriptedServer) -> None:
    seen: list[str] = []

    def watch(timeline: Timeline) -> None:
        seen.append(timeline.phase)
        if seen.count("2 users") == 5:
            made.stop()

    plan = Plan(seconds=60, loads=(Concurrent(1, requests=2), Concurrent(2, requests=10_000)))
    made = Bench(Endpoint.at(server.script(ANSWER), model="m"), plan, watch=watch)
    report = asyncio.run(made.run())
    assert not report.complete
    assert report.levels[1].summary.requests in (5, 6)
    assert report.levels[0].summary.requests == 2
    assert report.levels[1].summary.failed == 0  # what was cut off is not the server's failure
    assert any("stopped by Ctrl-C" in text for text in report.notes)


def test_an_endpoint_that_refuses_ends_the_run_with_its_own_words(server: ScriptedServer) -> None:
    refusal = Script([Step(0, b'{"error": "no such model"}')], status=404, framing="length")
    with pytest.raises(MeasureError, match="no such model"):
        asyncio.run(bench(server, Plan(), refusal).run())


def test_an_endpoint_whose_answers_are_empty_ends_the_run_at_once(server: ScriptedServer) -> None:
    empty = openai_chat(Answer([], {"prompt": 30, "output": 0}, finish="stop"))
    with pytest.raises(MeasureError, match="complete and empty"):
        asyncio.run(bench(server, Plan(), empty).run())


def test_a_stream_without_end_is_given_up_before_any_load(server: ScriptedServer) -> None:
    endless = openai_chat(Answer([Said(0, "x ")] * 1500))
    with pytest.raises(MeasureError, match="the endpoint ignores the limit"):
        asyncio.run(bench(server, Plan(), endless).run())


def test_a_run_can_be_stopped_while_the_first_answer_is_waited_for(server: ScriptedServer) -> None:
    made = bench(server, Plan(), openai_chat(Answer([Said(30_000, "x ")])))

    async def go() -> None:
        asyncio.get_running_loop().call_later(0.3, made.stop)
        await made.run()

    with pytest.raises(MeasureError, match="stopped by Ctrl-C before anything was measured"):
        asyncio.run(go())


def test_a_mix_of_prompts_tells_first_tokens_of_short_and_long_ones_apart(server: ScriptedServer) -> None:
    plan = Plan(prompt_tokens=Lengths.of("8,200"), loads=(Concurrent(2, requests=20),))
    report = asyncio.run(bench(server, plan).run())
    assert report.prompt_tokens == "8 (50%), 200 (50%)"
    (note,) = [text for text in report.notes if "first token p50" in text]
    assert re.search(r"2 users: first token p50 \d+ ms for 8 tokens \(\d+ prompts\), \d+ ms for 200", note)


def test_a_slow_endpoint_gets_shorter_answers(server: ScriptedServer) -> None:
    slow = openai_chat(Answer([Said(1, "x ")] + [Said(40, "x ")] * 4, {"prompt": 30, "output": 5}))
    report = asyncio.run(bench(server, Plan(seconds=1.0, most_users=1, probes=False), slow).run())
    assert 16 <= int(report.output_tokens) <= 64
    assert any("so that slow ones fit" in text for text in report.notes)


def test_what_is_no_report_is_said_so(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for content in (
        b"",
        b"[]",
        b'{"schema": "chabok.report/9"}',
        b'{"schema": "chabok.report/1", "levels": 3}',
    ):
        path.write_bytes(content)
        with pytest.raises(MeasureError, match=r"report|schema"):
            read_report(path)
