"""``chabok turn`` at the command line, and measured models in place of the recorded one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.measure.runs import write_run

from chabok.choose.swap import Measured
from chabok.choose.turn import Step, Turn, examine
from chabok.cli.turn import main
from chabok.errors import RequestError
from chabok.measure.failures import MeasureError
from chabok.measure.report import recompute

CALL = Step("a", "model", 10.0, prompt_tokens=1000, cached_tokens=200, reasoning_tokens=50, output_tokens=101)


def test_a_few_numbers_make_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["--tokens", "312.5", "--speed", "50", "--tools", "2.5", "--human", "1.25", "--times", "5"]) == 0
    )
    told = capsys.readouterr().out
    assert "5x the model speed: 2.00x" in told
    assert "2.67x" in told
    assert main(["--model-seconds", "6.25", "--tools", "2.5", "--human", "1.25", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gains"][2]["speedup"] == pytest.approx(2)
    assert found["parts"] == pytest.approx({"answer": 6.25, "tool": 2.5, "human": 1.25})


def test_a_trace_makes_a_page_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "turn.jsonl"
    trace.write_text(
        '{"kind": "model", "seconds": 2, "name": "<script>"}\n{"kind": "tool", "seconds": 1}\nbroken\n'
    )
    page, picture = tmp_path / "turn.html", tmp_path / "turn.svg"
    assert main([str(trace), "--html", str(page), "--svg", str(picture)]) == 0
    assert "line 3 is left out" in capsys.readouterr().err
    assert "<script" not in page.read_text()
    assert picture.read_text().startswith("<svg")


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--tokens", "5"],
        ["nowhere.jsonl"],
        ["x", "--tools", "2"],
        ["--model-seconds", "1", "--times", "fast"],
    ],
)
def test_what_is_missing_is_said(words: list[str]) -> None:
    with pytest.raises((RequestError, MeasureError)):
        main(words)


def test_a_measured_model_takes_the_time_of_its_line_and_its_pace() -> None:
    model = Measured("fast", 0.1, 0.001, 0.01)
    step = model(CALL)
    assert step.prefill_s == pytest.approx(0.1 + 800 * 0.001)
    assert step.seconds == pytest.approx(0.9 + 100 * 0.01)
    assert step.reasoning_s == pytest.approx(1.0 * 50 / 101)
    report = examine(Turn((CALL, Step("b", "tool", 1.0, ("a",)))), models=[model])
    assert report.swaps[0].seconds == pytest.approx(2.9)
    assert report.swaps[0].speedup == pytest.approx(11 / 2.9)


def test_a_measured_model_needs_to_know_the_tokens() -> None:
    with pytest.raises(MeasureError, match="tokens"):
        Measured("fast", 0.1, 0.001, 0.01)(Step("a", "model", 1.0))


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("{}\n")
    for path in (tmp_path / "x.jsonl", tmp_path / "none.jsonl", tmp_path / "empty"):
        with pytest.raises(MeasureError):
            Measured.read(path)


def test_a_saved_run_gives_its_line_and_its_pace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run.jsonl", users=(1, 2))
    model = Measured.read(run)
    assert [model] == Measured.read_all(run)
    assert model.name == "smollm2"
    alone = recompute(run).report.one_user
    assert alone is not None
    assert alone.summary.tpot is not None
    assert model.token_s == alone.summary.tpot.median
    assert model.fixed_s + 128 * model.prompt_token_s == pytest.approx(0.05, rel=0.5)
    trace = tmp_path / "turn.jsonl"
    trace.write_text('{"kind": "model", "seconds": 9, "prompt_tokens": 300, "output_tokens": 200}\n')
    assert main([str(trace), "--swap", str(run)]) == 0
    assert "With smollm2" in capsys.readouterr().out
