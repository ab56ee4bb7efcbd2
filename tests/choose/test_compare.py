"""Comparisons from their targets to what they say: against scripted servers and tiny models."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.measure.formats import Answer, Said, openai_chat
from tests.measure.scripted import Script, ScriptedServer, Step

from chabok.choose import Contestant, Limit, compare, conclude, front
from chabok.choose.compare import measure
from chabok.choose.contest import Place, State, distinct
from chabok.choose.pareto import dominates
from chabok.cli.main import main
from chabok.errors import ChabokError
from chabok.measure.cost import Price

FIXTURES = Path(__file__).parents[1] / "fixtures"
QUESTIONS = [{"id": f"q{n}", "prompt": f"What is {n} + 0?", "number": 3} for n in range(4)]


def said(text: str, wait_ms: float = 2) -> Script:
    words = text.split(" ")
    usage = {"prompt": 9, "output": len(words)}
    return openai_chat(Answer([Said(5, words[0])] + [Said(wait_ms, " " + word) for word in words[1:]], usage))


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    running = ScriptedServer()
    yield running
    running.close()


@pytest.fixture
def questions(tmp_path: Path) -> str:
    path = tmp_path / "q.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    return str(path)


def end(server: ScriptedServer, *scripts: Script) -> str:
    return server.script(*scripts) + "/v1/chat/completions#m"


# -- the front and budgets

members = st.dictionaries(
    st.integers(0, 20), st.tuples(*[st.integers(0, 4).map(float)] * 3), min_size=1, max_size=12
)


@settings(deadline=None)
@given(members)
def test_no_member_of_the_front_is_dominated_and_everyone_else_is(
    found: dict[int, tuple[float, ...]],
) -> None:
    good = front(found)
    assert good
    for name, values in found.items():
        beaten = any(dominates(found[other], values) for other in good)
        assert beaten == (name not in good)


@settings(deadline=None)
@given(members, st.randoms())
def test_the_front_does_not_depend_on_the_order(found: dict[int, tuple[float, ...]], chance: object) -> None:
    items = list(found.items())
    chance.shuffle(items)  # type: ignore[attr-defined]
    assert front(dict(items)) == front(found)


def test_equals_are_on_the_front_together() -> None:
    assert front({"a": (1.0, 2.0), "b": (1.0, 2.0), "c": (2.0, 2.0)}) == {"a", "b"}


@pytest.mark.parametrize(
    ("text", "attribute", "value", "inside", "outside"),
    [
        ("first token<200ms", "first_token_s", 0.2, 0.199, 0.2),
        ("answer <= 2s", "answer_s", 2.0, 2.0, 2.01),
        ("cost<$0.5", "cost", 0.5, 0.49, 0.5),
        ("memory<2GB", "memory_bytes", 2e9, 1.9e9, 2e9),
        ("quality>60%", "share", 0.6, 0.61, 0.6),
        ("quality>=60", "share", 0.6, 0.6, 0.59),
        ("pace>50", "pace", 50.0, 51.0, 50.0),
        ("ttft<1.5s", "first_token_s", 1.5, 1.0, 1.6),
    ],
)
def test_a_limit_is_read_with_its_unit(
    text: str, attribute: str, value: float, inside: float, outside: float
) -> None:
    limit = Limit.of(text)
    assert (limit.need.attribute, limit.value) == (attribute, pytest.approx(value))
    assert limit.keeps(inside)
    assert not limit.keeps(outside)
    assert not limit.keeps(None)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "first token",
        "answer>2s",
        "quality<50%",
        "answer<2GB",
        "answer<5",
        "memory<2",
        "beauty>3",
        "cost<x",
    ],
)
def test_what_is_no_limit_is_refused_with_what_is(text: str) -> None:
    with pytest.raises(ChabokError):
        Limit.of(text)


@settings(deadline=None)
@given(st.floats(0, 100, allow_nan=False), st.floats(0, 100, allow_nan=False), st.floats(0.01, 100))
def test_what_a_budget_lets_in_a_larger_one_lets_in_too(value: float, more: float, bound: float) -> None:
    if Limit.of(f"answer<{bound:f}s").keeps(value):
        assert Limit.of(f"answer<{bound + more:f}s").keeps(value) or more == 0


# -- targets


def test_targets_are_told_apart(tmp_path: Path) -> None:
    run = tmp_path / "saved.jsonl"
    run.write_text("")
    kinds = {
        "smollm2": "model",
        str(FIXTURES / "llama.gguf"): "model",
        "http://127.0.0.1:1#m": "endpoint",
        "127.0.0.1:8080": "endpoint",
        str(run): "run",
        str(tmp_path): "run",
        "fast=smollm2": "model",
        "hf:owner/repo": "model",
    }
    assert {text: Contestant.of(text).kind for text in kinds} == kinds
    assert Contestant.of("fast=http://h:1/v1#a/b") == Contestant("fast", "endpoint", "http://h:1/v1", "a/b")
    with pytest.raises(ChabokError):
        Contestant.of("fast=")


def test_the_same_target_twice_has_two_names() -> None:
    assert [each.label for each in distinct([Contestant.of("a"), Contestant.of("a")])] == ["a", "a (2)"]


# -- whole comparisons


def test_endpoints_are_compared_and_every_number_comes_from_the_files(
    server: ScriptedServer, tmp_path: Path, questions: str
) -> None:
    folder = tmp_path / "out"
    found = compare(
        "right=" + end(server, said("the answer is 3", 30)),
        "wrong=" + end(server, said("it is ۴")),
        folder=folder,
        prompts=["a", "b", "c"],
        evals=[questions],
        prices={"": Price("list", prompt=1.0, output=2.0)},
        budget=["answer<10s", "quality>50%"],
    )
    right, wrong = found["right"], found["wrong"]
    assert found.complete
    assert right.quality is not None
    assert wrong.quality is not None
    assert (right.quality.right, right.quality.asked) == (4, 4)
    assert (wrong.quality.right, wrong.quality.unread) == (0, 0)
    assert right.answer_tokens == 4
    assert right.cost == pytest.approx((9 * 1.0 + 4 * 2.0) / 1e6 * 1000)
    assert right.answer_s is not None
    assert wrong.answer_s is not None
    assert wrong.answer_s < right.answer_s
    assert found.front == ["right", "wrong"]
    assert found.best == "right"
    assert list(found.crossed) == ["wrong"]
    assert any(each.startswith("Within the budget") and "right" in each for each in found.sentences)
    again = conclude(folder, [Limit.of(text) for text in found.budget], Price("list", prompt=1.0, output=2.0))
    assert again.to_dict() == found.to_dict()
    lines = [json.loads(line) for line in (folder / "1-right" / "quality.jsonl").read_text().splitlines()]
    assert [line["question"] for line in lines] == ["q0", "q1", "q2", "q3"]
    assert all(line["took_s"] > 0 and line["answer"] == "the answer is 3" for line in lines)


def test_one_that_fails_and_a_missing_price_are_named_and_the_rest_goes_on(
    server: ScriptedServer, tmp_path: Path
) -> None:
    found = compare(
        "http://127.0.0.1:9",
        str(tmp_path / "gone.gguf"),
        "good=" + end(server, said("fine")),
        "bad=" + end(server, Script([], status=500)),
        folder=tmp_path / "out",
        prompts=["a"],
    )
    assert "nothing listens" in found.members[0].failure
    assert "no such file" in found.members[1].failure
    assert found["good"].complete
    assert found["good"].answer_s is not None
    assert found["bad"].failure
    assert any("price" in each for each in found["good"].missing)
    assert not found.complete
    assert "<script" not in found.to_html()


def test_tiny_models_are_compared_by_probability_with_their_memory(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(
        '{"prompt": "Color?", "choices": ["red", "blue"], "answer": 0}\n{"prompt": "Say", "regex": "."}\n'
    )
    found = compare(
        str(FIXTURES / "llama.gguf"),
        folder=tmp_path / "out",
        prompts=["a"],
        output_tokens=4,
        evals=[str(path)],
    )
    (member,) = found.members
    assert found.complete
    assert member.memory_bytes is not None
    assert 10e6 < member.memory_bytes < 2e9
    assert member.quality is not None
    assert member.quality.methods == {"logprob": 1, "text": 1}
    line = json.loads((tmp_path / "out" / "1-llama" / "quality.jsonl").read_text().splitlines()[0])
    assert all(each["logprob"] < 0 and each["tokens"] > 0 for each in line["rated"])


def test_a_saved_run_is_compared_by_its_raw_file(server: ScriptedServer, tmp_path: Path) -> None:
    first = compare("x=" + end(server, said("one two three")), folder=tmp_path / "a", prompts=["a", "b"])
    saved = tmp_path / "a" / "1-x" / "speed.jsonl"
    found = compare(f"old={saved}", folder=tmp_path / "b")
    assert found["old"].answer_s == first["x"].answer_s
    assert found["old"].kind == "run"
    assert any("work of its own" in note for note in found["old"].notes)


def test_a_folder_of_another_comparison_is_not_mixed_up(server: ScriptedServer, tmp_path: Path) -> None:
    target = end(server, said("x"))
    compare(target, folder=tmp_path / "a", prompts=["a"])
    with pytest.raises(ChabokError, match="another prompts"):
        compare(target, folder=tmp_path / "a", prompts=["b"])
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "file").touch()
    with pytest.raises(ChabokError, match="not empty"):
        compare(target, folder=tmp_path / "c", prompts=["a"])


def test_ctrl_c_keeps_what_there_is_and_resuming_asks_only_the_rest(
    server: ScriptedServer, tmp_path: Path, questions: str
) -> None:
    target = "slow=" + end(server, *[said("3")] * 4, *[said("3 " + "x " * 14, 50)] * 9)
    prompts = tmp_path / "p.txt"
    prompts.write_text("one\ntwo\n")
    words = [
        "compare",
        target,
        "--eval",
        questions,
        "--prompts",
        str(prompts),
        "-o",
        str(tmp_path / "out"),
        "-q",
    ]
    answers = tmp_path / "out" / "1-slow" / "quality.jsonl"
    child = subprocess.Popen([sys.executable, "-m", "chabok", *words], env=os.environ, stdout=subprocess.PIPE)
    until = time.monotonic() + 30
    while not (answers.exists() and answers.read_bytes().count(b"\n") >= 1) and time.monotonic() < until:
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    out = child.communicate(timeout=30)[0].decode()
    assert child.returncode == 130
    assert "--resume" in out
    before = answers.read_bytes().splitlines()
    assert 1 <= len(before) < 4
    assert main(["compare", "--resume", str(tmp_path / "out"), "-q"]) == 0
    after = answers.read_bytes().splitlines()
    assert after[: len(before)] == before
    assert sorted(json.loads(line)["question"] for line in after) == ["q0", "q1", "q2", "q3"]


def test_the_command_ends_in_sentences_a_table_a_chart_and_a_page(
    server: ScriptedServer, tmp_path: Path, questions: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "p.txt"
    prompts.write_text("one\n")
    words = ["a=" + end(server, said("3")), "<b>=" + end(server, said("4 or so", 40)), "--eval", questions]
    words[1] = words[1].replace("<b>", "b")
    folder = tmp_path / "out"
    assert (
        main(
            ["compare", *words, "--prompts", str(prompts), "--budget", "quality>90%", "-o", str(folder), "-q"]
        )
        == 0
    )
    out = capsys.readouterr().out
    for expected in ("Within the budget", "First token", "Quality", "on the Pareto front", "✗ b", "McNemar"):
        assert expected in out
    page = (folder / "compare.html").read_text()
    assert "<svg" in page
    assert "http://www.w3.org" not in page or "src=" not in page
    assert json.loads((folder / "compare.json").read_text())["best"] == "a"


def test_questions_that_changed_are_not_mixed_up(
    server: ScriptedServer, tmp_path: Path, questions: str
) -> None:
    compare(end(server, said("3")), folder=tmp_path / "out", prompts=["a"], evals=[questions], limit=1)
    Path(questions).write_text(json.dumps({"prompt": "another", "exact": "x"}) + "\n")
    found = conclude(tmp_path / "out")
    assert found.members[0].quality is not None
    assert any("questions were changed" in note for note in found.notes)
    plan = found.plan
    place = Place(tmp_path / "out", 0, plan.contestants[0])
    place.keep(State(speed_done=True))
    with pytest.raises(ChabokError, match="questions were changed"):
        measure(plan, tmp_path / "out", {}, lambda *_: None)


def test_what_a_server_says_is_harmless_on_the_page_and_in_a_notebook(
    server: ScriptedServer, tmp_path: Path
) -> None:
    evil = "<script>alert(1)</script>"
    refusal = Script(
        [Step(0, json.dumps({"error": {"message": evil}}).encode())],
        404,
        {"Content-Type": "application/json"},
    )
    found = compare(
        "bad=" + end(server, refusal),
        "a=" + end(server, said("one two")),
        "b=" + end(server, said("three four")),
        folder=tmp_path / "out",
        prompts=[evil],
    )
    assert evil in found["bad"].failure
    for page in (found.to_html(), found._repr_html_(), found.figure()):
        assert evil not in page
    assert "<svg xmlns=" in found.figure()
    assert json.loads(json.dumps(found.to_dict()))["members"][0]["failure"] == found["bad"].failure
