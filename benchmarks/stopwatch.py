"""Chabok's stopwatch side by side with guidellm and AIPerf, against servers that know what they sent.

    python benchmarks/stopwatch.py --guidellm ENV/bin/guidellm --aiperf ENV/bin/aiperf --json stopwatch.json

Each of the two is to be installed in an environment of its own (``pip install guidellm``, ``pip install
aiperf``). All three get the same requests, streams and servers, and take turns; numbers are medians over
rounds. Cases:

    ttft error, itl error   a server plays scripts of one token per event after a role-only first event, and
                            writes down when it read the request and wrote each event: median over requests
                            of what the tool says minus what was sent, without sign (``mean``: their mean,
                            which one delay of a busy machine bends). The gap between tokens is
                            (last - first) / (tokens - 1) of a request, as all three report it
    cpu per 1000 requests   CPU seconds of all processes of a tool, from the difference of two runs of
                            different length, so that starting up does not count
    cpu of starting up      what is left of the shorter run without that
    events per second       200 streams of an event each 10 ms, the tool and all its processes on one core:
                            token events divided by the time from the first request to the end of the last

Only Chabok's stopwatch keeps when each event was read, so only it is asked how late that was
(``seen_late_p99_ms``, where the event itself carries when it was written).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.stopwatch_tools import Ran, Tool, Work, aiperf, chabok, guidellm, word
from tests.measure.formats import Answer, Said, openai_chat
from tests.measure.scripted import Script, ScriptedServer

Row = dict[str, Any]
NAMES = ("chabok", "guidellm", "aiperf")
STREAMS, TICK_MS, EVENTS = 200, 10, 200
FAST_TICK_MS = 8  # 25,000 events a second
COST_STREAMS, COST_EVENTS = 32, 64


def script(number: int) -> Script:
    """An answer whose first token and pace are its own."""
    ttft, gap = 40 + 5 * (number % 16), 8 + 2 * (number % 4)
    said = [Said(ttft, "x ")] + [Said(gap, "x ")] * 31
    return openai_chat(Answer(said, {"prompt": 8, "output": 32}))


@contextlib.contextmanager
def firehose(streams: int, tick_ms: int, events: int, core: int | None) -> Iterator[str]:
    """The URL of a server of many streams, on a core of its own."""
    path = Path(__file__).parents[1] / "tests" / "measure" / "firehose.py"
    command = [sys.executable, str(path), str(streams), str(tick_ms), str(events)]
    if core is not None:
        command = ["taskset", "-c", str(core), *command]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


class Bench:
    """Runs the cases with whichever tools are there."""

    def __init__(self, tools: list[Tool], rounds: int, folder: Path, shorter: int) -> None:
        self.tools, self.rounds, self.folder, self.shorter = tools, rounds, folder, shorter
        self.rows: list[Row] = []
        cores = sorted(os.sched_getaffinity(0))
        self.server_core, self.client_core = (cores[0], cores[1]) if len(cores) > 1 else (None, None)

    def row(self, case: str, unit: str, found: dict[str, list[float]], **more: Any) -> None:
        """Add a row of medians; ``best_other``: the better of the others."""
        values = {name: median(found[name]) if found.get(name) else None for name in NAMES}
        ours = values["chabok"]
        others = [value for name, value in values.items() if name != "chabok" and value is not None]
        higher = unit == "events/s"
        best = None if not others else max(others) if higher else min(others)
        row = {"case": case, "unit": unit, "ours": ours}
        row |= {name: values[name] for name in NAMES[1:]} | {"best_other": best}
        if best is not None and ours is not None:
            row["better"] = ours > best if higher else ours < best
        self.rows.append(row | more | {"rounds": found})
        shown = "   ".join(
            f"{name} {'-' if value is None else f'{value:10.3f}'}" for name, value in values.items()
        )
        print(f"{case:28} {shown}   {unit}", flush=True)

    def _turns(self, *works: Work) -> dict[str, list[list[Ran]]]:
        """Each tool does each piece of work in each round, one after the other."""
        found: dict[str, list[list[Ran]]] = {tool.name: [] for tool in self.tools}
        for turn in range(self.rounds):
            for tool in self.tools[turn % len(self.tools) :] + self.tools[: turn % len(self.tools)]:
                found[tool.name].append([tool.run(work) for work in works])
        return found

    def error(self, streams: int) -> None:
        """First token and pace against what was sent."""
        requests = 24 * streams // self.shorter
        found: list[dict[str, list[float]]] = [{tool.name: [] for tool in self.tools} for _ in range(4)]
        server = ScriptedServer()
        try:
            for turn in range(self.rounds):
                for tool in self.tools[turn % len(self.tools) :] + self.tools[: turn % len(self.tools)]:
                    url = server.script(*(script(number) for number in range(requests)))
                    ran = tool.run(Work(url, streams, requests, self.folder / tool.name))
                    off = list(_off(server, url, ran))
                    if len(off) != requests:
                        raise SystemExit(f"{tool.name} tells of {len(off)} requests of {requests}")
                    for place, of in enumerate(zip(*off)):
                        found[place][tool.name].append(median(of) * 1000)
                        found[place + 2][tool.name].append(sum(of) / requests * 1000)
        finally:
            server.close()
        about = {"streams": streams, "requests": requests}
        many = "1 stream" if streams == 1 else f"{streams} streams"
        means = [{name: median(values) for name, values in each.items()} for each in found[2:]]
        self.row(f"ttft error, {many}", "ms", found[0], mean=means[0], **about)
        self.row(f"itl error, {many}", "ms", found[1], mean=means[1], **about)

    def cost(self) -> None:
        """CPU time."""
        few, many = 128 // self.shorter, 1024 // self.shorter
        with firehose(COST_STREAMS, TICK_MS, COST_EVENTS, None) as url:
            works = [Work(url, COST_STREAMS, count, self.folder / "cost") for count in (few, many)]
            found = self._turns(*works)
        per = {
            name: [(long.cpu_s - short.cpu_s) / (many - few) * 1000 for short, long in rounds]
            for name, rounds in found.items()
        }
        start = {
            name: [short.cpu_s - one * few / 1000 for (short, _), one in zip(rounds, per[name])]
            for name, rounds in found.items()
        }
        about = {"streams": COST_STREAMS, "events": COST_EVENTS, "requests": [few, many]}
        self.row("cpu per 1000 requests", "s", per, **about)
        self.row("cpu of starting up", "s", start, **about)

    def speed(self) -> None:
        """Token events on one core."""
        requests = 3 * STREAMS // self.shorter
        with firehose(STREAMS, FAST_TICK_MS, EVENTS, self.server_core) as url:
            found = self._turns(Work(url, STREAMS, requests, self.folder / "speed", self.client_core))
        rates = {
            name: [len(ran.requests) * EVENTS / ran.seconds for (ran,) in rounds]
            for name, rounds in found.items()
        }
        ours = [ran.more for (ran,) in found["chabok"]]
        self.row(
            "events per second, one core",
            "events/s",
            rates,
            streams=STREAMS,
            offered=STREAMS * 1000 / FAST_TICK_MS,
            seen_late_p99_ms=median(each["seen_p99_s"] for each in ours) * 1000,
            sent_late_p99_ms=median(each["lateness_p99_s"] for each in ours) * 1000,
            cpu_share=median(each["cpu_share"] for each in ours),
        )
        late = self.rows[-1]
        print(
            f"{'':28} chabok saw events {late['seen_late_p99_ms']:.2f} ms late at most (p99), with "
            f"{late['cpu_share']:.0%} of the core",
            flush=True,
        )


def _off(server: ScriptedServer, url: str, ran: Ran) -> Iterator[tuple[float, float]]:
    """By how much first token and gap differ from what was sent, per request, seconds."""
    for played in server.played(url):
        if not played.path.endswith("/v1/chat/completions"):
            continue
        content = played.body["messages"][0]["content"]
        told = ran.requests.get(word(content if isinstance(content, str) else content[0]["text"]))
        if told is None:
            continue
        first, last = played.sent[1], played.sent[32]  # the role comes before, finish and usage after
        yield abs(told.ttft_s - (first - played.received)), abs(told.itl_s - (last - first) / 31)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--guidellm", default="guidellm", metavar="COMMAND", help="guidellm's command")
    parser.add_argument("--aiperf", default="aiperf", metavar="COMMAND", help="AIPerf's command")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a quarter of the requests")
    parser.add_argument("--cases", default="error,cost,speed", help="error, cost, speed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to a file")
    options = parser.parse_args()
    tools, missing = [chabok()], []
    for name, make in (("guidellm", guidellm), ("aiperf", aiperf)):
        program = shutil.which(getattr(options, name))
        if program is None:
            missing.append(name)
            print(
                f"{name} is not there ({getattr(options, name)}): its column stays empty. "
                f"`pip install {name}` in an environment of its own, then --{name} ENV/bin/{name}",
                file=sys.stderr,
            )
        else:
            tools.append(make(str(Path(program).absolute())))
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: what a tool leaves behind becomes ours
    cases = options.cases.split(",")
    if unknown := set(cases) - {"error", "cost", "speed"}:
        parser.error(f"there is no case {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(tools, options.rounds, Path(folder), 4 if options.quick else 1)
        if "error" in cases:
            bench.error(1)
            bench.error(4)
        if "cost" in cases:
            bench.cost()
        if "speed" in cases:
            bench.speed()
    if options.json:
        about = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        about |= {"load_average": os.getloadavg()[0], "missing": missing, "rounds": options.rounds}
        options.json.write_text(json.dumps({"about": about, "rows": bench.rows}, indent=1) + "\n")
        print(f"written: {options.json}")
    if missing:
        sys.exit(1)


if __name__ == "__main__":
    main()
