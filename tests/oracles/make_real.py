"""Makes tests/fixtures/real: what the float32 oracle and llama.cpp say of the real test models.

    python -m tests.oracles.make_real --peer-python PEER/bin/python [NAME ...]

The peer's interpreter needs llama-cpp-python. Per model: the ids of tests/fixtures/text.txt in windows and
of the prompts below (tokenized by llama.cpp), the oracle's loss of each window, its greedy continuations with
the gap between the best two logits at each step, how far rounding activations to 8 bits moves those gaps and
how many choices it changes, and llama.cpp's losses and choices. Takes minutes per model, so it is kept.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.worker import Worker
from tests.models import MODELS, model_path
from tests.oracles.forward import Continuation, Oracle, losses

FIXTURES = Path(__file__).parents[1] / "fixtures"
NAMES = ("smollm2", "gemma3", "qwen05")
WINDOW = 512
N_NEW = 64

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village at the foot of a mountain, there lived",
    "Water boils at 100 degrees Celsius because",
    "The three primary colours are",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\n\ndef softmax(x):\n",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: What is the largest planet in the solar system?\nA:",
    "The quick brown fox jumps over the lazy dog. The dog",
    "In 1969, the first man to walk on the Moon",
    "Ingredients:\n- 2 eggs\n- 200 g flour\n- 1 pinch of salt\n\nMethod:\n1.",
    "SELECT name, age FROM users WHERE",
    "بنی‌آدم اعضای یکدیگرند که در آفرینش",
    "Translate to French: Good morning, how are you?\n",
    "The meaning of the word 'nimble' is",
    "#include <stdio.h>\n\nint main(void)\n{\n",
    "1, 2, 4, 8, 16,",
    "To be, or not to be, that is the question:\n",
    "Photosynthesis is the process by which plants",
    "A list of five animals that live in the sea:\n1.",
]


def windows_of(ids: list[int], first: list[int]) -> list[list[int]]:
    """Consecutive windows, each led by ``first``: the beginning-of-text token of models that want one."""
    size = WINDOW - len(first)
    return [first + ids[start : start + size] for start in range(0, len(ids), size)]


def rounding(oracle: Oracle, prompts: list[list[int]], runs: list[Continuation]) -> dict[str, float]:
    """How far rounding activations moves the gap of the best two logits, over every step of every run.

    rms, p99, max: of the gap's shift; changed: how many steps get another best token.
    """
    moved, changed = [], 0
    oracle.round_activations = True
    for prompt, run in zip(prompts, runs, strict=True):
        logits = oracle.logits(prompt + run.tokens[:-1])[len(prompt) - 1 :]
        steps = np.arange(len(run.tokens))
        gaps = logits[steps, run.tokens] - logits[steps, run.seconds]
        moved.append(np.abs(gaps - np.array(run.gaps, dtype=np.float32)))
        changed += int((logits.argmax(axis=1) != run.tokens).sum())
    oracle.round_activations = False
    shift = np.concatenate(moved)
    return {
        "rms": float(np.sqrt(np.mean(shift**2))),
        "p99": float(np.quantile(shift, 0.99)),
        "max": float(shift.max()),
        "changed": changed,
    }


def peer_changed(peer: Worker, prompts: list[list[int]], runs: list[Continuation]) -> int:
    """How many steps of the oracle's runs get another best token from the peer."""
    changed = 0
    for prompt, run in zip(prompts, runs, strict=True):
        best = peer.ask("score", tokens=prompt + run.tokens[:-1])["best"][len(prompt) - 1 :]
        changed += sum(a != b for a, b in zip(best, run.tokens, strict=True))
    return changed


def text_results(path: Path, peer: Worker) -> dict[str, Any]:
    """Losses and perplexity of the text in windows."""
    text = (FIXTURES / "text.txt").read_text(encoding="utf-8")
    first = peer.ask("tokenize", text="")
    windows = windows_of(peer.ask("tokenize", text=text)[len(first) :], first)
    oracle = Oracle(path)
    count = sum(len(window) - 1 for window in windows)
    loss = [float(losses(oracle.logits(window), window).sum()) for window in windows]
    peer_loss = [sum(peer.ask("score", tokens=window)["loss"]) for window in windows]
    return {
        "windows": windows,
        "loss": loss,
        "perplexity": math.exp(sum(loss) / count),
        "peer_loss": peer_loss,
        "peer_perplexity": math.exp(sum(peer_loss) / count),
    }


def greedy_results(path: Path, peer: Worker) -> dict[str, Any]:
    """Continuations of the prompts, and how many choices rounding and the peer change."""
    prompts = [peer.ask("tokenize", text=prompt) for prompt in PROMPTS]
    oracle = Oracle(path)
    runs = oracle.greedy(prompts, N_NEW)
    return {
        "rounding": rounding(oracle, prompts, runs),
        "peer_changed": peer_changed(peer, prompts, runs),
        "prompts": [
            {
                "text": text,
                "ids": ids,
                "tokens": run.tokens,
                "seconds": run.seconds,
                "gaps": [round(gap, 5) for gap in run.gaps],
            }
            for text, ids, run in zip(PROMPTS, prompts, runs, strict=True)
        ],
    }


def main() -> None:
    """Make the results named on the command line, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer-python", default=os.environ.get("CHABOK_PEER_PYTHON"))
    parser.add_argument("--only", choices=["text", "greedy"], help="keep the other part as it is")
    parser.add_argument("names", nargs="*", default=list(NAMES))
    args = parser.parse_args()
    if not args.peer_python:
        parser.error("--peer-python (or CHABOK_PEER_PYTHON) must name an interpreter with llama-cpp-python")
    (FIXTURES / "real").mkdir(exist_ok=True)
    peer = Worker(args.peer_python, "peer_worker.py")
    for name in args.names:
        path, target = model_path(name), FIXTURES / "real" / f"{name}.json"
        result = json.loads(target.read_text(encoding="utf-8")) if args.only else {}
        facts = peer.ask("load", path=str(path), threads=1)
        result |= {
            "model": name,
            "sha256": MODELS[name].sha256,
            "peer": f"llama-cpp-python {facts['version']}",
        }
        if args.only != "greedy":
            result |= text_results(path, peer)
        if args.only != "text":
            result |= greedy_results(path, peer)
        text = json.dumps(result, ensure_ascii=False, separators=(",", ":"))
        target.write_text(text + "\n", encoding="utf-8")
        shown = ("perplexity", "peer_perplexity", "rounding", "peer_changed")
        print(name, {key: result[key] for key in shown}, flush=True)
    peer.close()


if __name__ == "__main__":
    main()
