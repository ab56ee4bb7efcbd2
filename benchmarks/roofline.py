"""Predicted speeds against measured ones, on this machine.

    python benchmarks/roofline.py [MODEL.gguf ...] [--rounds 3] [--json FILE]

In each round the machine is measured first, then a model: reading a prompt of 512 tokens, and generating
after 512. The prediction of a round uses that round's bandwidth and peak, since machines that are shared
drift. ``error`` is the median over rounds of predicted / measured - 1; the goal is within 15 %. Rounds in
which this process got less than 80 % of its cores are counted as disturbed; they say nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.models import MODELS, model_path

from chabok.choose.machine import measure_machine, measure_model
from chabok.choose.roofline import predict
from chabok.choose.shapes import of_file


def rounds_of(path: Path, rounds: int) -> list[dict[str, Any]]:
    """Each round's prediction and measurement, tokens/s."""
    shape = of_file(path, path.stem)
    found = []
    for _ in range(rounds):
        machine = measure_machine()
        reached = measure_model(path)
        told = predict(shape, machine)
        found.append(
            {
                "model": path.stem,
                "read_gb_per_s": machine.bandwidth / 1e9,
                "multiply_g_per_s": machine.peak / 1e9,
                "generation": {"predicted": told.generation.attainable, "measured": reached.tokens_per_s},
                "prompt": {"predicted": told.prefill.attainable, "measured": reached.prompt_tokens_per_s},
                "disturbed": reached.disturbed,
            }
        )
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all rounds to this file")
    args = parser.parse_args()
    everything = []
    print("model      phase        predicted   measured    error   disturbed rounds")
    for path in args.models or [model_path(name) for name in MODELS]:
        found = rounds_of(path, args.rounds)
        everything += found
        for phase in ("generation", "prompt"):
            errors = [each[phase]["predicted"] / each[phase]["measured"] - 1 for each in found]
            predicted, measured = (
                median(each[phase][one] for each in found) for one in ("predicted", "measured")
            )
            noisy = sum(each["disturbed"] for each in found)
            row = f"{path.stem:10} {phase:10} {predicted:11.1f} {measured:10.1f}"
            print(f"{row} {median(errors):+8.0%} {noisy:9}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
