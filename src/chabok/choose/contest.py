"""Who is compared and at what work, as it lies in a comparison's folder.

plan.json                what is asked of whom; resuming needs it to be the same
1-small/speed.jsonl      the timelines of the speed part, as ``chabok bench`` writes them
1-small/quality.jsonl    a line per question: its id, the answer, the score, the timing
1-small/state.json       what else is known: memory, load time, what failed
compare.json, .html      what all that says; computed from the rest
"""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import msgspec

from chabok.choose.quality import Questions, is_set, read_questions, read_set
from chabok.choose.quality.asking import Answered, Method
from chabok.errors import ChabokError
from chabok.measure.prompts import FromFile, Prompt
from chabok.measure.run import find

SCHEMA = "chabok.compare/1"
FOLDER = "chabok-compare"
Kind = Literal["model", "endpoint", "run"]

EVERYDAY = (
    "Explain in three sentences why the sky is blue.",
    "Write a polite e-mail that moves a meeting from Tuesday to Thursday afternoon.",
    "What are the main differences between a list and a tuple in Python?",
    "Summarize in two sentences: The library will be closed from Monday to Wednesday for repairs. Books that "
    "are due on these days can be returned until Friday. The reading room on the first floor stays open.",
    "Write a SQL query that counts the orders of each customer in a table named orders.",
    "Give me five ideas for a quick dinner with rice and vegetables.",
    "Translate into French: The train to the coast leaves at half past nine.",
    "A shop sells pens at 3 for 2 euros. What do 12 pens cost? Explain briefly.",
)
"""What people ask a model for, in short; the work of the speed part unless there are prompts of one's own."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """One of those that are compared.

    label: its name in tables. target: a local model's name or path, a URL, or a saved run. model: the served
    model, of a URL.
    """

    label: str
    kind: Kind
    target: str
    model: str = ""

    @classmethod
    def of(cls, text: str) -> Contestant:
        """From what is typed: ``smollm2``, ``./model.gguf``, ``http://host:port#model``, ``host:port``, a
        run's file or folder; any of them after ``LABEL=``. ChabokError: it is none of these."""
        label, equals, target = text.partition("=")
        if not equals or not re.fullmatch(r"[\w][\w .-]{0,39}", label) or Path(text).exists():
            label, target = "", text
        if not target.strip():
            raise ChabokError(f"{text!r} names nothing to compare; a model, a URL or a saved run does")
        path = Path(target)
        host, colon, port = target.split("#")[0].partition("/")[0].rpartition(":")
        if "://" in target or (colon and host and port.isdigit() and not path.exists()):
            url, _, model = target.partition("#")
            shown = model.rpartition("/")[2] or re.sub(r"^https?://", "", url).rstrip("/")
            return cls(label or shown, "endpoint", url, model)
        if (path.is_dir() and any(path.glob("*.jsonl"))) or path.suffix in (".jsonl", ".json", ".html"):
            return cls(label or path.stem, "run", str(path))
        return cls(label or (path.stem if path.suffix else path.name) or target, "model", target)


def distinct(contestants: list[Contestant]) -> list[Contestant]:
    """The same with labels that differ: the second ``a`` becomes ``a (2)``."""
    taken: set[str] = set()
    found = []
    for each in contestants:
        label, n = each.label, 2
        while label in taken:
            label, n = f"{each.label} ({n})", n + 1
        taken.add(label)
        found.append(Contestant(label, each.kind, each.target, each.model))
    return found


@dataclass(slots=True)
class Plan:
    """What is asked of everyone. prompts: of the speed part. output_tokens: most of an answer there.

    evals: files or names of sets; digests: of the files, so that a changed one is not mixed up. limit:
    questions of each, drawn by the seed. method: how choices are read.
    """

    contestants: list[Contestant]
    prompts: list[str] = field(default_factory=lambda: list(EVERYDAY))
    output_tokens: int = 256
    evals: list[str] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    limit: int | None = None
    method: Method = "auto"
    seed: int = 0
    schema: str = SCHEMA

    def prompt(self, number: int) -> Prompt:
        """Prompt ``number`` of the speed part."""
        return Prompt(self.prompts[number % len(self.prompts)], None, self.output_tokens)

    def sets(self) -> list[Questions]:
        """The questions, set by set. ChabokError: there is no such file or set."""
        if self.digests and self.digests != digests(self.evals):
            raise ChabokError(
                "the questions were changed since the comparison began; compare in another folder"
            )
        found = [read_set(name) if is_set(name) else read_questions(name) for name in self.evals]
        return [each.some(self.limit, self.seed) for each in found]

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")

    @classmethod
    def read(cls, folder: Path) -> Plan:
        """The plan of a comparison's folder. ChabokError: there is none, or it is damaged."""
        path = folder / "plan.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise ChabokError(
                f"{path}: {error.strerror or error}; a comparison's folder has a plan.json"
            ) from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ChabokError(f"{path} is damaged, or was edited: {error}") from None

    def same_work(self, other: Plan) -> str:
        """Empty if a comparison of the other can be gone on with as this; else the name of what differs."""
        mine, others = asdict(self), asdict(other)
        return next((name for name in mine if mine[name] != others[name]), "")


def digests(evals: list[str]) -> list[str]:
    """SHA-256 of each file of questions; empty for sets by name, and for files that are not there."""
    files = [Path(each) for each in evals]
    return [sha256(path.read_bytes()).hexdigest() if path.is_file() else "" for path in files]


def prompts_of(path: str | os.PathLike[str]) -> list[str]:
    """The prompts of a file, as ``chabok bench --prompts`` reads them."""
    found = FromFile(path)
    return [found(number).text for number in range(len(found))]


@dataclass(slots=True)
class State:
    """What is known of a contestant beside its timelines and answers.

    memory_bytes: most that was resident. load_s: of a local model. speed_done, quality_done: whether that
    part is over. failure: why it could not be measured. notes: what a reader has to know.
    """

    memory_bytes: int | None = None
    load_s: float | None = None
    server: str = ""
    model: str = ""
    speed_done: bool = False
    quality_done: bool = False
    failure: str = ""
    notes: list[str] = field(default_factory=list)


class Place:
    """A contestant's part of the folder."""

    def __init__(self, folder: Path, number: int, contestant: Contestant) -> None:
        """number: from 0."""
        self.contestant = contestant
        safe = re.sub(r"[^\w.-]+", "-", contestant.label).strip("-.") or "x"
        self.folder = folder / f"{number + 1}-{safe[:60]}"

    @property
    def speed(self) -> Path:
        """The run of the speed part: one's own, or that which was saved."""
        return find(self.contestant.target) if self.contestant.kind == "run" else self.folder / "speed.jsonl"

    @property
    def quality(self) -> Path:
        """The answers."""
        if self.contestant.kind != "run":
            return self.folder / "quality.jsonl"
        return self.speed.with_name("quality.jsonl")

    def state(self) -> State:
        """What is known; nothing, where it was never begun or the file is damaged."""
        path = (
            self.speed.with_name("state.json")
            if self.contestant.kind == "run"
            else self.folder / "state.json"
        )
        try:
            return msgspec.json.decode(path.read_bytes(), type=State)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return State()

    @property
    def over(self) -> bool:
        """Whether there is nothing left to measure."""
        state = self.state()
        done = state.speed_done and state.quality_done and not state.failure
        return self.contestant.kind == "run" or done

    def keep(self, state: State) -> None:
        """Write what is known, whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        new = self.folder / "state.json.new"
        new.write_bytes(msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n")
        new.replace(self.folder / "state.json")

    def answers(self) -> list[Answered]:
        """The questions that were asked, the last time each; a line that was cut short is left out."""
        found: dict[tuple[str, str], Answered] = {}
        try:
            with open(self.quality, "rb") as file:
                for line in file:
                    try:
                        each = msgspec.json.decode(line, type=Answered)
                    except (msgspec.MsgspecError, UnicodeDecodeError):
                        continue
                    found[each.set, each.question] = each
        except OSError:
            return []
        return list(found.values())


def encode(line: Any) -> bytes:
    """A line of JSON."""
    return msgspec.json.encode(line) + b"\n"
