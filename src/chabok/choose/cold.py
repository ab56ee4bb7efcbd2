"""What a first request costs, by stage, and what removes it: each stage is measured with and without.

A local model is started in fresh processes: with an empty cache, with compiled kernels only, with packed
weights only, and with both; differences between these starts are what compiling and packing cost. A model
that stays loaded answers in the same process. The file itself is in the operating system's memory in all of
these; reading it from a cold disk comes on top.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from chabok.errors import RequestError, ResourceError

STAGES = ("process start", "import", "load", "compile kernels", "pack weights", "first prompt")
LONGEST_S = 1800.0
"""After which a start is given up."""

_PROBE = """
import json, sys, time
began = time.time()
import chabok
from chabok import LLM, SamplingParams
imported = time.time()
ask = json.loads(sys.argv[1])
llm = LLM(ask["model"], threads=ask["threads"], prefix_disk=ask["prefix_disk"])
loaded = time.time()
def first(text):
    at = time.perf_counter()
    done = llm.generate(text, SamplingParams(max_tokens=1))
    return time.perf_counter() - at, done.timings.prompt_tokens, done.timings.cached_tokens
answers = [first(text) for text in ask["prompts"]]
print(json.dumps({"began": began, "imported": imported, "loaded": loaded, "answers": answers}), flush=True)
llm.close()
"""


@dataclass(frozen=True, slots=True)
class Start:
    """One way to begin: seconds by stage until the first token. name: never before, kernels only, packed
    weights only, warm, or hot (loaded already)."""

    name: str
    stages: dict[str, float]

    @property
    def seconds(self) -> float:
        """From the beginning to the first token."""
        return sum(self.stages.values())


@dataclass(frozen=True, slots=True)
class Remedy:
    """What removes a cost: seconds to the first token without it, and with it, both measured. how: what to
    do."""

    name: str
    before_s: float
    after_s: float
    how: str

    @property
    def saved_s(self) -> float:
        """What it brings; below zero where it costs."""
        return self.before_s - self.after_s


@dataclass(frozen=True)
class ColdReport:
    """What ``chabok cold`` found. starts: the coldest first. rounds: how often each was measured; seconds are
    medians. prompt_tokens: of the first prompt; long_prompt_tokens: of that of the prefix cache."""

    target: str
    starts: tuple[Start, ...]
    remedies: tuple[Remedy, ...]
    rounds: int
    prompt_tokens: int
    long_prompt_tokens: int = 0
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "schema": "chabok.cold/1",
            "target": self.target,
            "starts": [
                {"name": each.name, "seconds": each.seconds, "stages": each.stages} for each in self.starts
            ],
            "remedies": [{**asdict(each), "saved_s": each.saved_s} for each in self.remedies],
            "rounds": self.rounds,
            "prompt_tokens": self.prompt_tokens,
            "long_prompt_tokens": self.long_prompt_tokens,
            "notes": list(self.notes),
        }

    def _repr_html_(self) -> str:
        from chabok.choose.sheet import table
        from chabok.measure.report.numbers import seconds

        names = list(dict.fromkeys(name for each in self.starts for name in each.stages))
        rows = [
            [each.name, *(seconds(each.stages.get(name)) for name in names), seconds(each.seconds)]
            for each in self.starts
        ]
        fixes = [
            [each.name, seconds(each.before_s), seconds(each.after_s), each.how] for each in self.remedies
        ]
        return table(["Start", *names, "First token"], rows) + table(
            ["Remedy", "Without", "With", "How"], fixes
        )


@dataclass(frozen=True, slots=True)
class _Times:
    """What one process told; seconds. answers: seconds, prompt tokens and cached tokens of each prompt."""

    start_s: float
    import_s: float
    load_s: float
    answers: tuple[tuple[float, int, int], ...]

    @property
    def total_s(self) -> float:
        return self.start_s + self.import_s + self.load_s + self.answers[0][0]


def local(
    model: str | os.PathLike[str],
    *,
    rounds: int = 3,
    prompt: str = "Name three rivers of Europe.",
    long_words: int = 400,
    threads: int | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> ColdReport:
    """Measure a local model. rounds: of each start. long_words: of the prompt whose prefix is kept on disk.
    tell: is told what is being done. SourceError: there is no such model here; ResourceError: a start failed.
    """
    from chabok.checkpoints import sources
    from chabok.checkpoints.paths import cache_dir

    if rounds < 1:
        raise RequestError(f"rounds is {rounds}; it must be at least 1", "rounds")
    path = sources.find(os.fspath(model))
    if path is None:
        raise sources.unknown(os.fspath(model))
    other = f"Another question: {prompt}"
    long = _long(min(long_words, _room(path)))
    with tempfile.TemporaryDirectory(prefix="chabok-cold-") as folder:
        full = Path(folder) / "full"

        def begin(cache: Path, prompts: Sequence[str], disk: bool = False) -> _Times:
            return _start(path, cache, prompts, threads, disk)

        kinds: dict[str, list[_Times]] = {}
        for number in range(rounds):
            tell(f"round {number + 1} of {rounds}: never before (empty cache)")
            empty = Path(folder) / f"empty-{number}"
            kinds.setdefault("never before", []).append(begin(empty, [prompt]))
            if not full.exists():
                empty.rename(full)
            else:
                shutil.rmtree(empty, ignore_errors=True)
            for name, kept in (("kernels kept", "kernels"), ("weights packed", "packed")):
                tell(f"round {number + 1} of {rounds}: {name}")
                part = Path(folder) / f"{kept}-{number}"
                _copy(full, part, kept)
                kinds.setdefault(name, []).append(begin(part, [prompt]))
                shutil.rmtree(part, ignore_errors=True)
            tell(f"round {number + 1} of {rounds}: warm")
            kinds.setdefault("warm", []).append(begin(full, [prompt, other]))
        tell("a long prompt, and the same after a restart")
        plain = [begin(full, [long]) for _ in range(rounds)]
        begin(full, [long, long], disk=True)
        kept_on_disk = [begin(full, [long], disk=True) for _ in range(rounds)]
    return _report(str(path), kinds, plain, kept_on_disk, rounds, cache_dir())


def _report(
    target: str,
    kinds: dict[str, list[_Times]],
    plain: list[_Times],
    on_disk: list[_Times],
    rounds: int,
    cache: Path,
) -> ColdReport:
    def load(name: str) -> float:
        return median(each.load_s for each in kinds[name])

    def total(name: str) -> float:
        return median(each.total_s for each in kinds[name])

    warm = load("warm")
    # What a start costs more for want of something is what making that costs.
    compiling = max(load("weights packed") - warm, 0.0)
    packing = max(load("kernels kept") - warm, 0.0)
    starts = []
    for name in ("never before", "kernels kept", "weights packed", "warm"):
        times = kinds[name]
        extra: dict[str, float] = {}
        above = max(load(name) - warm, 0.0)
        if name == "never before" and compiling + packing > 0:
            # Both at once may take less than one after the other: shared out in proportion.
            extra = {"compile kernels": above * compiling / (compiling + packing),
                     "pack weights": above * packing / (compiling + packing)}  # fmt: skip
        elif name == "kernels kept":
            extra = {"pack weights": packing}
        elif name == "weights packed":
            extra = {"compile kernels": compiling}
        stages = {
            "process start": median(each.start_s for each in times),
            "import": median(each.import_s for each in times),
            "load": load(name) - sum(extra.values()),
            **extra,
            "first prompt": median(each.answers[0][0] for each in times),
        }
        starts.append(Start(name, stages))
    hot = median(each.answers[1][0] for each in kinds["warm"])
    starts.append(Start("hot (preloaded)", {"first prompt": hot}))
    long_before = median(each.answers[0][0] for each in plain)
    long_after = median(each.answers[0][0] for each in on_disk)
    remedies = (
        Remedy("compiled kernels kept", total("weights packed"), total("warm"),
               f"kept by themselves in {cache}; keep that folder, also in containers"),
        Remedy("packed weights kept", total("kernels kept"), total("warm"),
               "the first run keeps them (pack=True); `chabok pull`, then one run, before it counts"),
        Remedy("preload", total("warm"), hot,
               "`chabok serve MODEL` loads it before the first request, and keeps it loaded"),
        Remedy("prefix cache on disk", long_before, long_after,
               "on in `chabok serve`; LLM(prefix_disk=True): long prompts are warm after a restart"),
    )  # fmt: skip
    notes = []
    if not any(each.answers[0][2] for each in on_disk):
        notes.append("after the restart nothing of the long prompt came from the prefix cache on disk")
    return ColdReport(
        target,
        tuple(starts),
        remedies,
        rounds,
        kinds["warm"][0].answers[0][1],
        plain[0].answers[0][1],
        tuple(notes),
    )


def _start(path: Path, cache: Path, prompts: Sequence[str], threads: int | None, disk: bool) -> _Times:
    ask = {
        "model": str(path),
        "threads": threads,
        "prefix_disk": disk,
        "prompts": prompts,
    }
    from time import time

    began = time()
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE, json.dumps(ask)],
            env={**os.environ, "CHABOK_CACHE": str(cache)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ResourceError(f"starting {path} took longer than {LONGEST_S:.0f} s and was given up") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ResourceError(f"starting {path} failed: {last}")
    told = json.loads(done.stdout.strip().splitlines()[-1])
    return _Times(
        max(told["began"] - began, 0.0),
        told["imported"] - told["began"],
        told["loaded"] - told["imported"],
        tuple((seconds, tokens, cached) for seconds, tokens, cached in told["answers"]),
    )


def _copy(full: Path, part: Path, kept: str) -> None:
    """A cache that holds only one of the folders of another."""
    part.mkdir(parents=True)
    source = full / kept
    if source.exists():
        shutil.copytree(source, part / kept, symlinks=True)


def _room(path: Path) -> int:
    """Words that surely fit into the model's context, at a token for each of their letters."""
    from chabok.checkpoints.gguf import GGUF

    gguf = GGUF.open(path)
    return max((gguf.get(f"{gguf.architecture}.context_length", int, 2048) - 32) // 8, 1)


def _long(words: int) -> str:
    """A text of so many words, as a system prompt might be."""
    rules = "Answer politely, name your sources, keep to the point, and say so where you do not know. "
    text = (rules * (words // 16 + 1)).split()
    return " ".join(text[: max(words, 1)])


async def endpoint(
    url: str,
    *,
    idle_s: float = 0.0,
    rounds: int = 1,
    tell: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> ColdReport:
    """Measure an endpoint: the first request after ``idle_s`` seconds without any, and one right after it.

    What the server says of loading (``load_ms``, Ollama's load_duration) is a stage of its own; the rest of
    the difference is not explained by the server. options: as of ``chabok.measure.detect``. MeasureError:
    nothing answers there, or no request succeeded.
    """
    import asyncio

    from chabok.measure import Timeline, detect, measure
    from chabok.measure.failures import MeasureError

    if not (rounds >= 1 and 0 <= idle_s < 1e6):
        raise RequestError("rounds must be at least 1, and the wait from 0 to 1000000 seconds")
    target = await detect(url, **options)
    firsts: list[dict[str, float]] = []
    seconds_: list[float] = []
    tokens = 0
    for number in range(rounds):
        if idle_s:
            tell(f"round {number + 1} of {rounds}: waiting {idle_s:g} s without a request")
            await asyncio.sleep(idle_s)
        tell(f"round {number + 1} of {rounds}: the first request, and another")
        async with target.client() as client:
            began = perf_counter()
            found = []
            for place in range(2):
                # Different from the first word on, so that no cache of prefixes helps the second.
                words = f"{'Alpha' if place else 'Omega'} {number} {began}: name three rivers of Europe."
                at = perf_counter() - began
                found.append(await target.time(client, target.ask(words, 8), Timeline(place, at), began))
        requests = [measure(each) for each in found]
        bad = next((each for each in found if not each.ok), None)
        if bad is not None or not all(each.ok for each in requests):
            said = bad.failure.message if bad is not None and bad.failure else "an answer without a token"
            raise MeasureError(f"{target.url}: {said}")
        first, second = requests[0].ttft_s or 0.0, requests[1].ttft_s or 0.0
        loads = found[0].server.load_ms if found[0].server is not None else None
        load = min((loads or 0.0) / 1000, first)
        connect = min(found[0].connect_s, first - load)
        usual = min(second, first - load - connect)
        stages = {"connect": connect, "load (server says)": load, "usual first token": usual}
        firsts.append({**stages, "not explained": max(first - load - connect - usual, 0.0)})
        seconds_.append(second)
        tokens = found[0].usage.prompt_tokens or 0
    cold = {name: median(each[name] for each in firsts) for name in firsts[0]}
    name = f"after {idle_s:g} s idle" if idle_s else "first request"
    starts = (Start(name, cold), Start("right after", {"usual first token": median(seconds_)}))
    how = "keep it loaded: `keep_alive` of Ollama, `chabok serve MODEL`, a replica always on"
    remedy = Remedy("keep-alive", starts[0].seconds, starts[1].seconds, how)
    notes = [] if idle_s else ["the endpoint may have been warm already: --idle S waits first"]
    if cold["load (server says)"] == 0 and cold["not explained"] < 0.2 * starts[1].seconds:
        notes.append("no cold start was seen: the model was still loaded")
    return ColdReport(target.url, starts, (remedy,), rounds, tokens, notes=tuple(notes))
