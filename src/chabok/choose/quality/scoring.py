"""Whether an answer is right. Nothing that a model writes is ever executed."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from chabok.choose.quality import pattern
from chabok.choose.quality.normalise import LONGEST, ascii_digits, last_number, normal, words
from chabok.choose.quality.questions import Question
from chabok.choose.quality.schema import Schema

# Repetitions are bounded, so that no answer takes long.
_SAID = (
    r"(?:answer|choice|option|antwort|réponse|respuesta|پاسخ|جواب|گزینه|उत्तर)"
    r"\W{0,9}(?:is|ist|est|es|:)?[\W_]{0,9}"
)
_GOES_ON = re.compile(r"\s{1,9}(?!or\b|and\b|because\b|since\b|as\b)[a-z]")


@dataclass(frozen=True, slots=True)
class Verdict:
    """right: whether it is. answered: whether there is an answer at all; one that cannot be read is wrong,
    and counted apart. read: what was taken as the answer. why: of a judgement that could not be made."""

    right: bool
    answered: bool = True
    read: str = ""
    why: str = ""


def judge(question: Question, answer: str) -> Verdict:
    """Judge an answer that was written."""
    if not answer.strip():
        return Verdict(False, False)
    if question.way == "choices":
        place = chosen(answer, question.labels, question.choices)
        if place is None:
            return Verdict(False, False)
        return Verdict(place == question.answer, read=question.labels[place])
    if question.way == "exact":
        read = normal(answer)
        return Verdict(any(read == normal(text) for text in question.texts), read=read[:200])
    if question.way == "word":
        first = (words(answer) or [""])[0]
        return Verdict(first in {normal(text) for text in question.texts}, read=first)
    if question.way == "contains":
        read = normal(answer)
        return Verdict(any(normal(text) in read for text in question.texts), read="")
    if question.way == "regex":
        try:
            return Verdict(pattern.found(question.regex, answer))
        except pattern.TooSlowError as error:
            return Verdict(False, False, why=str(error))
    if question.way == "number":
        found = last_number(answer, decimal=question.decimal)
        if found is None:
            return Verdict(False, False)
        near = abs(found - question.number) <= question.tolerance + 1e-9 * max(abs(question.number), 1.0)
        return Verdict(near and math.isfinite(found), read=f"{found:.15g}")
    return _json(question, answer)


def chosen(answer: str, labels: Sequence[str], choices: Sequence[str]) -> int | None:
    """The place of the choice that an answer names; None: it names none, or several.

    In this order: the answer is a label ("B", "(b)", "B. green"), is the text of a choice, says "answer is B"
    or the like, has just one label as a capital letter of its own, or has the text of just one choice.
    """
    text = ascii_digits(unicodedata.normalize("NFKC", answer[-LONGEST:])).strip()
    for tag in ("</think>", "</thinking>"):
        text = text.rpartition(tag)[2].strip() or text
    whole = normal(text)
    plain = [normal(label) for label in labels]
    marks = "|".join(re.escape(ascii_digits(unicodedata.normalize("NFKC", label))) for label in labels)
    if whole in plain:
        return plain.index(whole)
    texts = [normal(choice) for choice in choices]
    if texts.count(whole) == 1:
        return texts.index(whole)
    begins = re.match(rf"[\W_]{{0,20}}({marks})(?=\s{{0,9}}[.):\]*،:]|\s{{0,9}}$)", text)
    if begins:
        return plain.index(normal(begins.group(1)))
    named = {plain.index(normal(each)) for each in _labels(_SAID + rf"({marks})(?![\w])", text)}
    if len(named) == 1:
        return named.pop()
    alone = _labels(rf"(?<![\w'’])({marks})(?![\w'’])", text, 0)
    named = {plain.index(normal(each)) for each in alone}
    if len(named) == 1:
        return named.pop()
    # Of choices within each other ("red", "dark red"), the longest that is there counts.
    held = [place for place, choice in enumerate(texts) if choice and choice in whole]
    held = [
        p for p in held if not any(p != q and texts[p] in texts[q] and texts[p] != texts[q] for q in held)
    ]
    return held[0] if len(held) == 1 else None


def _labels(search: str, text: str, flags: int = re.IGNORECASE) -> list[str]:
    """The labels that a pattern finds. "A" and "I" are words, too: they count where no sentence goes on."""
    found = re.finditer(search, text, flags)
    return [
        match.group(1)
        for match in found
        if match.group(1) not in ("A", "a", "I", "i") or not _GOES_ON.match(text, match.end())
    ]


def _json(question: Question, answer: str) -> Verdict:
    text = answer.rpartition("</think>")[2].strip()
    fenced = re.search(r"```(?:json)?\s*\n(.*?)```", text, re.DOTALL)
    text = fenced.group(1).strip() if fenced else text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return Verdict(False, False)
    return Verdict(Schema(question.schema).accepts(value), read=text[:200])
