"""``chabok report`` and ``chabok diff`` from the command line: what they print, write, refuse, and return."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import pytest
from tests.measure.runs import write_run

from chabok.cli.main import main
from chabok.cli.report_text import fitting
from chabok.measure.conditions import Condition
from chabok.measure.report import METRICS, recompute


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "base.jsonl", users=(1, 4), rounds=8)
    write_run(folder / "slow.jsonl", users=(1, 4), rounds=8, slow=1.5, seed=2)
    write_run(folder / "long.jsonl", users=(1, 4), rounds=4, prompt=512)
    return folder


def test_a_report_begins_in_words_and_ends_with_the_command(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(["report", str(folder / "base.jsonl"), "--per-hour", "0.5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    starts = [line.partition(":")[0] for line in lines]
    order = ["One user", "Capacity", "Bottleneck", "Cost", "Again"]
    assert [starts.index(word) for word in order] == sorted(starts.index(word) for word in order)
    [head] = [line for line in lines if line.startswith("Load")]
    assert {"TTFT p50", "Worst gap", "Goodput/s"} <= set(head.split("  ")) | {
        word.strip() for word in head.split("  ")
    }
    assert "$" in next(line for line in lines if line.startswith("Cost"))


def test_a_narrow_terminal_gets_fewer_columns(folder: Path) -> None:
    report = recompute(folder / "base.jsonl").report
    wide, narrow = fitting(report, 200), fitting(report, 80)
    assert len(narrow) < len(wide)
    assert narrow[0].heading == "Load"
    assert {"TTFT p50", "Tokens/s"} <= {column.heading for column in narrow}


def test_reports_are_written_in_the_form_of_their_ending(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["report", str(folder / "base.jsonl")]
    for suffix in ("html", "json", "csv", "md"):
        words += ["-o", str(tmp_path / f"run.{suffix}")]
    assert main(words) == 0
    assert (tmp_path / "run.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    report = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    assert [level["users"] for level in report["levels"]] == [1, 4]
    capsys.readouterr()
    for flag, suffix in (("--json", "json"), ("--csv", "csv"), ("--markdown", "md")):
        assert main(["report", str(folder / "base.jsonl"), flag]) == 0
        assert capsys.readouterr().out == (tmp_path / f"run.{suffix}").read_bytes().decode()
    assert len(list(csv.reader(io.StringIO((tmp_path / "run.csv").read_bytes().decode())))) == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gone.jsonl"], "no such file"),
        (["base.jsonl", "-o", "base.jsonl"], "a report is written as .html"),
        (["base.jsonl", "--watts", "3"], "--watts and --per-kwh belong together"),
        (["base.jsonl", "--watts", "3", "--per-kwh", "1", "--per-hour", "1"], "different prices"),
        (["base.jsonl", "--prices", "x.toml"], "--prices needs --price"),
        (["base.jsonl", "--price", "nobody"], "there is no price 'nobody'"),
        (["base.jsonl", "--slo", "ttft"], "is no limit"),
        (["bad.jsonl"], "bad.jsonl, line 3"),
        (["text.jsonl"], "text.jsonl is not a file of timelines"),
    ],
)
def test_what_cannot_be_reported_is_said_in_one_line(
    folder: Path,
    words: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    good = (folder / "base.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "bad.jsonl").write_bytes(b"".join([*good[:2], b'{"number": "x"}\n', *good[2:]]))
    (folder / "text.jsonl").write_text("hello\n")
    before = (folder / "base.jsonl").read_bytes()
    assert main(["report", *words]) == 1
    heard = capsys.readouterr()
    assert said in heard.err
    assert heard.err.count("\n") == 1
    assert heard.out == ""
    assert (folder / "base.jsonl").read_bytes() == before


def test_diff_says_what_is_worse_and_returns_0_without_conditions(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", str(folder / "base.jsonl"), str(folder / "slow.jsonl")]) == 0
    out = capsys.readouterr().out
    [line] = [line for line in out.split("4 users")[1].splitlines() if line.startswith("ITL p50")]
    assert line.rstrip().endswith("worse")
    assert "differ by chance alone" in out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["slow.jsonl", "--fail-if", "itl.p50 > +10%"], 1, "FAILED: itl.p50 > +10%"),
        (["slow.jsonl", "--fail-if", "itl.p50 > +10%", "--surely"], 1, "FAILED: itl.p50 > +10%"),
        (["slow.jsonl", "--fail-if", "itl.p50 > +100%"], 0, "fine: itl.p50 > +100%"),
        (
            ["slow.jsonl", "--fail-if", "failed > 1%", "--fail-if", "itl.p50 > 1ms"],
            1,
            "FAILED: itl.p50 > 1ms",
        ),
        (["base.jsonl", "--fail-if", "itl.p50 > +0%"], 0, "fine"),
        (["--fail-if", "ttft.p50 > 10s"], 0, "fine: ttft.p50 > 10s"),
        (["--fail-if", "ttft.p50 > 1ms"], 1, "base.jsonl, one user: ttft.p50"),
        (["long.jsonl", "--anyway"], 0, "Note: base.jsonl and long.jsonl are of different loads"),
    ],
)
def test_diff_returns_1_where_a_condition_is_met(
    folder: Path, words: list[str], code: int, said: str,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(folder)
    assert main(["diff", "base.jsonl", *words]) == code
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "to compare, name two"),
        (["gone.jsonl"], "no such file"),
        (["long.jsonl"], "of different loads: prompts of 128 tokens and of 512; --anyway"),
        (["slow.jsonl", "--fail-if", "ttft.p95 > 10%"], "a change has a sign"),
        (["slow.jsonl", "--fail-if", "ttft.p99.9 > +10%"], "ttft.p99.9 is not known"),
        (["--fail-if", "ttft.p50 > +10%"], "needs two runs"),
        (["--fail-if", "cost.output > 1"], "cost.output is not known"),
    ],
)
def test_diff_returns_2_where_it_cannot_answer(
    folder: Path,
    words: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    assert main(["diff", "base.jsonl", *words]) == 2
    heard = capsys.readouterr()
    assert said in heard.err
    assert heard.err.count("\n") == 1


def test_diff_in_json_is_data_and_nothing_else(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(folder / "base.jsonl"), str(folder / "slow.jsonl")]
    assert main(["diff", *runs, runs[0], "--json", "--fail-if", "throughput < -5%"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "chabok.diff/1"
    assert [each["run"] for each in found["runs"]] == ["slow.jsonl", "base.jsonl"]
    entries = {each["metric"]: each for each in found["runs"][0]["loads"][1]["comparisons"]}
    assert entries["itl.p50"]["verdict"] == "worse"
    assert entries["itl.p50"]["low"] <= entries["itl.p50"]["change"] <= entries["itl.p50"]["high"]
    assert found["conditions"][0]["met"] is True


def test_what_names_and_errors_say_does_nothing_to_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "a.jsonl", users=(1,), rounds=2, model="\x1b]0;evil\x07[bold]x", notes=["\x1b[2J"])
    assert main(["report", str(tmp_path / "a.jsonl")]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "[bold]x" in out


def test_the_documentation_names_metrics_and_conditions_that_there_are() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reports.md").read_text(encoding="utf-8")
    for line in re.findall(r"--fail-if '([^']+)'", text):
        Condition.of(line)
    rows = {row[0]: row[1] for row in re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", text, re.M)}
    with_statistic = set(re.findall(r"`(\w+)`", rows["metrics with a statistic"]))
    without = set(re.findall(r"`(\w+)`", rows["metrics without"]))
    assert with_statistic == {name for name, metric in METRICS.items() if metric.of != "load"}
    assert without == {name for name, metric in METRICS.items() if metric.of == "load"}
