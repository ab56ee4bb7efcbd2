"""``chabok bench`` from the command line to the words it ends with."""

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
from tests.measure.formats import Answer, Said, openai_chat
from tests.measure.scripted import Script, ScriptedServer, Step

from chabok.cli.main import main

ANSWER = openai_chat(Answer([Said(5, "one ")] + [Said(2, "x ")] * 9, {"prompt": 30, "output": 10}))


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    running = ScriptedServer()
    yield running
    running.close()


def bench(*words: str, folder: Path) -> int:
    return main(["bench", *words, "-o", str(folder)])


def target(server: ScriptedServer, *scripts: Script) -> list[str]:
    return [server.script(*(scripts or (ANSWER,))) + "/v1/chat/completions", "--model", "m"]


def test_a_run_ends_in_words_a_table_the_command_and_its_files(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*target(server), "--seconds", "1", "--most-users", "2", "--per-hour", "0.5", "--seed", "7"]
    assert bench(*words, folder=tmp_path) == 0
    out = capsys.readouterr().out
    for expected in (
        "One user:",
        "first token in",
        "Capacity:",
        "Bottleneck:",
        "Cost:",
        "TTFT p50",
        "2 users",
    ):
        assert expected in out
    assert "--seed 7" in out
    assert len(list(tmp_path.glob("*.json"))) == len(list(tmp_path.glob("*.jsonl"))) == 1


def test_json_is_the_report_and_nothing_else(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*target(server), "--users", "1,2", "--requests", "3", "--json", "--api-key", "sk-secret"]
    assert bench(*words, folder=tmp_path) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == "chabok.report/1"
    assert [level["users"] for level in report["levels"]] == [1, 2]
    assert "sk-secret" not in json.dumps(report)
    assert "sk-secret" not in next(tmp_path.glob("*.jsonl")).read_text()


def test_a_local_model_is_measured_without_a_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(Path(__file__).parents[1] / "fixtures" / "qwen2.gguf")
    words = [
        model,
        "--users",
        "1,2",
        "--requests",
        "4",
        "--prompt-tokens",
        "120",
        "--output-tokens",
        "8",
        "--json",
    ]
    assert bench(*words, folder=tmp_path) == 0
    report = json.loads(capsys.readouterr().out)
    assert [level["users"] for level in report["levels"]] == [1, 2]
    assert all(level["summary"]["output_tokens"] == 32 for level in report["levels"])
    assert all(level["summary"]["sources"] == {"usage": 4} for level in report["levels"])


def test_rates_are_open_loops(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*target(server), "--rate", "30", "--pattern", "constant", "--requests", "10", "--json"]
    assert bench(*words, folder=tmp_path) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["levels"][0]["load"] == "30 requests/s, constant"
    assert report["levels"][0]["summary"]["requests"] == 10


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["http://127.0.0.1:9"], "nothing listens at http://127.0.0.1:9"),
        (["http://127.0.0.1:9", "--slo", "tfft=1"], "is no limit"),
        (["http://127.0.0.1:9", "--users", "x"], "--users takes"),
        (["http://127.0.0.1:9", "--users", "1", "--rate", "2"], "different loads"),
        (["http://127.0.0.1:9", "--requests", "5"], "belongs to"),
        (["http://127.0.0.1:9", "--pattern", "bursty"], "--pattern belongs to"),
        (["http://127.0.0.1:9", "--watts", "5"], "belong together"),
        (["http://127.0.0.1:9", "--header", "x"], "NAME:VALUE"),
        (["http://127.0.0.1:9", "--extra", "x=y"], "FIELD=JSON"),
        (["http://127.0.0.1:9", "--price", "free lunch"], "there is no price"),
        (["http://127.0.0.1:9", "--prompt-tokens", "0"], "no length in tokens"),
        (["http://127.0.0.1:9", "--api-key-env", "NO_SUCH_VARIABLE"], "is empty"),
        (["http://127.0.0.1:9", "--dialect", "x"], "there is no dialect"),
        (["ftp://127.0.0.1"], "is not an http"),
    ],
)
def test_bad_input_gets_one_line_and_a_status(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*words, folder=tmp_path) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert captured.err.startswith("chabok: ")
    assert captured.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_refused_run_leaves_no_files(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = Script([Step(0, b'{"error": "who are you"}')], status=401, framing="length")
    assert bench(*target(server, refusal), "--quiet", folder=tmp_path) == 1
    assert "status 401" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_failures_are_counted_with_an_example(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Script([Step(0, b'{"error": "CUDA out of memory"}')], status=500, framing="length")
    scripts = [*[ANSWER] * 14, broken]  # enough for finding out and warming up
    words = [*target(server, *scripts), "--users", "1", "--requests", "7", "--output-tokens", "10"]
    assert bench(*words, folder=tmp_path) == 0
    out = capsys.readouterr().out
    assert "(http 500): status 500: CUDA out of memory" in out


def test_a_load_of_which_every_request_fails_is_a_failure(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Script([Step(0, b'{"error": "gone"}')], status=500, framing="length")
    words = [*target(server, *[ANSWER] * 14, broken), "--users", "1,2", "--requests", "7"]
    assert bench(*words, "--output-tokens", "10", folder=tmp_path) == 1
    assert "2 users: 7 of 7 failed (http 500)" in capsys.readouterr().out
    assert len(list(tmp_path.glob("*.json"))) == 1  # what was measured is kept


def test_an_output_that_is_no_folder_is_said_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert bench("http://127.0.0.1:9", folder=tmp_path / "file") == 1
    assert "no folder can be made there" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_keeps_what_was_measured(server: ScriptedServer, tmp_path: Path) -> None:
    slow = openai_chat(Answer([Said(20, "a ")] * 10, {"prompt": 30, "output": 10}))
    words = [*target(server, slow), "--users", "1", "--requests", "500", "-o", str(tmp_path)]
    command = [sys.executable, "-m", "chabok", "bench", *words]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    )
    assert process.stderr is not None
    while "one user" not in process.stderr.readline():
        assert process.poll() is None
    time.sleep(1.2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "this is what was measured until then" in out
    assert len(list(tmp_path.glob("*.json"))) == 1
