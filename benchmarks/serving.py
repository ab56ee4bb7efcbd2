"""Chabok's server and llama.cpp's side by side: same file, same threads, the same client, taking turns.

    python benchmarks/serving.py --peer-server PEER/bin/llama-server --json serving.json

llama-server must be built for this machine (cmake -DGGML_NATIVE=ON). Both servers are up at the same time,
one of them idle; each number is the median over rounds A B A B. Cases:

    throughput   1, 4, 16, 32 streams at once, each asking again when it is answered, prompts of 128 tokens
                 and answers of 128: output tokens per second over the steady window
    engine       32 sequences of the same shape in the Python API, without HTTP
    stutter      the longest gap of running streams while long prompts arrive: 1 stream and one prompt of
                 4,000 tokens, 8 streams and four of them
    prefix       the first token of a prompt of 2,000 tokens; again with another end; again after a restart
    overhead     the first token of a one-word prompt over HTTP and in the Python API
    idle         CPU time of an idle server
    connections  500 idle connections and 32 streams together: requests lost

Prompts differ from their first word on, but where a prefix is shared on purpose; lengths are exact, found out
by asking each server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import urlopen

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.models import model_path

from chabok.measure import (
    Concurrent,
    Endpoint,
    Prompt,
    Ruler,
    Stopwatch,
    Synthetic,
    Timeline,
    calibrate,
    measure,
    summarize,
)

Row = dict[str, Any]
STREAMS = (1, 4, 16, 32)
PROMPT, ANSWER = 128, 128
LONG, SHARED = 4000, 2000
CONTEXT = 4608
BUDGET_MS = 30
READY_S = 120


@dataclass
class Server:
    """A server under test: how it is started, and the process while it runs."""

    name: str
    command: Callable[[int], list[str]]
    ready: str
    port: int = 0
    process: subprocess.Popen[bytes] | None = None
    ruler: Ruler | None = None

    def start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.process = subprocess.Popen(
            self.command(self.port), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), urlopen(f"{self.url}{self.ready}", timeout=5) as answer:
                if answer.status == 200:
                    return
            if self.process.poll() is not None:
                raise SystemExit(f"{self.name} ended with exit status {self.process.returncode}")
            time.sleep(0.05)
        raise SystemExit(f"{self.name} was not ready within {READY_S} s")

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(60)
            self.process = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint.at(self.url, dialect="openai-completions")

    def cpu_s(self) -> float:
        """CPU time of the process so far."""
        assert self.process is not None
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def words(self) -> Ruler:
        """Which words are one token here; asked once."""
        if self.ruler is None:
            async with self.endpoint.client() as client:
                self.ruler = await calibrate(self.endpoint, client)
            if self.ruler.source != "usage":
                raise SystemExit(f"{self.name} does not tell how long prompts are")
        return self.ruler


class Bench:
    """Runs the cases; ``ours`` and ``peer`` take turns."""

    def __init__(self, ours: Server, peer: Server | None, model: Path, threads: int, rounds: int) -> None:
        self.ours, self.peer = ours, peer
        self.model, self.threads, self.rounds = model, threads, rounds
        self.seed = 0
        self.rows: list[Row] = []

    @property
    def servers(self) -> list[Server]:
        return [self.ours] if self.peer is None else [self.ours, self.peer]

    def row(self, case: str, concurrency: int, unit: str, found: dict[str, list[float]], **more: Any) -> None:
        """Add a row of medians; ``ratio`` is above 1 where Chabok does better."""
        ours = median(found[self.ours.name])
        peer = median(found[self.peer.name]) if self.peer and found.get(self.peer.name) else None
        higher = unit in ("tokens/s", "share")
        ratio = None if not peer or not ours else ours / peer if higher else peer / ours
        row = {"case": case, "concurrency": concurrency, "unit": unit, "ours": ours, "peer": peer}
        row |= {"ratio": ratio, "rounds": found, **more}
        self.rows.append(row)
        shown = "" if peer is None else f"   peer {peer:10.2f}"
        shown += "" if ratio is None else f"   {ratio:6.2f} x"
        print(f"{case:24} {concurrency:4}   {ours:10.2f}{shown}   {unit}", flush=True)

    def fresh(self) -> int:
        """A seed that was not used before: prompts that nobody has cached."""
        self.seed += 1
        return self.seed

    # -- cases

    async def throughput(self, streams: int, waves: int) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {server.name: [] for server in self.servers}
        for _ in range(self.rounds):
            seed = self.fresh()
            for server in self.servers:
                prompts = Synthetic(PROMPT, ANSWER, seed=seed, ruler=await server.words())
                async with Stopwatch(server.endpoint, prompts) as watch:
                    outcome = await watch.run(Concurrent(streams, requests=streams * waves))
                check(outcome.timelines, ANSWER)
                if outcome.client_bound:
                    print(f"  {server.name}: {outcome.client_bound}", file=sys.stderr)
                summary = summarize(outcome.timelines, outcome.window)
                found[server.name].append(summary.throughput or 0.0)
        return found

    async def engine(self, streams: int, waves: int) -> list[float]:
        """The same load in the Python API: each stream asks again when it is answered."""
        worker = str(Path(__file__).parent / "engine_worker.py")
        command = [sys.executable, worker, str(self.model), str(self.threads), str(streams), str(waves)]
        found = []
        for _ in range(self.rounds):
            process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
            out, _ = await process.communicate()
            found.append(float(json.loads(out)["throughput"]))
        return found

    async def stutter(self, streams: int, long_prompts: int) -> dict[str, list[float]]:
        """Worst gap of running streams from the moment long prompts come until they are answered, in ms."""
        found: dict[str, list[float]] = {server.name: [] for server in self.servers}
        for _ in range(self.rounds):
            seed = self.fresh()
            for server in self.servers:
                ruler = await server.words()
                short = Synthetic(16, 3000, seed=seed, ruler=ruler)
                long = Synthetic(LONG, 8, seed=seed + 1000, ruler=ruler)
                found[server.name].append(
                    await worst_gap(server.endpoint, short, long, streams, long_prompts)
                )
        return found

    async def prefix(self) -> dict[str, dict[str, list[float]]]:
        """TTFT in ms: of a long prompt, of one with the same beginning, and of another after a restart."""
        stages = ("first", "second", "restarted")
        found: dict[str, dict[str, list[float]]] = {stage: {} for stage in stages}
        for _ in range(self.rounds):
            seed = self.fresh()
            for server in self.servers:
                ruler = await server.words()
                prompts = Synthetic(SHARED + 32, 8, seed=seed, shared=SHARED, ruler=ruler)
                times = [await first_token(server.endpoint, prompts(number)) for number in (0, 1)]
                server.stop()
                server.start()
                await first_token(server.endpoint, Synthetic(16, 4, seed=seed + 5000, ruler=ruler)(0))
                times.append(await first_token(server.endpoint, prompts(2)))
                for stage, seconds in zip(stages, times, strict=True):
                    found[stage].setdefault(server.name, []).append(1e3 * seconds)
        return found

    async def overhead(self, times: int) -> dict[str, list[float]]:
        """TTFT in ms of a one-word prompt: over HTTP, and in the Python API of a process of its own."""
        worker = str(Path(__file__).parent / "engine_worker.py")
        found: dict[str, list[float]] = {"http": [], "api": []}
        for _ in range(self.rounds):
            command = [sys.executable, worker, str(self.model), str(self.threads), "first", str(times)]
            process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
            out, _ = await process.communicate()
            found["api"].append(1e3 * float(json.loads(out)["first_token_s"]))
            endpoint = self.ours.endpoint
            async with Stopwatch(endpoint, lambda number: Prompt("Hello", 1, 4)) as watch:
                outcome = await watch.run(Concurrent(1, requests=times))
            found["http"].append(1e3 * median(t for each in outcome.timelines if (t := measure(each).ttft_s)))
        return found

    async def connections(self, idle: int, streams: int) -> tuple[int, int]:
        """Requests lost with so many idle connections beside the streams, and idle ones that were closed."""
        open_ones = [await asyncio.open_connection("127.0.0.1", self.ours.port) for _ in range(idle)]
        prompts = Synthetic(PROMPT, ANSWER, seed=self.fresh(), ruler=await self.ours.words())
        async with Stopwatch(self.ours.endpoint, prompts) as watch:
            outcome = await watch.run(Concurrent(streams, requests=streams))
        lost = sum(not each.ok for each in outcome.timelines)
        closed = sum(reader.at_eof() for reader, _ in open_ones)
        for _, writer in open_ones:
            writer.close()
        return lost, closed

    async def idle(self, seconds: float) -> dict[str, list[float]]:
        """CPU share of a core in percent while nothing is asked."""
        await asyncio.sleep(2)
        before = {server.name: server.cpu_s() for server in self.servers}
        await asyncio.sleep(seconds)
        return {s.name: [100 * (s.cpu_s() - before[s.name]) / seconds] for s in self.servers}


def check(timelines: list[Timeline], answer: int) -> None:
    """Refuse to count requests that failed or whose answers are not as long as asked."""
    for timeline in timelines:
        if not timeline.ok:
            raise SystemExit(f"a request failed: {timeline.failure}")
        if (timeline.usage.output_tokens or 0) < answer:
            raise SystemExit(f"an answer has {timeline.usage.output_tokens} tokens, not {answer}")


async def first_token(endpoint: Endpoint, prompt: Prompt) -> float:
    """Seconds to the first token of one request, on a warm connection."""
    async with Stopwatch(endpoint, lambda number: prompt) as watch:
        outcome = await watch.run(Concurrent(1, requests=1))
    found = measure(outcome.timelines[0]).ttft_s
    if found is None:
        raise SystemExit(f"a request failed: {outcome.timelines[0].failure}")
    return found


async def worst_gap(
    endpoint: Endpoint, short: Synthetic, long: Synthetic, streams: int, long_prompts: int
) -> float:
    """Longest gap in ms between token events of ``streams`` answers while long prompts are read."""
    start = time.perf_counter()
    async with endpoint.client() as client:
        await client.warm(streams + long_prompts)

        def ask(prompt: Prompt, number: int) -> tuple[Timeline, Coroutine[Any, Any, Timeline]]:
            timeline = Timeline(number, time.perf_counter() - start)
            request = endpoint.ask(prompt.text, prompt.output_tokens)
            return timeline, endpoint.time(client, request, timeline, start)

        running = [ask(short(number), number) for number in range(streams)]
        tasks = [asyncio.create_task(job) for _, job in running]
        await asyncio.sleep(1.5)  # all are generating
        if any(task.done() for task in tasks):
            raise SystemExit("an answer ended before the long prompts came")
        began = time.perf_counter() - start
        arrivals = [ask(long(number), 100 + number) for number in range(long_prompts)]
        await asyncio.gather(*(job for _, job in arrivals))
        ended = time.perf_counter() - start
        for timeline, _ in arrivals:
            if not timeline.ok:
                raise SystemExit(f"a long prompt failed: {timeline.failure}")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    worst = 0.0
    for timeline, _ in running:
        times = [event.at for event in timeline.events if event.kind == "content"]
        inside = [at for at in times if began <= at <= ended]
        before = max((at for at in times if at < began), default=began)
        worst = max(worst, *(b - a for a, b in pairwise([before, *inside, ended])))
    return 1e3 * worst


async def run(bench: Bench, cases: list[str], quick: bool) -> None:
    waves = 2 if quick else 3
    if "throughput" in cases:
        for streams in STREAMS:
            found = await bench.throughput(streams, max(waves, 4 if streams == 1 else waves))
            bench.row("throughput", streams, "tokens/s", found)
            if streams == STREAMS[-1] and "engine" in cases:
                alone = await bench.engine(streams, waves)
                served = median(found[bench.ours.name])
                share = served / median(alone)
                bench.row("of the engine alone", streams, "share", {bench.ours.name: [share]}, alone=alone)
    if "stutter" in cases:
        for streams, prompts in ((1, 1), (8, 4)):
            found = await bench.stutter(streams, prompts)
            bench.row(f"worst gap, {prompts} x {LONG}", streams, "ms", found, budget_ms=BUDGET_MS)
    if "prefix" in cases:
        stages = await bench.prefix()
        for stage, found in stages.items():
            share = median(found[bench.ours.name]) / median(stages["first"][bench.ours.name])
            bench.row(f"{SHARED} shared: {stage}", 1, "ms", found, share_of_first=share)
    if "overhead" in cases:
        both = await bench.overhead(20 if quick else 50)
        added = [a - b for a, b in zip(both["http"], both["api"], strict=True)]
        bench.row("HTTP adds to first token", 1, "ms", {bench.ours.name: added}, **both)
    if "connections" in cases:
        lost, closed = await bench.connections(500, 32)
        bench.row("lost of 32, 500 idle", 32, "requests", {bench.ours.name: [lost]}, idle_closed=closed)
    if "idle" in cases:
        bench.row("idle", 0, "% of a core", await bench.idle(10))


@contextlib.contextmanager
def running(servers: list[Server]) -> Iterator[None]:
    try:
        for server in servers:
            server.start()
        yield
    finally:
        for server in servers:
            server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    everything = ["throughput", "engine", "stutter", "prefix", "overhead", "connections", "idle"]
    parser.add_argument("--model", type=Path, help="a GGUF file (default: SmolLM2, fetched if need be)")
    parser.add_argument("--peer-server", help="path of llama-server; without it only Chabok is measured")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=everything, default=everything)
    parser.add_argument("--quick", action="store_true", help="fewer requests")
    parser.add_argument("--json", type=Path, help="write rows {case, concurrency, ours, peer, ratio} here")
    options = parser.parse_args()
    model = options.model or model_path("smollm2")
    threads = str(options.threads)
    with tempfile.TemporaryDirectory() as cache:
        # A cache of its own: no prefixes that an earlier run left. Kernels are compiled at the first start.
        os.environ["CHABOK_CACHE"] = cache

        def ours(port: int) -> list[str]:
            return [
                sys.executable, "-m", "chabok", "serve", str(model), "--port", str(port),
                "--threads", threads, "--context", str(CONTEXT), "--itl-budget-ms", str(BUDGET_MS),
            ]  # fmt: skip

        def peer(port: int) -> list[str]:
            return [
                options.peer_server, "-m", str(model), "--port", str(port), "-t", threads, "-tb", threads,
                "-np", "32", "-c", str(32 * 512 + 4 * CONTEXT), "--kv-unified", "--no-ui", "-lv", "0",
            ]  # fmt: skip

        chabok = Server("chabok", ours, "/ready")
        llama = Server("llama.cpp", peer, "/health") if options.peer_server else None
        servers = [chabok] if llama is None else [chabok, llama]
        bench = Bench(chabok, llama, model, options.threads, options.rounds)
        with running(servers):
            asyncio.run(run(bench, options.cases, options.quick))
    if options.json:
        about = {"date": time.strftime("%Y-%m-%d"), "machine": platform.processor() or platform.machine()}
        about |= {"threads": options.threads, "model": model.name, "rounds": options.rounds}
        options.json.write_text(json.dumps({"about": about, "rows": bench.rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
