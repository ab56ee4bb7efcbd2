"""``chabok roofline``: what this machine can reach with a model, what it does reach, and what limits."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from chabok.cli.params import Parser, positive, whole
from chabok.cli.terminal import console, harmless, note
from chabok.errors import RequestError

if TYPE_CHECKING:
    from chabok.choose.machine import Reached
    from chabok.choose.roofline import Machine, Prediction

SPEEDS = (100, 50, 20)
FIRST_TOKENS_MS = (200, 500)


def main(arguments: list[str]) -> int:
    """Run the command; the exit code."""
    from chabok.choose.machine import measure_machine, measure_model
    from chabok.choose.roofline import Machine, WhatIf, predict, survey, what_if
    from chabok.choose.shapes import of

    found = parser().parse_args(arguments)
    others = [WhatIf.of(text) for text in found.what_if]
    shape, path = of(found.model) if found.model else (None, None)
    if found.bandwidth and found.compute:
        machine = Machine(found.bandwidth * 1e9, found.compute * 1e9, found.threads or 1, found.isa)
    else:
        if found.bandwidth or found.compute:
            raise RequestError("of a machine that is not this one, give both --bandwidth and --compute")
        machine = measure_machine(found.threads)
        _note_others(machine)
    sizes = {"context": found.context, "prompt": found.prompt}
    if shape is None:
        if others:
            machine = machine.with_(
                _product(each.bandwidth for each in others), _product(each.compute for each in others)
            )
        return _survey(machine, survey(machine, **sizes), found.json)
    base = predict(shape, machine, batch=found.batch, **sizes)
    reached = None
    here = not (found.bandwidth or found.no_measure) and path is not None
    if here and found.batch == 1 and path is not None:
        reached = measure_model(path, threads=found.threads, **sizes)
        base = replace(
            base,
            generation=replace(base.generation, reached=reached.tokens_per_s),
            prefill=replace(base.prefill, reached=reached.prompt_tokens_per_s),
        )
    rows = [base, *(what_if(shape, machine, each, batch=found.batch, **sizes) for each in others)]
    if found.json:
        measured = reached.to_dict() if reached else None
        print(json.dumps({"schema": "chabok.roofline/1", "machine": asdict(machine), "reached": measured,
                          "predictions": [each.to_dict() for each in rows]}, indent=2))  # fmt: skip
        return 0
    _show(machine, rows, reached)
    if path is None:
        note(f"{found.model} is not on this machine: shape from {shape.source}, types of tensors derived")
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = Parser(
        "chabok roofline",
        description="What this machine can reach with a model (a file, an installed model, or one of "
        "the catalogue, here or not), what is reached, and what limits. Without a model: which models of the "
        "catalogue would be fast here.",
        allow_abbrev=False,
    )
    add = made.add_argument
    add("model", nargs="?", metavar="MODEL")
    add("--what-if", action="append", default=[], metavar="CHANGE",
        help="bandwidth=2x, compute=2x, q8_0, batch=8, context=8192, dense; joined by commas they hold "
        "together; may be repeated")  # fmt: skip
    add("--context", type=_count, default=512, metavar="N", help="tokens before the one generated (512)")
    add("--prompt", type=_count, default=512, metavar="N", help="tokens of a prompt (512)")
    add("--batch", type=_count, default=1, metavar="N", help="sequences at once (1)")
    add("--threads", type=_count, metavar="N", help="to compute with")
    add("--no-measure", action="store_true", help="do not run the model, even if it is here")
    other = made.add_argument_group("another machine than this")
    other.add_argument("--bandwidth", type=positive, metavar="GB/S", help="its read bandwidth")
    other.add_argument(
        "--compute", type=positive, metavar="G/S", help="its 10^9 multiply-adds of bytes per second"
    )
    other.add_argument(
        "--isa", default="avx512", choices=("avx512", "avx2"), help="its instructions (avx512)"
    )
    add("--json", action="store_true", help="for programs")
    return made


def _count(text: str) -> int:
    value = whole(text)
    if not 1 <= value <= 10_000_000:
        raise argparse.ArgumentTypeError(f"must be from 1 to 10000000, not {text}")
    return value


def _note_others(machine: Machine) -> None:
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > machine.threads * 0.75:
        note(f"about {load:.0f} programs want the {machine.threads} cores; when calm, it is faster")


def _product(values: Sequence[float] | object) -> float:
    import math

    return math.prod(values)  # type: ignore[arg-type]


def _machine_line(machine: Machine) -> str:
    return (
        f"Machine: reads {machine.bandwidth / 1e9:.1f} GB/s, multiplies {machine.peak / 1e9:.0f} G/s "
        f"({machine.instructions}, {machine.threads} thread{'s' * (machine.threads != 1)})"
    )


def _show(machine: Machine, rows: Sequence[Prediction], reached: Reached | None) -> None:
    from rich.table import Table

    from chabok.measure.report.numbers import number, seconds

    out = console()
    base = rows[0]
    out.print(_machine_line(machine), markup=False, highlight=False)
    reads, takes = base.generation.n_bytes / 1e6, base.prefill.multiply_adds / 1e6
    line = f"Model: {harmless(base.model)}; a token reads {reads:.0f} MB"
    out.print(f"{line}, one of a prompt takes {takes:.0f} M multiply-adds", markup=False, highlight=False)
    if not base.fits:
        out.print(f"It needs {base.memory / 1e9:.1f} GB of memory; {machine.memory / 1e9:.1f} GB are free.",
                  markup=False, highlight=False)  # fmt: skip
    table = Table(box=None, pad_edge=False)
    for heading in ("", "ceiling", "attainable", "reached", "limited by"):
        table.add_column(heading, justify="left" if heading in ("", "limited by") else "right")
    table.add_column("first token", justify="right")
    for each in rows:
        label = f" if {each.label}" if each.label else ""
        for phase in (each.generation, each.prefill):
            first = seconds(each.first_token_s) if phase is each.prefill else ""
            batch = f" x{each.batch}" if each.batch > 1 and phase is each.generation else ""
            after = each.context if phase is each.generation else each.prompt
            table.add_row(
                f"{phase.name}{batch}, {after} tokens{harmless(label)}",
                f"{number(phase.ceiling)} tok/s",
                f"{number(phase.attainable)} tok/s",
                "" if phase.reached is None else f"{number(phase.reached)} tok/s",
                phase.limit,
                first,
            )
    out.print(table)
    if reached is not None and reached.disturbed:
        note("other programs used the cores while this was measured; calm, more is reached")


def _survey(machine: Machine, found: Sequence[Prediction], as_json: bool) -> int:
    from rich.table import Table

    from chabok.choose.roofline import above
    from chabok.measure.report.numbers import number, seconds

    if as_json:
        print(json.dumps({"schema": "chabok.roofline/1", "machine": asdict(machine),
                          "predictions": [each.to_dict() for each in found]}, indent=2))  # fmt: skip
        return 0
    out = console()
    out.print(_machine_line(machine), markup=False, highlight=False)
    for speed in SPEEDS:
        for ms in FIRST_TOKENS_MS:
            names = [each.model for each in above(found, speed, ms / 1000)]
            line = f"  above {speed} tok/s, first token under {ms} ms: {', '.join(names) or 'none'}"
            out.print(line, markup=False, highlight=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("model")
    for heading in ("attainable", "ceiling", "first token", "memory"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for each in found:
        table.add_row(
            each.model,
            f"{number(each.generation.attainable)} tok/s",
            f"{number(each.generation.ceiling)} tok/s",
            seconds(each.first_token_s),
            f"{each.memory / 1e9:.1f} GB",
            "" if each.fits else "does not fit",
        )
    out.print(table)
    prompt = found[0].prompt if found else 0
    note(f"predicted from published shapes, nothing downloaded; first token of {prompt} new prompt tokens")
    return 0
