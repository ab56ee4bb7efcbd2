"""Compares models and endpoints at the same work, one after the other, and says which is for which need."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from chabok.choose.contest import FOLDER, Contestant, Place, Plan, State, digests, distinct
from chabok.choose.member import Member, member_of
from chabok.choose.pareto import Limit, front
from chabok.choose.quality.asking import Method
from chabok.choose.quality.statistics import Paired, paired
from chabok.errors import ChabokError
from chabok.measure.cost import Price

Progress = Callable[[str, str, int, int], None]
"""Hears of each step: a label, what is being done, how much is done, of how much (0: not known)."""

AXES = (("answer_s", "time to the whole answer", 1), ("cost", "cost", 1), ("share", "quality", -1))
"""What the Pareto front is about: attribute, name, and 1 where less is better."""


_NAMES = {
    "digests": "content of the questions",
    "contestants": "list of targets",
    "evals": "list of questions",
}


@dataclass(slots=True)
class Comparison:
    """What was found.

    members: in the order asked. front: labels of those that no other is as good as in every axis and better
    in one. axes: what the front is about; left_out: what it could not be about, and why. pairs: on the same
    questions. crossed: label -> limits of the budget that it does not keep, with what it has. best: label of
    the best quality within the budget (the fastest, where there is no quality); None: nothing fits, or there
    is no budget. sentences: what to choose for which need. broken: lines of questions that are none.
    """

    folder: str
    members: list[Member]
    plan: Plan
    front: list[str] = field(default_factory=list)
    axes: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    pairs: list[Paired] = field(default_factory=list)
    budget: list[str] = field(default_factory=list)
    crossed: dict[str, list[str]] = field(default_factory=dict)
    best: str | None = None
    sentences: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    complete: bool = False

    def __getitem__(self, label: str) -> Member:
        """A member by its label."""
        for member in self.members:
            if member.label == label:
                return member
        raise KeyError(label)

    def to_dict(self) -> dict[str, Any]:
        """As plain data, ready for JSON."""
        found = msgspec.to_builtins(asdict(self))
        assert isinstance(found, dict)
        return found

    def to_html(self) -> str:
        """The whole report as one page."""
        from chabok.choose.page import to_html

        return to_html(self)

    def figure(self) -> str:
        """The chart of the front as SVG."""
        from chabok.choose.figure import standalone

        return standalone(self)

    def _repr_html_(self) -> str:
        from chabok.choose.page import notebook

        return notebook(self)


def compare(
    *targets: str | Contestant,
    folder: str | Path | None = None,
    prompts: Sequence[str] | None = None,
    output_tokens: int = 256,
    evals: Sequence[str] = (),
    limit: int | None = None,
    method: Method = "auto",
    seed: int = 0,
    budget: Sequence[str | Limit] = (),
    prices: Mapping[str, Price] | Price | None = None,
    memory: Mapping[str, int] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Compare targets at the same work, in turn; what was measured already in ``folder`` is kept.

    targets: see ``Contestant.of``. prompts: of the speed part; everyday ones by default. output_tokens: most
    of an answer there. evals: files of questions, or names of sets; limit: questions of each. method: how
    choices are read (``logprob``, ``text``, or by probability where it is told). prices: of all, or by label.
    memory: bytes by label, where an endpoint's owner knows. options: by label (``""``: of all), what
    ``chabok.measure.detect`` takes: key, headers, extra, dialect, verify, timeout.

    Ctrl-C ends it early; what was measured is in the result, with ``complete`` False, and calling it again
    with the same folder goes on. ChabokError: a target, budget or file of questions is none, or the folder
    holds another comparison.
    """
    contestants = distinct(
        [each if isinstance(each, Contestant) else Contestant.of(each) for each in targets]
    )
    if not contestants:
        raise ChabokError("nothing to compare: name models, URLs or saved runs")
    plan = Plan(
        contestants, output_tokens=output_tokens, evals=list(evals), limit=limit, method=method, seed=seed
    )
    if prompts is not None:
        plan.prompts = list(prompts)
    plan.evals = [str(Path(each).resolve()) if Path(each).is_file() else each for each in plan.evals]
    plan.digests = digests(plan.evals)
    limits = [each if isinstance(each, Limit) else Limit.of(each) for each in budget]
    plan.sets()  # what is wrong with them is said before anything is loaded
    path = prepare(plan, folder)
    stopped = measure(plan, path, options or {}, progress or (lambda *_: None))
    found = conclude(path, limits, prices, memory or {})
    if stopped:
        found.complete = False
        found.notes.insert(0, "stopped by Ctrl-C: this is what was measured until then")
    return found


def prepare(plan: Plan, folder: str | Path | None) -> Path:
    """The folder of a comparison, with its plan; one that is there has to be of the same plan."""
    if folder is None:
        stem = Path(FOLDER) / datetime.now().strftime("%Y-%m-%d-%H%M%S")
        names = [stem, *(stem.with_name(f"{stem.name}-{n}") for n in range(2, 100))]
        folder = next(name for name in names if not name.exists())
    path = Path(folder)
    if (path / "plan.json").exists():
        if other := plan.same_work(Plan.read(path)):
            name = _NAMES.get(other, other.replace("_", " "))
            raise ChabokError(
                f"{path} holds a comparison with another {name}; name another folder, or "
                "go on with that one by --resume"
            )
        return path
    if path.exists() and any(path.iterdir()):
        raise ChabokError(f"{path} is not empty, and no comparison; name another folder")
    path.mkdir(parents=True, exist_ok=True)
    plan.write(path / "plan.json")
    return path


def pending(plan: Plan, folder: Path) -> list[tuple[int, Place]]:
    """Who is not measured yet, or not whole, with the place in the plan. ChabokError: someone is, and the
    questions cannot be read, or were changed."""
    places = [(number, Place(folder, number, each)) for number, each in enumerate(plan.contestants)]
    found = [(number, place) for number, place in places if not place.over]
    if found:
        plan.sets()
    return found


def measure(plan: Plan, folder: Path, options: Mapping[str, Mapping[str, Any]], progress: Progress) -> bool:
    """Measure what is not measured yet; whether it was interrupted."""
    for number, place in pending(plan, folder):
        contestant = place.contestant
        told = {**options.get("", {}), **options.get(contestant.label, {})}
        command = [sys.executable, "-m", "chabok.choose.worker", str(folder), str(number)]
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for us, and passed on once
        ) as child:
            try:
                code, said = _follow(child, json.dumps(told), contestant.label, progress)
            except KeyboardInterrupt:
                child.send_signal(signal.SIGINT)
                try:
                    child.wait(20)
                except subprocess.TimeoutExpired:
                    child.kill()
                return True
            except BaseException:
                child.kill()
                raise
        if code not in (0, 1) or (code == 1 and not place.state().failure):
            place.keep(_died(place.state(), code, said))
        if failure := place.state().failure:
            progress(contestant.label, f"failed: {failure}", 0, 0)
    return False


def _follow(child: subprocess.Popen[bytes], options: str, label: str, progress: Progress) -> tuple[int, str]:
    """Pass on what a worker tells until it ends: its exit code, and the last it said on standard error."""
    from threading import Thread

    stdin, stdout, stderr = child.stdin, child.stdout, child.stderr
    assert stdin is not None
    assert stdout is not None
    assert stderr is not None
    errors: list[bytes] = []
    reader = Thread(target=lambda: errors.append(stderr.read()[-4000:]), daemon=True)
    reader.start()
    try:
        stdin.write(options.encode() + b"\n")
        stdin.close()
    except OSError:
        pass  # it died already; its exit code says so
    for line in stdout:
        try:
            step, done, of = msgspec.json.decode(line, type=tuple[str, int, int])
        except msgspec.MsgspecError:
            continue
        progress(label, step, done, of)
    code = child.wait()
    reader.join(5)
    return code, b"".join(errors).decode("utf-8", "replace").strip()


def _died(state: State, code: int, said: str) -> State:
    last = said.splitlines()[-1] if said else ""
    if code == -signal.SIGKILL:
        last = "it was killed, as the system does where memory is short"
    elif code < 0:
        last = f"it died of signal {-code}"
    state.failure = f"the process that measured it ended unexpectedly: {last or f'exit code {code}'}"
    return state


def conclude(
    folder: str | Path,
    budget: Sequence[Limit] = (),
    prices: Mapping[str, Price] | Price | None = None,
    memory: Mapping[str, int] | None = None,
) -> Comparison:
    """What the raw files of a comparison's folder say; nothing is measured."""
    from chabok.choose.words import sentences

    folder = Path(folder)
    plan = Plan.read(folder)
    places = [Place(folder, number, each) for number, each in enumerate(plan.contestants)]
    by_label = prices if isinstance(prices, Mapping) else {}
    every = prices if isinstance(prices, Price) else by_label.get("")
    members = [
        member_of(
            place,
            plan,
            by_label.get(place.contestant.label, every),
            (memory or {}).get(place.contestant.label),
        )
        for place in places
    ]
    found = Comparison(str(folder), members, plan)
    found.complete = all(member.complete and not member.failure for member in members)
    try:
        found.broken = [line for each in plan.sets() for line in each.broken]
    except ChabokError as error:  # what was answered is on disk all the same
        found.notes.append(f"the questions themselves cannot be looked at: {error}")
    _front(found)
    found.pairs = _pairs(places, members, plan.seed)
    _spend(found, budget)
    found.sentences = sentences(found)
    return found


def _front(found: Comparison) -> None:
    members = [member for member in found.members if member.measured]
    known: list[tuple[str, str, int]] = []
    for attribute, name, sign in AXES:
        without = [member.label for member in members if getattr(member, attribute) is None]
        if not without:
            known.append((attribute, name, sign))
        elif len(without) < len(members):
            found.left_out.append(f"{name}: not known of {', '.join(without)}")
        else:
            found.left_out.append(f"{name}: not known")
    if len({member.currency for member in members if member.cost is not None}) > 1:
        known = [each for each in known if each[0] != "cost"]
        found.left_out.append("cost: the prices are in different currencies")
    found.axes = [name for _, name, _ in known]
    if members and known:
        values = {m.label: [sign * getattr(m, attribute) for attribute, _, sign in known] for m in members}
        good = front(values)
        found.front = [member.label for member in members if member.label in good]


def _pairs(places: Sequence[Place], members: Sequence[Member], seed: int) -> list[Paired]:
    answers = [
        {(each.set, each.question): each.right for each in place.answers() if not each.error}
        for place in places
    ]
    found = []
    for b in range(len(places)):
        for a in range(b):
            shared = [key for key in answers[a] if key in answers[b]]
            if shared:
                right = [[answers[each][key] for key in shared] for each in (a, b)]
                found.append(paired(members[a].label, right[0], members[b].label, right[1], seed=seed))
    return found


def _spend(found: Comparison, budget: Sequence[Limit]) -> None:
    from chabok.choose.words import worth

    found.budget = [limit.text for limit in budget]
    if not budget:
        return
    for member in found.members:
        missed = []
        for limit in budget:
            value = getattr(member, limit.need.attribute)
            if not limit.keeps(value):
                missed.append(f"{limit.text}: {worth(limit.need.attribute, value, member.currency)}")
        if missed:
            found.crossed[member.label] = missed
    fitting = [member for member in found.members if member.measured and member.label not in found.crossed]
    if fitting:
        found.best = max(fitting, key=best_first).label


def best_first(member: Member) -> tuple[float, float]:
    """Sorts by quality, then by the time to an answer: the highest is the best."""
    return (
        -math.inf if member.share is None else member.share,
        -math.inf if member.answer_s is None else -member.answer_s,
    )
