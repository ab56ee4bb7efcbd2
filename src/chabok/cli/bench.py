"""``chabok bench``: what a server, or a model without one, is like and carries: a verdict from one line."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any

from chabok.cli.params import Parser, add_prices, is_address, positive, whole
from chabok.cli.terminal import console, note
from chabok.errors import RequestError

if TYPE_CHECKING:
    from chabok.measure.bench import Bench, Plan
    from chabok.measure.cost import Price
    from chabok.measure.endpoint import Target
    from chabok.measure.report import Report
    from chabok.measure.schedule import Load


def main(arguments: list[str]) -> int:
    """Run the command; the exit code: 1 if nothing was measured, or every request of a load failed."""
    found = parser().parse_intermixed_args(arguments)
    seed = found.seed if found.seed is not None else int(time()) % 1_000_000
    plan = _plan(found, seed)
    options = _options(found)
    command = _command(arguments, found, seed)
    local = found.target is not None and "://" not in found.target and not is_address(found.target)
    if local:
        from chabok.cli.bench_local import open_model

        with open_model(found.target, quiet=found.quiet or found.json) as model:
            return _measure(model, plan, found, command)
    return _measure(None, plan, found, command, options)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = Parser(
        "chabok bench",
        description="Measure a server of any OpenAI-compatible, Anthropic or Ollama kind, or a model without "
        "a server. Without a target, whatever answers on the usual local ports.",
        allow_abbrev=False,
    )
    add = made.add_argument
    add("target", nargs="?", metavar="TARGET", help="a URL (http://host:port), or the name of a local model")
    add("-m", "--model", default="", help="the served model to ask (default: the first one)")
    add("--dialect", default="", help="the API to speak, where it is not to be found out")
    add("--api-key-env", metavar="NAME", help="the environment variable that holds the API key")
    add("--api-key", metavar="KEY", help="the API key; other users of this machine can see it here")
    add("--header", action="append", default=[], metavar="NAME:VALUE", help="sent with each request")
    add("--extra", action="append", default=[], metavar="FIELD=JSON", help="added to each request's body")
    add("--insecure", action="store_true", help="accept any TLS certificate")
    add("--timeout", type=positive, default=900.0, metavar="S", help="longest time for one answer (900)")
    length = made.add_mutually_exclusive_group()
    length.add_argument("--quick", action="store_true", help="about 20 seconds")
    length.add_argument("--thorough", action="store_true", help="about 5 minutes")
    length.add_argument("--seconds", type=positive, metavar="S", help="about so long; of each load, if given")
    load = made.add_argument_group("loads (default: one user, then more and more up to the knee)")
    load.add_argument("--users", metavar="N,N", help="just so many at once, one load after the other")
    load.add_argument("--rate", metavar="R,R", help="requests per second, due whether or not earlier ended")
    load.add_argument("--ramp", metavar="R-R", help="a rate that rises from one to the other")
    load.add_argument(
        "--trace", type=Path, metavar="FILE", help="replay requests that once came, from JSON lines"
    )
    load.add_argument("--find-rate", action="store_true", help="look for the highest rate within the limits")
    load.add_argument("--pattern", help="of rates: constant, poisson (default), or bursty")
    load.add_argument("--requests", type=whole, metavar="N", help="end each load after so many")
    load.add_argument("--most-users", type=whole, default=64, metavar="N", help="look no further (64)")
    load.add_argument("--slo", action="append", default=[], metavar="LIMIT",
                      help="as ttft=500ms:p95, itl=50ms:p99, speed=20; may be repeated")  # fmt: skip
    text = made.add_argument_group("prompts and answers")
    text.add_argument(
        "--prompt-tokens",
        default="128",
        metavar="N",
        help="or N-M, evenly distributed, or a mix as 64:0.8,2000:0.2 (128)",
    )
    text.add_argument("--output-tokens", metavar="N", help="or N-M (128, fewer if that takes long)")
    text.add_argument(
        "--shared-prefix", type=whole, default=0, metavar="N", help="tokens that are the same in all prompts"
    )
    text.add_argument(
        "--prompts", type=Path, metavar="FILE", help="one per line, as text or JSON {prompt: ...}"
    )
    text.add_argument("--natural-end", action="store_true", help="let answers end where the model ends them")
    text.add_argument("--seed", type=whole, help="the same seed makes the same prompts and arrivals")
    add_prices(made)
    add(
        "-o", "--output", type=Path, default=Path("chabok-bench"), metavar="DIR", help="for the files written"
    )
    add("--json", action="store_true", help="print the report as JSON")
    add("-q", "--quiet", action="store_true", help="no progress")
    return made


def _plan(found: argparse.Namespace, seed: int) -> Plan:
    from chabok.measure.bench import QUICK, THOROUGH, USUAL, Plan
    from chabok.measure.prompts import FromFile, Lengths
    from chabok.measure.slo import DEFAULT, Limit

    seconds = found.seconds or (QUICK if found.quick else THOROUGH if found.thorough else USUAL)
    output = Lengths.of(found.output_tokens or 128)
    return Plan(
        find_rate=found.find_rate,
        prompts=None if found.prompts is None else FromFile(found.prompts, output, seed),
        seconds=seconds,
        prompt_tokens=Lengths.of(found.prompt_tokens),
        output_tokens=None if found.output_tokens is None else Lengths.of(found.output_tokens),
        shared=found.shared_prefix,
        limits=tuple(Limit.of(text) for text in found.slo) or DEFAULT,
        most_users=max(found.most_users, 1),
        loads=_loads(found, seconds),
        seed=seed,
        exact=not found.natural_end,
        price=_price(found),
    )


def _loads(found: argparse.Namespace, seconds: float) -> tuple[Load, ...]:
    from chabok.measure.schedule import Concurrent, Pattern, Rate
    from chabok.measure.trace import Trace

    requests = found.requests
    if sum(each is not None for each in (found.users, found.rate, found.ramp, found.trace)) > 1:
        raise RequestError("--users, --rate, --ramp and --trace are different loads; give one of them")
    if found.pattern is not None and found.rate is None and found.ramp is None:
        raise RequestError("--pattern belongs to --rate or --ramp")
    pattern: Pattern = found.pattern or "poisson"
    ends: float | None = None if requests and not found.seconds else seconds
    if found.trace is not None:
        return (Trace.read(found.trace),)
    loads: list[Load] = []
    try:
        if found.users is not None:
            counts = [int(text) for text in found.users.split(",")]
            each = None if requests else (found.seconds or seconds / len(counts))
            loads += [Concurrent(count, requests, each) for count in counts]
        elif found.rate is not None:
            rates = [float(text) for text in found.rate.split(",")]
            each = ends if found.seconds or ends is None else seconds / len(rates)
            loads += [Rate(rate, requests, each, pattern) for rate in rates]
        elif found.ramp is not None:
            low, high = (float(text) for text in found.ramp.split("-"))
            loads.append(Rate(low, requests, seconds, pattern, until_per_s=high))
    except ValueError:
        raise RequestError("--users takes 1,4,16; --rate 0.5,2; --ramp 1-10") from None
    if not loads and requests is not None:
        raise RequestError("--requests belongs to --users or --rate")
    return tuple(loads)


def _price(found: argparse.Namespace) -> Price | None:
    from chabok.measure.cost import PRICES, Price, find_price

    if (found.watts is None) != (found.per_kwh is None):
        raise RequestError("--watts and --per-kwh belong together")
    if found.price is not None:
        return find_price(found.price, found.prices or PRICES)
    if found.per_hour is not None:
        return Price.machine(found.per_hour)
    return None if found.watts is None else Price.own(found.watts, found.per_kwh)


def _options(found: argparse.Namespace) -> dict[str, Any]:
    from chabok.measure.connection import Patience

    headers: dict[str, str] = {}
    for text in found.header:
        name, colon, value = text.partition(":")
        if not colon or not name.strip():
            raise RequestError(f"--header takes NAME:VALUE, not {text!r}")
        headers[name.strip()] = value.strip()
    extra: dict[str, Any] = {}
    for text in found.extra:
        name, _, value = text.partition("=")
        try:
            extra[name] = json.loads(value)
        except ValueError:
            raise RequestError(f"--extra takes FIELD=JSON, as top_k=1, not {text!r}") from None
    key = found.api_key or ""
    if found.api_key_env is not None:
        key = os.environ.get(found.api_key_env, "")
        if not key:
            raise RequestError(f"the environment variable {found.api_key_env} is empty")
    return {
        "model": found.model,
        "dialect": found.dialect,
        "key": key,
        "headers": headers,
        "extra": extra,
        "verify": not found.insecure,
        "patience": Patience(total_s=found.timeout, headers_s=found.timeout),
    }


def _command(arguments: list[str], found: argparse.Namespace, seed: int) -> str:
    """The command that repeats this run; a key is left out."""
    words = ["chabok", "bench"]
    hide = False
    for word in arguments:
        words.append("..." if hide else "--api-key=..." if word.startswith("--api-key=") else word)
        hide = word == "--api-key"
    if found.seed is None:
        words += ["--seed", str(seed)]
    return shlex.join(words)


def _measure(
    target: Target | None,
    plan: Plan,
    found: argparse.Namespace,
    command: str,
    options: dict[str, Any] | None = None,
) -> int:
    from chabok.measure.report import recompute, write_report

    try:
        found.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(
            f"--output {found.output}: no folder can be made there: {error.strerror or error}"
        ) from None
    if not os.access(found.output, os.W_OK):
        raise RequestError(f"--output {found.output}: this folder cannot be written to")
    raw = found.output / f"{_free_name(found.output)}.jsonl"
    asyncio.run(_run(target, plan, found, options, raw, command))
    run = recompute(raw)  # what is shown now is what `chabok report` will show
    report = run.report
    path = raw.with_suffix(".json")
    write_report(path, report)
    if found.json:
        sys.stdout.write(path.read_text(encoding="utf-8"))
    else:
        from chabok.cli.report_text import show
        from chabok.measure.report.page import to_html

        page = raw.with_suffix(".html")
        page.write_text(to_html(run), encoding="utf-8")
        show(report, console(), [page, path, raw])
    return _code(report)


def _code(report: Report) -> int:
    if not report.complete:
        return 130
    answered = [level.summary.requests > level.summary.failed for level in report.levels]
    return 0 if answered and all(answered) else 1


def _free_name(folder: Path) -> str:
    from datetime import datetime

    stem = datetime.now().strftime("%Y-%m-%d-%H%M%S")
    names = [stem, *(f"{stem}-{n}" for n in range(2, 100))]
    return next(name for name in names if not (folder / f"{name}.jsonl").exists())


async def _run(
    target: Target | None,
    plan: Plan,
    found: argparse.Namespace,
    options: dict[str, Any] | None,
    raw: Path,
    command: str,
) -> Report:
    from chabok.cli.bench_live import Live
    from chabok.measure.bench import Bench
    from chabok.measure.discover import discover
    from chabok.measure.endpoint import detect
    from chabok.measure.run import Loaded, Run, RunFile

    if target is None:
        if found.target is None:
            endpoints = await discover(**(options or {}))
            target = endpoints[0]
            others = ", ".join(str(each.origin) for each in endpoints[1:])
            if not found.json:
                note(f"measuring {endpoints[0].model} at {endpoints[0].origin}"
                     + (f"; there is also {others}" if others else ""))  # fmt: skip
        else:
            target = await detect(found.target, **(options or {}))
    with Live(quiet=found.quiet or found.json) as live:
        bench = Bench(target, plan, watch=live.watch, tell=live.tell)
        _on_interrupt(bench)
        drawing = asyncio.get_running_loop().create_task(live.draw(bench))
        measured = False
        try:
            with RunFile(raw, replace(bench.about, command=command)) as log:
                bench.log = log
                report = await bench.run()
                measured = True
            return report
        finally:
            drawing.cancel()
            with suppress(asyncio.CancelledError):
                await drawing
            if not measured and not any(isinstance(each, Loaded) for each in Run(raw)):
                raw.unlink()  # nothing that is worth keeping


def _on_interrupt(bench: Bench) -> None:
    """The first Ctrl-C ends the run and keeps what was measured; the second ends the program."""
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        bench.stop()

    with suppress(NotImplementedError):  # Windows
        loop.add_signal_handler(signal.SIGINT, interrupted)
