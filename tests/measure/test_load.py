"""Loads: what is sent when, what counts, and when it ends."""

from __future__ import annotations

import asyncio
import gc
import itertools
import statistics
import tracemalloc
from pathlib import Path

import pytest
from tests.measure.formats import Answer, Said, openai_chat
from tests.measure.scripted import Script, ScriptedServer, Step

from chabok.measure import (
    Concurrent,
    Endpoint,
    Lengths,
    MeasureError,
    Outcome,
    Patience,
    Prompt,
    Rate,
    Stopwatch,
    Synthetic,
    Timeline,
    Window,
    measure,
    run_load,
    summarize,
)
from chabok.measure.outcome import Tally
from chabok.measure.prompts import FromFile

SHORT = openai_chat(Answer([Said(2, "a"), Said(1, "b"), Said(1, "c")], {"prompt": 5, "output": 3}))


def endpoint(server: ScriptedServer, *scripts: Script, **options: object) -> Endpoint:
    return Endpoint.at(server.script(*scripts), model="m", **options)  # type: ignore[arg-type]


def prompt(number: int) -> Prompt:
    return Prompt(f"prompt {number}", 5, 3)


@pytest.mark.parametrize(
    "rate",
    [
        Rate(100, requests=2000, pattern="constant"),
        Rate(100, requests=2000),
        Rate(100, requests=2000, pattern="bursty"),
    ],
)
def test_arrivals_have_the_rate_and_the_pattern(rate: Rate) -> None:
    due = list(rate.due(1))
    assert due == list(rate.due(1))
    assert due[0] == 0
    assert due == sorted(due)
    assert len(due) == 2000
    gaps = [b - a for a, b in itertools.pairwise(due)]
    assert statistics.mean(gaps) == pytest.approx(0.01, rel=0.15)
    spread = statistics.stdev(gaps) / statistics.mean(gaps)
    expected = {"constant": 0.0, "poisson": 1.0, "bursty": 2.0}[rate.pattern]  # 1 / sqrt(burstiness)
    assert spread == pytest.approx(expected, rel=0.15, abs=1e-6)
    if rate.pattern != "constant":
        assert due != list(rate.due(2))


def test_a_rising_rate_sends_as_many_as_its_integral() -> None:
    due = list(Rate(10, seconds=10, pattern="constant", until_per_s=30).due(0))
    assert len(due) == 200
    assert sum(at < 5 for at in due) == 75  # 5 s at 10..20 per second
    falling = list(Rate(30, seconds=10, pattern="constant", until_per_s=0).due(0))
    assert len(falling) == 150
    assert max(falling) < 10


@pytest.mark.parametrize(
    "make",
    [
        lambda: Concurrent(0, requests=1),
        lambda: Concurrent(4),
        lambda: Concurrent(4, requests=0),
        lambda: Concurrent(4, seconds=-1),
        lambda: Rate(0, requests=1),
        lambda: Rate(float("nan"), requests=1),
        lambda: Rate(5, requests=5, until_per_s=6),
        lambda: Rate(5, requests=5, pattern="sometimes"),  # type: ignore[arg-type]
    ],
)
def test_an_impossible_load_is_refused_with_what_is_possible(make: object) -> None:
    with pytest.raises(MeasureError):
        make()  # type: ignore[operator]


def test_so_many_streams_run_at_once_and_no_more(server: ScriptedServer) -> None:
    outcome = run_load(endpoint(server, SHORT), Concurrent(4, requests=20), prompts=prompt, warm_up=0)
    spans = sorted((t.sent, t.done) for t in outcome.timelines)
    most = max(sum(a <= at < b for a, b in spans if a is not None and b is not None) for at, _ in spans if at)
    assert len(spans) == 20
    assert 2 <= most <= 4
    assert {t.number for t in outcome.timelines} == set(range(20))
    assert all(t.ok and t.connect_s == 0 for t in outcome.timelines)


def test_throughput_counts_only_while_all_streams_run(server: ScriptedServer) -> None:
    scripts = openai_chat(Answer([Said(10, "x")] * 10, {"prompt": 5, "output": 10}))
    outcome = run_load(endpoint(server, scripts), Concurrent(3, requests=12), prompts=prompt, warm_up=0)
    assert outcome.window is not None
    firsts = sorted(measure(t).token_times[0] for t in outcome.timelines)
    assert outcome.window.start == pytest.approx(firsts[2], abs=1e-6)
    assert outcome.window.end <= max(t.done or 0 for t in outcome.timelines)
    summary = summarize(outcome.timelines, outcome.window)
    tokens = sum(
        outcome.window.start < at <= outcome.window.end
        for t in outcome.timelines
        for at in measure(t).token_times
    )
    assert summary.throughput == pytest.approx(tokens / outcome.window.seconds)


def test_an_open_loop_goes_on_while_the_server_stalls_and_times_from_the_schedule(
    server: ScriptedServer,
) -> None:
    # One answer at a time takes 100 ms; 40 requests a second are due: the queue is the server's, and shows.
    slow = openai_chat(Answer([Said(150, "a"), Said(1, "b")], {"prompt": 5, "output": 2}))
    rate = Rate(40, requests=20, pattern="constant")
    outcome = run_load(endpoint(server, slow), rate, prompts=prompt, warm_up=0)
    begun = sorted(outcome.timelines, key=lambda t: t.number)
    scheduled = [t.scheduled - begun[0].scheduled for t in begun]
    assert scheduled == pytest.approx([n / 40 for n in range(20)], abs=1e-9)
    assert all(t.sent is not None and t.sent >= t.scheduled for t in begun)
    assert len([t for t in begun if t.sent is not None and t.sent < (begun[0].done or 0)]) >= 4


def test_a_client_that_falls_behind_says_so(server: ScriptedServer) -> None:
    def slow_prompt(number: int) -> Prompt:
        import time

        time.sleep(0.02)  # a client that cannot make prompts fast enough
        return prompt(number)

    outcome = run_load(
        endpoint(server, SHORT), Rate(100, requests=15, pattern="constant"), prompts=slow_prompt, warm_up=0
    )
    assert outcome.lateness_p99_s > 0.05
    assert "the client fell behind" in outcome.client_bound
    late = summarize(outcome.timelines).ttft
    assert late is not None
    assert late.most > 0.1  # the delay counts for the user, whosever fault it is


def test_a_busy_client_is_said_to_be_the_bottleneck() -> None:
    outcome = Outcome("x", Concurrent(1, requests=1), 0.0, cpu_share=0.9)
    assert "90% of a core" in outcome.client_bound
    outcome.cpu_share = 0.5
    assert outcome.client_bound == ""


def test_hopeless_failures_end_a_load_early(server: ScriptedServer) -> None:
    refusal = Script([Step(0, b'{"error": "no key"}')], status=401, framing="length")
    outcome = run_load(endpoint(server, refusal), Concurrent(2, requests=1000), prompts=prompt, warm_up=0)
    assert outcome.requests < 20
    assert "no key" in outcome.stopped
    with pytest.raises(MeasureError, match="no key"):
        run_load(endpoint(server, refusal), Concurrent(8, requests=10), prompts=prompt)


def test_a_failing_server_is_not_hammered(server: ScriptedServer) -> None:
    broken = Script([Step(0, b"oops")], status=500, framing="length")
    outcome = run_load(endpoint(server, broken), Concurrent(1, seconds=0.5), prompts=prompt, warm_up=0)
    assert outcome.requests == outcome.failed <= 5


def test_stopping_keeps_what_was_measured(server: ScriptedServer) -> None:
    slow = openai_chat(Answer([Said(50, "a")] * 100))

    async def go() -> Outcome:
        kept: list[Timeline] = []

        def keep(timeline: Timeline) -> None:
            kept.append(timeline)
            if len(kept) == 2:  # the third is then being answered
                asyncio.get_running_loop().call_later(0.4, stopwatch.stop)

        async with Stopwatch(endpoint(server, SHORT, SHORT, slow), prompt, sink=keep) as stopwatch:
            outcome = await stopwatch.run(Concurrent(1, requests=100))
        assert [t.failure and t.failure.kind for t in kept] == [None, None, "cancelled"]
        assert len(kept[2].events) > 2
        return outcome

    outcome = asyncio.run(go())
    assert outcome.stopped == "stopped"
    assert (outcome.requests, outcome.failed) == (3, 1)


def test_a_time_limit_lets_running_requests_end(server: ScriptedServer) -> None:
    outcome = run_load(endpoint(server, SHORT), Concurrent(2, seconds=0.3), prompts=prompt, warm_up=0)
    assert outcome.failed == 0
    assert outcome.requests >= 4
    assert outcome.ended - outcome.began < 1.5


def test_a_time_limit_may_wait_for_a_least_number_of_requests(server: ScriptedServer) -> None:
    load = Concurrent(2, seconds=0.001, at_least=7)
    outcome = run_load(endpoint(server, SHORT), load, prompts=prompt, warm_up=0)
    assert outcome.requests == 7


def test_nothing_listening_is_an_error_not_a_result() -> None:
    with pytest.raises(MeasureError, match="nothing listens"):
        run_load(Endpoint.at("http://127.0.0.1:9", model="m"), Concurrent(1, requests=1), prompts=prompt)


def test_a_stalled_request_ends_with_its_patience(server: ScriptedServer) -> None:
    stall = Script([Step(0, b": hi\n\n"), Step(5000, b"")])
    found = run_load(
        endpoint(server, stall, patience=Patience(idle_s=0.1)),
        Concurrent(1, requests=1),
        prompts=prompt,
        warm_up=0,
    )
    assert found.timelines[0].failure is not None
    assert found.timelines[0].failure.kind == "timeout"


def test_an_open_loop_is_steady_from_the_first_answer_to_the_last_arrival() -> None:
    tally = Tally(Outcome("x", Rate(1, requests=3), 0.0, ended=9.0))
    for number, done in enumerate([2.0, 3.0, 8.5]):
        tally.take(Timeline(number, float(number), sent=float(number), done=done))
        tally.idle_from = float(number)
    tally.idle_from = 6.0
    tally.conclude()
    assert tally.outcome.window == Window(2.0, 6.0)


def test_memory_does_not_grow_with_the_run_when_a_sink_takes_the_timelines(server: ScriptedServer) -> None:
    many = openai_chat(Answer([Said(0, "word ")] * 50, {"prompt": 5, "output": 50}))
    where = endpoint(server, many)

    async def go() -> tuple[int, int]:
        async with Stopwatch(where, prompt, sink=lambda timeline: None) as stopwatch:
            await stopwatch.run(Concurrent(4, requests=40))
            tracemalloc.start()
            await stopwatch.run(Concurrent(4, requests=40))
            gc.collect()
            before = tracemalloc.get_traced_memory()[0]
            await stopwatch.run(Concurrent(4, requests=160))
            gc.collect()
            after = tracemalloc.get_traced_memory()[0]
            tracemalloc.stop()
        return before, after

    before, after = asyncio.run(go())
    assert after - before < 100_000  # 8,000 events would be megabytes


# -- prompts


def test_prompts_are_as_long_as_asked_and_differ_from_the_first_word_on() -> None:
    prompts = Synthetic(50, 10, seed=3)
    made = [prompts(number) for number in range(200)]
    assert all(len(each.text.split()) == 50 for each in made)
    assert len({each.text.split()[0] for each in made}) == 200
    assert made == [Synthetic(50, 10, seed=3)(number) for number in range(200)]
    assert made[0].text != Synthetic(50, 10, seed=4)(0).text
    assert len({" ".join(Synthetic(9, 1)(number).text.split()[:3]) for number in range(5000)}) == 5000


def test_a_shared_prefix_is_shared_and_nothing_more() -> None:
    prompts = Synthetic(50, 10, seed=3, shared=20)
    words = [prompts(number).text.split() for number in range(50)]
    assert len({tuple(each[:20]) for each in words}) == 1
    assert len({each[20] for each in words}) == 50
    with pytest.raises(MeasureError, match="leaves nothing"):
        Synthetic(50, 10, shared=50)


def test_prompts_come_from_a_file_of_text_or_json(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_text("one\n\ntwo ü\n", encoding="utf-8")
    prompts = FromFile(path, 7)
    assert [prompts(number).text for number in range(3)] == ["one", "two ü", "one"]
    assert prompts(0).output_tokens == 7
    path.write_text('{"prompt": "a", "output_tokens": 3}\n{"prompt": "b"}\n')
    made = [FromFile(path, 7)(number) for number in range(2)]
    assert [(each.text, each.output_tokens) for each in made] == [("a", 3), ("b", 7)]
    for content, said in (
        ("", "no prompt"),
        ('{"prompt": ""}', "line 1"),
        ('{"prompt": "a"}\n{"x": 1}', "line 2"),
    ):
        path.write_text(content)
        with pytest.raises(MeasureError, match=said):
            FromFile(path)
    with pytest.raises(MeasureError, match="cannot be read"):
        FromFile(tmp_path / "none")


def test_lengths_may_be_distributed() -> None:
    prompts = Synthetic(Lengths.of("20-60"), Lengths.of("5-9"), seed=1)
    made = [prompts(number) for number in range(300)]
    assert {each.output_tokens for each in made} == {5, 6, 7, 8, 9}
    assert min(each.tokens for each in made) < 25
    assert max(each.tokens for each in made) > 55
    for text in ("0", "-3", "a", "9-5", "", "64:", "64:0", "64:x,2000:1", "64,,2000", "64:inf"):
        with pytest.raises(MeasureError):
            Lengths.of(text)


def test_lengths_may_be_a_mix_of_short_and_long() -> None:
    mix = Lengths.of("16-20:0.8,200:0.2")
    assert (mix.low, mix.high) == (16, 200)
    assert str(mix) == "16-20 (80%), 200 (20%)"
    made = [Synthetic(mix, 4, seed=1)(number).tokens or 0 for number in range(500)]
    assert set(made) == {16, 17, 18, 19, 20, 200}
    assert made.count(200) == pytest.approx(100, abs=3)
    assert made[:20].count(200) == pytest.approx(4, abs=1)  # also a short run has both
    assert [Synthetic(mix, 4, seed=1)(number).tokens for number in range(500)] == made
    assert Lengths.of("8,16").mix == ((Lengths(8, 8), 1.0), (Lengths(16, 16), 1.0))
