"""How right: perplexity and greedy choices on real files, against a float32 forward pass and llama.cpp.

    python benchmarks/quality.py [--json FILE]

What the oracle and llama.cpp say is kept in tests/fixtures/real (made by tests/oracles/make_real.py); Chabok
reads the same token ids in the same windows now. Perplexity is over all tokens of a window but its first. The
choices are those at each step of 20 continuations of 64 tokens: how many differ from the oracle's best token,
and for each of these how far the oracle's two best logits lie apart, beside how far rounding activations to 8
bits moves that gap (simulated in the oracle: root mean square and maximum).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.worker import next_token_losses
from tests.models import model_path

from chabok import models
from chabok.checkpoints.gguf import GGUF
from chabok.checkpoints.packed import PackedStore
from chabok.models.batch import PAGE_TOKENS, Logits, Model, Segment

REAL = Path(__file__).parents[1] / "tests" / "fixtures" / "real"
NAMES = tuple(sorted(path.stem for path in REAL.glob("*.json")))
MAX_ROWS = 512


@dataclass(frozen=True)
class Divergence:
    """A step at which another token than the oracle's was best; gap: between the oracle's two best logits.

    runner_up: whether the token chosen is the oracle's second.
    """

    prompt: int
    step: int
    wanted: int
    chosen: int
    gap: float
    runner_up: bool


def load(name: str) -> Model:
    """A real test model, ready to read one window."""
    model = models.load(GGUF.open(model_path(name)), pack=PackedStore(), max_rows=MAX_ROWS)
    model.new_cache(64)
    return model


def kept(name: str) -> dict[str, Any]:
    """What the oracle and llama.cpp said of a model."""
    result: dict[str, Any] = json.loads((REAL / f"{name}.json").read_text(encoding="utf-8"))
    return result


def read(model: Model, tokens: list[int], outputs: int | None = None) -> Logits:
    """Logits of the last ``outputs`` positions (default: all) of one sequence."""
    pages = np.arange(-(-len(tokens) // PAGE_TOKENS), dtype=np.int32)
    return model.forward([Segment(pages, 0, np.array(tokens, np.int32), outputs or len(tokens))])


def perplexity(model: Model, windows: list[list[int]]) -> float:
    """exp of the mean loss over all but the first token of each window."""
    losses = [loss for window in windows for loss in next_token_losses(read(model, window).values, window)]
    return math.exp(sum(losses) / len(losses))


def divergences(model: Model, prompts: list[dict[str, Any]]) -> list[Divergence]:
    """Steps of the oracle's continuations at which the model would choose another token."""
    found = []
    for index, prompt in enumerate(prompts):
        tokens, n = prompt["tokens"], len(prompt["tokens"])
        logits = read(model, prompt["ids"] + tokens[:-1], outputs=n)
        for step in range(n):
            chosen = logits.argmax(step)
            if chosen != tokens[step]:
                gap, second = prompt["gaps"][step], prompt["seconds"][step]
                found.append(Divergence(index, step, tokens[step], chosen, gap, chosen == second))
    return found


def continuations(model: Model, prompts: list[list[int]], n: int) -> list[list[int]]:
    """Greedy continuations of all prompts, decoded together."""
    each = -(-(max(map(len, prompts)) + n) // PAGE_TOKENS)
    model.new_cache(each * len(prompts))
    pages = [np.arange(i * each, (i + 1) * each, dtype=np.int32) for i in range(len(prompts))]
    chosen: list[list[int]] = []
    for i, prompt in enumerate(prompts):
        chosen.append([model.forward([Segment(pages[i], 0, prompt, 1)]).argmax(0)])
    for step in range(n - 1):
        batch = [Segment(pages[i], len(prompt) + step, chosen[i][-1:], 1) for i, prompt in enumerate(prompts)]
        logits = model.forward(batch)
        for i, tokens in enumerate(chosen):
            tokens.append(logits.argmax(i))
    return chosen


def main() -> None:
    """Print and write the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args()
    rows = []
    for name in args.models:
        wanted, model = kept(name), load(name)
        ours = perplexity(model, wanted["windows"])
        other = divergences(model, wanted["prompts"])
        model.close()
        steps = sum(len(prompt["tokens"]) for prompt in wanted["prompts"])
        print(
            f"{name}: perplexity {ours:.4f}; oracle {wanted['perplexity']:.4f} "
            f"({ours / wanted['perplexity'] - 1:+.2%}); {wanted['peer']} {wanted['peer_perplexity']:.4f}"
        )
        rounding = wanted["rounding"]
        print(
            f"  other choices in {steps} steps: {len(other)}; by rounding alone {rounding['changed']}; "
            f"llama.cpp {wanted['peer_changed']}. Rounding moves gaps by {rounding['rms']:.3f} "
            f"(at most {rounding['max']:.3f})"
        )
        for one in sorted(other, key=lambda divergence: -divergence.gap):
            rank = "the runner-up" if one.runner_up else "neither of the two"
            print(f"    prompt {one.prompt:2} step {one.step:2}: gap {one.gap:.4f}, chose {rank}")
        rows.append(
            {
                "model": name,
                "perplexity": ours,
                "oracle_perplexity": wanted["perplexity"],
                "peer_perplexity": wanted["peer_perplexity"],
                "steps": steps,
                "rounding": rounding,
                "peer_changed": wanted["peer_changed"],
                "divergences": [asdict(one) for one in other],
            }
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
