"""Questions with known answers, from one's own file: a JSON object per line.

``prompt`` (text) or ``messages`` (as in a chat), and just one way to tell whether an answer is right:

    {"prompt": "...", "choices": ["red", "green"], "answer": 1}      answer: the place from 0, or the text
    {"prompt": "...", "exact": "Tehran"}                             or a list, one of which it has to be
    {"prompt": "...", "contains": ["Rumi", "مولانا"]}                one of them is in the answer
    {"prompt": "...", "regex": "\\\\b42\\\\b"}                           matches somewhere in the answer
    {"prompt": "...", "number": 42, "tolerance": 0.5}                the last number of the answer
    {"prompt": "...", "json_schema": {"type": "object"}}             the answer is JSON and valid under it

``id``, ``max_tokens`` and ``system`` may be given, ``labels`` (other letters for choices) and ``decimal``
(","), too; other fields are left alone. A line that is broken is named, the rest is read.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from chabok.choose.quality import pattern
from chabok.choose.quality.schema import Schema
from chabok.errors import ChabokError

WAYS = ("choices", "exact", "contains", "regex", "number", "json_schema")
FIELDS = (
    *WAYS,
    "prompt",
    "messages",
    "id",
    "max_tokens",
    "system",
    "labels",
    "decimal",
    "answer",
    "tolerance",
)
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
LONGEST_LINE = 1 << 24
Normalisation = Literal["characters", "none"]


@dataclass(frozen=True, slots=True)
class Question:
    """A question, and how its answer is judged: just one of the ways is given.

    way: which one. messages: what a chat model is asked. context: what a choice goes on from, when choices
    are rated by their probability; contexts: one per choice, where they differ. continuations: the choices as
    they go on, their space included. normalise: probability per character, or as it is. raw: continue the
    context, without a chat. answer: place of the right choice.
    """

    id: str
    way: str
    messages: tuple[Mapping[str, Any], ...]
    choices: tuple[str, ...] = ()
    answer: int = -1
    labels: tuple[str, ...] = ()
    context: str = ""
    contexts: tuple[str, ...] = ()
    continuations: tuple[str, ...] = ()
    normalise: Normalisation = "characters"
    texts: tuple[str, ...] = ()
    regex: str = ""
    number: float = math.nan
    tolerance: float = 0.0
    decimal: str = "."
    schema: Any = None
    max_tokens: int = 0
    raw: bool = False

    @property
    def limit(self) -> int:
        """Most tokens of the answer."""
        return self.max_tokens or (16 if self.way == "choices" else 256)


@dataclass(slots=True)
class Questions:
    """A set of questions. name: for people. broken: lines that are none, and why. source: where from."""

    name: str
    questions: list[Question] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    source: str = ""

    def __len__(self) -> int:
        return len(self.questions)

    def __iter__(self) -> Iterator[Question]:
        return iter(self.questions)

    def some(self, limit: int | None, seed: int = 0) -> Questions:
        """So many of them, drawn by the seed, in their order; the same for everyone who is asked."""
        if limit is None or limit >= len(self.questions):
            return self
        places = sorted(random.Random(f"{seed}:questions").sample(range(len(self.questions)), limit))
        return Questions(self.name, [self.questions[place] for place in places], self.broken, self.source)


def read_questions(path: str | os.PathLike[str]) -> Questions:
    """The questions of a file; broken lines are in ``broken``. ChabokError: there is no question in it."""
    name = os.path.basename(os.fspath(path))
    found = Questions(name, source=os.fspath(path))
    seen: set[str] = set()
    try:
        with open(path, "rb") as file:
            number = 0
            while line := file.readline(LONGEST_LINE):
                number += 1
                if not line.strip():
                    continue
                try:
                    question = question_of(_decoded(line), f"{name}:{number}")
                    if question.id in seen:
                        raise ValueError(f"the id {question.id!r:.60} is there already")
                except ValueError as error:
                    found.broken.append(f"{name}, line {number}: {error}")
                    continue
                seen.add(question.id)
                found.questions.append(question)
    except OSError as error:
        raise ChabokError(f"{os.fspath(path)}: questions cannot be read: {error.strerror or error}") from None
    if not found.questions:
        why = f" ({found.broken[0]})" if found.broken else ""
        raise ChabokError(
            f"{os.fspath(path)}: there is no question in it{why}; it takes a JSON object per line"
        )
    return found


def _decoded(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise ValueError(f"this is no JSON: {error.msg} (column {error.colno})") from None
    except (UnicodeDecodeError, RecursionError, ValueError) as error:
        raise ValueError(f"this is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("a question is a JSON object")
    return found


def question_of(line: Mapping[str, Any], name: str = "") -> Question:
    """A question from its fields; ValueError says what is wrong. name: its id, if it has none."""
    ways = [way for way in WAYS if line.get(way) is not None]
    if len(ways) != 1:
        near = [n for key in line if key not in FIELDS for n in difflib.get_close_matches(key, WAYS, 1)]
        hint = f"; did you mean {near[0]}?" if near and not ways else ""
        has = f"it has {' and '.join(ways)}" if ways else "it has none"
        raise ValueError(f"a question needs just one of {', '.join(WAYS)}; {has}{hint}")
    way = ways[0]
    messages = _messages(line)
    found: dict[str, Any] = {}
    if way == "choices":
        found = _choices(line, messages)
        messages = found.pop("messages")
    elif way in ("exact", "contains"):
        found["texts"] = _texts(line[way], way)
    elif way == "regex":
        found["regex"] = _text(line["regex"], "regex")
        pattern.check(found["regex"])
    elif way == "number":
        found["number"] = _finite(line["number"], "number")
        found["tolerance"] = _finite(line.get("tolerance", 0.0), "tolerance")
        if found["tolerance"] < 0:
            raise ValueError("tolerance must be 0 or more")
        found["decimal"] = line.get("decimal", ".")
        if found["decimal"] not in (".", ","):
            raise ValueError(f'decimal must be "." or ",", not {found["decimal"]!r:.60}')
    else:
        Schema(line["json_schema"])
        found["schema"] = line["json_schema"]
    tokens = line.get("max_tokens", 0)
    if isinstance(tokens, bool) or not isinstance(tokens, int) or not 0 <= tokens <= 1_000_000:
        raise ValueError(f"max_tokens must be an integer from 1, not {tokens!r:.60}")
    identity = line.get("id", name)
    return Question(str(identity), way, messages, max_tokens=tokens, **found)


def _messages(line: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    prompt, messages, system = line.get("prompt"), line.get("messages"), line.get("system")
    if (prompt is None) == (messages is None):
        raise ValueError("a question needs one of prompt and messages")
    if prompt is not None:
        messages = [{"role": "user", "content": _text(prompt, "prompt")}]
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list of {role, content}")
    for each in messages:
        if (
            not isinstance(each, dict)
            or not isinstance(each.get("role"), str)
            or not isinstance(each.get("content"), str)
        ):
            raise ValueError("messages must be a list of {role, content}, both texts")
    if system is not None:
        messages = [{"role": "system", "content": _text(system, "system")}, *messages]
    return tuple(messages)


def _choices(line: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    choices = line["choices"]
    if (
        not isinstance(choices, list)
        or len(choices) < 2
        or not all(isinstance(x, str) and x.strip() for x in choices)
    ):
        raise ValueError("choices must be two texts or more")
    labels = line.get("labels") or list(LETTERS[: len(choices)])
    if not isinstance(labels, list) or len(labels) != len(choices) or len({*map(str, labels)}) != len(labels):
        raise ValueError("labels must be as many different texts as there are choices; there are 26 letters")
    answer = line.get("answer")
    place = -1
    if isinstance(answer, int) and not isinstance(answer, bool):
        place = answer
    elif isinstance(answer, str) and choices.count(answer) == 1:
        place = choices.index(answer)
    elif isinstance(answer, str) and answer in labels:
        place = labels.index(answer)
    if not 0 <= place < len(choices):
        raise ValueError(
            f"answer must be the place (from 0), the label or the text of a choice, not {answer!r:.60}"
        )
    asked = str(messages[-1]["content"])
    context = "\n\n".join(str(each["content"]) for each in messages).rstrip()
    return {
        "choices": tuple(choices),
        "answer": place,
        "labels": tuple(map(str, labels)),
        "context": f"Question: {context}\nAnswer:",
        "continuations": tuple(" " + choice.strip() for choice in choices),
        "messages": (*messages[:-1], {"role": "user", "content": with_choices(asked, choices, labels)}),
    }


def with_choices(asked: str, choices: Sequence[str], labels: Sequence[str]) -> str:
    """The question with its choices, for whoever answers by text."""
    rows = "\n".join(f"{label}. {choice.strip()}" for label, choice in zip(labels, choices))
    return (
        f"{asked.strip()}\n\n{rows}\n\nAnswer with the letter of the right choice alone: {', '.join(labels)}."
    )


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name} must be a text, not {value!r:.60}")
    return value


def _texts(value: Any, name: str) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    if not values:
        raise ValueError(f"{name} must be a text, or a list of them")
    return tuple(_text(each, name) for each in values)


def _finite(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        raise ValueError(f"{name} must be a number, not {value!r:.60}")
    return float(value)
