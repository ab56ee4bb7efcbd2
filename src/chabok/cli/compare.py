"""``chabok compare``: models, endpoints and saved runs at the same work, and which is for which need."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from chabok.cli.params import Parser, whole
from chabok.errors import ChabokError, RequestError

if TYPE_CHECKING:
    from chabok.choose.compare import Comparison
    from chabok.measure.cost import Price

T = TypeVar("T")


def main(arguments: list[str]) -> int:
    """Run the command; the exit code: 1 if one failed, 130 if it was interrupted."""
    made = parser()
    found = made.parse_intermixed_args(arguments)
    from chabok.choose.compare import compare, conclude, measure
    from chabok.choose.contest import Contestant, Plan, distinct, prompts_of
    from chabok.choose.pareto import Limit
    from chabok.cli.compare_live import Live

    budget = [Limit.of(text) for text in found.budget]
    prices, memory, options = _prices(found), _memory(found.memory), _options(found)
    with Live(quiet=found.quiet or found.json) as live:
        if found.resume is not None:
            if found.targets:
                raise RequestError("--resume goes on with what is in the folder; name no targets beside it")
            plan = Plan.read(found.resume)
            _known(plan.contestants, prices, memory, options)
            stopped = measure(plan, found.resume, options, live.tell)
            result = conclude(found.resume, budget, prices, memory)
            result.complete &= not stopped
        else:
            if not found.targets:
                made.error("name two or more models, URLs or saved runs, or --resume FOLDER")
            contestants = distinct([Contestant.of(text) for text in found.targets])
            _known(contestants, prices, memory, options)
            result = compare(
                *contestants,
                folder=found.output,
                prompts=None if found.prompts is None else prompts_of(found.prompts),
                output_tokens=found.output_tokens,
                evals=found.eval,
                limit=found.limit,
                method=found.choices,
                seed=found.seed,
                budget=budget,
                prices=prices,
                memory=memory,
                options=options,
                progress=live.tell,
            )
    return _write(result, found)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = Parser(
        "chabok compare",
        description="Run the same work on models, endpoints and saved runs, one after the other, and show "
        "speed, price and quality side by side.",
        allow_abbrev=False,
    )
    add = made.add_argument
    add(
        "targets",
        nargs="*",
        metavar="TARGET",
        help="a model (smollm2, FILE.gguf), a URL (http://host:port#model) or a saved run; LABEL=TARGET",
    )
    add(
        "--budget",
        action="append",
        default=[],
        metavar="LIMIT",
        help="'first token<200ms', 'answer<2s', 'cost<0.5' (of 1000 answers), 'memory<2GB', 'quality>60%%'",
    )
    speed = made.add_argument_group("speed")
    speed.add_argument(
        "--prompts", type=Path, metavar="FILE", help="ask these, one per line (8 everyday ones)"
    )
    speed.add_argument(
        "--output-tokens", type=whole, default=256, metavar="N", help="most of an answer (256)"
    )
    quality = made.add_argument_group("quality")
    quality.add_argument(
        "--eval",
        action="append",
        default=[],
        metavar="FILE",
        help="questions with answers as JSON lines, or a set by its name (arc_easy, gsm8k ...)",
    )
    quality.add_argument(
        "--limit", type=whole, metavar="N", help="so many questions of each, drawn by the seed"
    )
    quality.add_argument(
        "--choices",
        choices=("auto", "logprob", "text"),
        default="auto",
        help="how choices are read: by probability where it is told (auto), always, or never",
    )
    quality.add_argument("--seed", type=whole, default=0, help="the same seed draws the same questions (0)")
    price = made.add_argument_group("cost (each as VALUE for all, or LABEL=VALUE)")
    price.add_argument(
        "--price", action="append", default=[], metavar="NAME", help="an entry of a price list"
    )
    price.add_argument("--prices", type=Path, metavar="FILE", help="a price list of one's own, as TOML")
    price.add_argument("--per-hour", action="append", default=[], metavar="PRICE", help="of the machine")
    price.add_argument("--watts", action="append", default=[], metavar="W", help="it draws, with --per-kwh")
    price.add_argument("--per-kwh", type=float, metavar="PRICE", help="the tariff of electricity")
    ends = made.add_argument_group("endpoints (each as VALUE for all, or LABEL=VALUE)")
    ends.add_argument("--api-key-env", action="append", default=[], metavar="NAME", help="variable of a key")
    ends.add_argument("--dialect", action="append", default=[], metavar="NAME", help="the API to speak")
    ends.add_argument(
        "--memory", action="append", default=[], metavar="SIZE", help="it takes, if you know: 2GB"
    )
    ends.add_argument("--insecure", action="store_true", help="accept any TLS certificate")
    ends.add_argument(
        "--timeout", type=float, default=900.0, metavar="S", help="longest time of an answer (900)"
    )
    add(
        "-o",
        "--output",
        type=Path,
        metavar="DIR",
        help="for all files; one that was interrupted is gone on with",
    )
    add(
        "--resume",
        type=Path,
        metavar="DIR",
        help="go on with an interrupted comparison, or show it again; name budgets and prices anew",
    )
    add("--json", action="store_true", help="print everything as JSON")
    add("-q", "--quiet", action="store_true", help="no progress")
    return made


def _labelled(texts: list[str], read: Callable[[str], T], flag: str) -> dict[str, T]:
    """LABEL=VALUE as label -> value; a value alone is for all (label "")."""
    found: dict[str, T] = {}
    for text in texts:
        label, equals, value = text.rpartition("=")
        try:
            found[label if equals else ""] = read(value)
        except ValueError:
            raise RequestError(f"{flag} takes VALUE or LABEL=VALUE, not {text!r}") from None
    return found


def _prices(found: argparse.Namespace) -> dict[str, Price]:
    from chabok.measure.cost import PRICES, Price, find_price

    if bool(found.watts) != (found.per_kwh is not None):
        raise RequestError("--watts and --per-kwh belong together")
    made = _labelled(found.per_hour, lambda text: Price.machine(float(text)), "--per-hour")
    made |= _labelled(found.watts, lambda text: Price.own(float(text), found.per_kwh), "--watts")
    made |= _labelled(found.price, lambda text: find_price(text, found.prices or PRICES), "--price")
    return made


def _memory(texts: list[str]) -> dict[str, int]:
    from chabok.choose.pareto import Limit

    return _labelled(texts, lambda text: int(Limit.of(f"memory<{text}").value), "--memory")


def _options(found: argparse.Namespace) -> dict[str, dict[str, Any]]:
    made: dict[str, dict[str, Any]] = {"": {"verify": not found.insecure, "timeout": found.timeout}}
    for label, name in _labelled(found.api_key_env, str, "--api-key-env").items():
        key = os.environ.get(name, "")
        if not key:
            raise RequestError(f"the environment variable {name} is empty")
        made.setdefault(label, {})["key"] = key
    for label, name in _labelled(found.dialect, str, "--dialect").items():
        made.setdefault(label, {})["dialect"] = name
    return made


def _known(contestants: Any, *given: dict[str, Any]) -> None:
    """ChabokError: something is for a label that nothing has."""
    labels = {each.label for each in contestants}
    for label in {label for each in given for label in each if label} - labels:
        raise ChabokError(
            f"nothing that is compared is labelled {label!r}; the labels are {', '.join(sorted(labels))}"
        )


def _write(result: Comparison, found: argparse.Namespace) -> int:
    folder = Path(result.folder)
    data, page = folder / "compare.json", folder / "compare.html"
    text = json.dumps(result.to_dict(), ensure_ascii=False, indent=2)
    data.write_text(text + "\n", encoding="utf-8")
    page.write_text(result.to_html(), encoding="utf-8")
    if found.json:
        sys.stdout.write(text + "\n")
    else:
        from chabok.cli.compare_text import show
        from chabok.cli.terminal import console

        show(result, console(), [page, data])
    if any(member.failure for member in result.members):
        return 1
    return 0 if result.complete else 130
