"""Reports say what the raw lines say, in every form, and nothing that they do not carry."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.measure.formats import Answer, Said, openai_chat
from tests.measure.runs import answer, write_run
from tests.measure.scripted import ScriptedServer

from chabok.measure import Concurrent, Endpoint, Failure, MeasureError, Outcome, Rate, Window
from chabok.measure.bench import Bench, Plan
from chabok.measure.cost import Price
from chabok.measure.report import Found, recompute
from chabok.measure.report.account import capacity_of
from chabok.measure.report.data import Level, json_schema, read_report, to_json, write_report
from chabok.measure.report.definitions import METRICS
from chabok.measure.report.numbers import UNKNOWN
from chabok.measure.report.page import to_html
from chabok.measure.report.tables import columns, markdown_cell, to_csv, to_markdown
from chabok.measure.report.words import footnotes, sentences, warnings
from chabok.measure.run import About, RunFile
from chabok.measure.slo import Limit

SCHEMA = Path(__file__).parents[2] / "docs" / "report.schema.json"
HOSTILE = (
    "</title><script>alert(1)</script>\"'><img src=x onerror=alert(1)>|`*_=[x](http://evil)\x1b[31m\n\n# x"
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return recompute(write_run(tmp_path_factory.mktemp("runs") / "a.jsonl", failing=0.02))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Found:
    path = tmp_path_factory.mktemp("runs") / "hostile.jsonl"
    about = dict.fromkeys(("url", "model", "dialect", "server", "command", "started_at"), HOSTILE)
    with RunFile(path, About(**about, notes=[HOSTILE], limits=["ttft=1ms"])) as file:  # type: ignore[arg-type]
        for number in range(4):
            failure = Failure(HOSTILE, HOSTILE) if number == 3 else None
            file(answer(number, float(number), phase=HOSTILE, failure=failure))
        file.load(Outcome(HOSTILE, Concurrent(2, 1), 0.0, 4.0, stopped=HOSTILE))
    return recompute(path)


def test_a_report_computed_again_is_the_one_that_the_run_printed(
    server: ScriptedServer, tmp_path: Path
) -> None:
    script = openai_chat(Answer([Said(5, "one ")] + [Said(2, "x ")] * 9, {"prompt": 30, "output": 10}))
    plan = Plan(seconds=1.0, most_users=2, price=Price.machine(3.6), limits=(Limit.of("ttft=2s:p50"),))
    made = Bench(Endpoint.at(server.script(script), model="m"), plan)
    with RunFile(tmp_path / "run.jsonl", made.about) as log:
        made.log = log
        printed = asyncio.run(made.run())
    again = recompute(tmp_path / "run.jsonl").report
    assert json.loads(to_json(replace(again, timelines=""))) == json.loads(to_json(printed))
    assert sentences(again) == sentences(printed)


def test_levels_come_from_their_own_requests(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with RunFile(path, About(limits=["ttft=100ms:p95"])) as file:
        file(answer(0, 0.0, phase="warm-up", ttft=9.0))
        for number in range(20):
            file(answer(number, 10.0 + number, ttft=0.05 + 0.001 * number, gap=0.01, tokens=11))
        file.load(Outcome("one user", Concurrent(1, 20), 10.0, 30.0, Window(10.0, 30.0), cpu_share=0.9))
    [sample] = recompute(path).samples
    level = sample.level
    assert level.summary.requests == 20
    assert level.summary.ttft is not None
    assert level.summary.ttft.median == pytest.approx(0.0595)
    assert level.summary.throughput == pytest.approx(20 * 11 / 20)
    assert level.met
    assert level.goodput == pytest.approx(1.0)
    assert "90% of a core" in level.client_bound
    assert level.prefill_share == pytest.approx(
        sum(40 + 0.8 * n for n in range(20)) / sum(140 + 0.8 * n for n in range(20))
    )
    assert sample.slices["throughput"].mean() == pytest.approx(11.0)
    assert sample.rows[1].first == pytest.approx(1.0 + 0.051)


def test_other_limits_and_prices_can_be_applied_afterwards(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a.jsonl", users=(1, 2, 4), rounds=4)
    assert recompute(path).report.capacity == 4
    found = recompute(path, limits=[Limit.of("ttft=1ms")], price=Price.machine(1.0))
    assert found.report.capacity == 0
    assert found.report.cost is not None
    assert recompute(path).report.cost is None


def test_a_run_without_its_end_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a.jsonl", users=(1, 4), rounds=4)
    lines = path.read_bytes().splitlines(keepends=True)
    loads = [place for place, line in enumerate(lines) if line.startswith(b'{"load"')]
    path.write_bytes(b"".join(lines[: loads[1]])[:-9])
    report = recompute(path).report
    assert not report.complete
    assert [level.users for level in report.levels] == [1, 4]
    assert not report.levels[1].summary.steady
    assert any("ends too early" in text for text in report.notes)
    assert any("never steady" in text for text in footnotes(report))
    assert any("ended before the load did" in text for text in warnings(report))


def test_a_run_of_nothing_has_a_report_of_nothing(tmp_path: Path) -> None:
    with RunFile(tmp_path / "a.jsonl", About(model="m")):
        pass
    found = recompute(tmp_path / "a.jsonl")
    assert sentences(found.report) == []
    assert "Nothing was measured" in to_markdown(found.report)
    assert "Nothing was measured" in to_html(found)
    assert len(to_csv(found.report).splitlines()) == 1


@pytest.mark.parametrize(
    ("met", "capacity"),
    [("", None), ("y", 1), ("yy", 2), ("nn", 0), ("yn", 1), ("ynyn", 1), ("yyyn", 3), ("yyny", 2)],
)
def test_capacity_is_the_most_users_below_any_that_missed(met: str, capacity: int | None) -> None:
    levels = [
        Level("", "", users, None, kept={"x": 1.0}, met=sign == "y") for users, sign in enumerate(met, 1)
    ]  # type: ignore[arg-type]
    assert capacity_of(levels) == capacity


def test_percentiles_that_the_sample_does_not_carry_are_dashes_everywhere(tmp_path: Path) -> None:
    found = recompute(write_run(tmp_path / "a.jsonl", users=(1, 2), rounds=2))
    [ours] = [row for row in csv.DictReader(io.StringIO(to_csv(found.report))) if row["load"] == "one user"]
    assert ours["ttft_p50_s"]
    assert ours["ttft_p95_s"] == ours["ttft_p99_s"] == ours["ttft_p95_low_s"] == ""
    assert ours["reasoning_tokens"] == ""
    headings = [column.heading for column in columns(found.report)]
    assert "p99" not in headings
    page = to_html(found)
    assert f"<td>{UNKNOWN}</td>" in page


def test_every_report_keeps_the_published_schema(found: Found, hostile: Found, tmp_path: Path) -> None:
    published = json.loads(SCHEMA.read_text(encoding="utf-8"))
    assert published == json_schema(), "docs/report.schema.json is old; json_schema() makes it"
    validator = jsonschema_rs.validator_for(published)
    rates = recompute(write_run(tmp_path / "r.jsonl", users=(), rates=(2, 4), price=Price.own(100, 0.3)))
    for each in (found, hostile, rates):
        assert list(validator.iter_errors(json.loads(to_json(each.report)))) == []
        write_report(tmp_path / "a.json", each.report)
        assert read_report(tmp_path / "a.json") == each.report
    broken = json.loads(to_json(found.report)) | {"levels": 3}
    assert list(validator.iter_errors(broken))


def test_columns_come_with_what_they_are_about(found: Found, tmp_path: Path) -> None:
    def headings(each: Found) -> set[str]:
        return {column.heading for column in columns(each.report)}

    path = tmp_path / "a.jsonl"
    with RunFile(path) as file:
        for number in range(3):
            made = answer(number, float(number), cached=64, tokens=4)
            made.events[1] = made.events[1]._replace(kind="reasoning")
            made.usage.reasoning_tokens = 1
            file(made)
        file.load(Outcome("2 requests/s", Rate(2.0, 3), 0.0, 3.0))
    special = {"Visible p50", "Cached", "Lateness p99"}
    assert not special & headings(found)
    assert special <= headings(recompute(path))
    table = to_markdown(recompute(path).report)
    assert "50 %" in table


def test_csv_has_a_row_per_load_with_the_numbers_of_the_report(found: Found) -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(found.report))))
    assert [int(row["users"]) for row in rows] == [1, 2, 4, 8, 16]
    for row, level in zip(rows, found.report.levels):
        assert level.summary.ttft is not None
        assert float(row["ttft_p50_s"]) == level.summary.ttft.median
        assert float(row["throughput_tokens_per_s"]) == level.summary.throughput
        assert int(row["failed"]) == level.summary.failed


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t"])
def test_csv_gives_a_spreadsheet_no_formula(found: Found, start: str) -> None:
    report = replace(found.report, model=start + "1+1")
    [row, *_] = csv.DictReader(io.StringIO(to_csv(report)))
    assert row["model"] == f"'{start}1+1"


@given(st.text())
def test_no_text_ends_a_cell_of_a_markdown_table(text: str) -> None:
    cell = markdown_cell(text)
    assert "\n" not in cell
    assert not re.search(r"(?<!\\)(?:\\\\)*[|`<>*\[]", cell)


def test_markdown_has_a_row_per_load_and_says_what_the_numbers_mean(found: Found) -> None:
    text = to_markdown(found.report)
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 5
    assert len({line.replace("\\|", "").count("|") for line in table}) == 1
    assert METRICS["ttft"].text in text


class Reader(HTMLParser):
    """Elements, attributes and text of a page; checks that what is opened is closed."""

    VOID = frozenset({"meta", "br", "img", "input", "link", "hr"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_asks_for_nothing_and_runs_nothing_whatever_names_say(found: Found, hostile: Found) -> None:
    for each in (found, hostile):
        page = to_html(each)
        reader = Reader(page)
        tags = {tag for tag, _ in reader.elements}
        assert not tags & {
            "script",
            "img",
            "link",
            "iframe",
            "object",
            "embed",
            "a",
            "base",
            "form",
            "image",
            "use",
        }
        names = {name for _, attributes in reader.elements for name in attributes}
        assert not {name for name in names if name.startswith("on") or name in ("src", "href", "xlink:href")}
        style = page[page.index("<style>") : page.index("</style>")]
        assert "url(" not in style
        assert "@import" not in style
    assert HOSTILE.split("\n")[0] in "".join(Reader(to_html(hostile)).texts)


def test_charts_can_be_read_without_being_seen(found: Found) -> None:
    page = to_html(found)
    reader = Reader(page)
    figures = page.count("<figure")
    assert figures == 7
    images = [attributes for tag, attributes in reader.elements if tag == "svg"]
    ids = [attributes["id"] for _, attributes in reader.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for attributes in images:
        assert attributes["role"] == "img"
        assert set((attributes["aria-labelledby"] or "").split()) <= set(ids)
    assert page.count("As a table") == figures
    for heading in ("TTFT against load", "ITL against load", "Throughput against load",
                    "Distribution of TTFT", "Distribution of ITL", "Worst gap of each request",
                    "The first 40 requests"):  # fmt: skip
        assert heading in page
    assert "limit: first token &lt; 500 ms" in page


def test_nothing_is_drawn_outside_of_its_chart(found: Found) -> None:
    for svg in re.findall(r'<svg viewBox="0 0 (\d+) (\d+)"(.*?)</svg>', to_html(found), re.S):
        width, height, body = int(svg[0]), int(svg[1]), svg[2]
        for path in re.findall(r'd="([^"]+)"', body):
            numbers = [
                float(each) for each in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path) for each in each
            ]
            assert all(0 <= x <= width for x in numbers[::2])
            assert all(0 <= y <= height for y in numbers[1::2])
        assert "nan" not in body
        assert "inf" not in body.replace("inference", "")


def test_an_open_loops_charts_are_drawn_against_its_rate(tmp_path: Path) -> None:
    page = to_html(recompute(write_run(tmp_path / "r.jsonl", users=(), rates=(2, 4, 8))))
    assert "requests per second, due" in page
    assert "users at once" not in page


def test_one_request_is_enough_for_a_page(tmp_path: Path) -> None:
    with RunFile(tmp_path / "a.jsonl") as file:
        file(answer(0, 0.0, tokens=1))
        file.load(Outcome("one user", Concurrent(1, 1), 0.0, 1.0))
    assert "one user" in to_html(recompute(tmp_path / "a.jsonl"))


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_any_sane_run_has_a_report_in_every_form(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("any") / "a.jsonl"
    times = st.floats(0, 1e4)
    with RunFile(path, About(limits=["ttft=500ms", "itl=50ms:p99", "speed=20"])) as file:
        for load in data.draw(
            st.lists(st.sampled_from([Concurrent(1, 1), Concurrent(3, 1), Rate(2.0, 1)]), max_size=3)
        ):
            for number in range(data.draw(st.integers(0, 4))):
                made = answer(number, data.draw(times), phase=str(load), ttft=data.draw(times),
                              gap=data.draw(st.sampled_from([0.0, 1e-7, 0.01, 100.0])),
                              tokens=data.draw(st.integers(0, 5)))  # fmt: skip
                if data.draw(st.booleans()):
                    made.failure = Failure("timeout", "slow")
                if data.draw(st.booleans()):
                    made.done = made.sent = None
                file(made)
            edges = sorted(data.draw(st.tuples(times, times)))
            window = Window(*edges) if data.draw(st.booleans()) else None
            file.load(Outcome(str(load), load, 0.0, 1.0, window))
    found = recompute(path)
    Reader(to_html(found))
    assert len(to_csv(found.report).splitlines()) == 1 + len(found.report.levels)
    assert json.loads(to_json(found.report))["schema"] == "chabok.report/1"
    assert to_markdown(found.report).strip()
    kept = [each for each in found.samples for each in each.itl]
    assert all(np.isfinite(each).all() for each in kept)


def test_a_timeline_given_as_a_run_needs_no_loads(tmp_path: Path) -> None:
    with RunFile(tmp_path / "a.jsonl") as file:
        for number in range(6):
            file(answer(number, number // 2 * 1.0, phase="mine"))
    [level] = recompute(tmp_path / "a.jsonl").report.levels
    assert (level.load, level.users, level.summary.requests) == ("mine", 2, 6)


def test_a_report_of_another_schema_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"schema": "chabok.report/9"}')
    with pytest.raises(MeasureError, match="schema"):
        read_report(tmp_path / "a.json")
