"""Chabok and llama.cpp side by side: same file, same threads, taking turns in one run.

    python benchmarks/peers.py --peer-python PEER/bin/python --json peers.json

The peer's interpreter needs llama-cpp-python, built for this machine (CMAKE_ARGS=-DGGML_NATIVE=ON); the rows
of avx2 need another one, built without AVX-512 (--peer-avx2-python). Phases:

    prefill   a prompt of 512 tokens, until its next token is known
    decode    128 tokens, one by one, after a prompt of 16
    batch32   32 sequences at once, 64 tokens each, in total

What is timed on both sides: forward passes, and the arg-max of the logits; no sampler, no text, no loading.
The peer runs each phase with the settings (flash attention, unified cache) that a trial finds fastest for it.
Each number is the median over rounds A B A B. ``bandwidth_share`` is the share of this machine's read
bandwidth, measured in each round with as many threads, that generation draws: the bytes of weights and cached
keys and values that a token needs, as they lie in the file, times tokens per second.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.moe_file import write_moe
from benchmarks.worker import Worker
from tests.models import MODELS, model_path, models_dir

from chabok.checkpoints.gguf import GGUF

Row = dict[str, Any]
AVX2_MODELS = ("smollm2", "qwen05")
PROMPT = 512
START = 16  # prompt before generation


@dataclass(frozen=True)
class Phase:
    """One kind of work: how many tokens it gives, how to ask for it, which peer settings to try."""

    name: str
    tokens: int
    request: dict[str, Any]
    variants: tuple[dict[str, Any], ...]
    steps: int = 0


def phases(quick: bool) -> dict[str, Phase]:
    """The phases by name; ``quick`` shortens generation."""
    n, steps = (32, 16) if quick else (128, 64)
    flash = ({"flash_attn": False}, {"flash_attn": True})
    batch = tuple(
        {"n_ctx": 32 * 128, "n_seq_max": 32, "kv_unified": unified, **one}
        for unified in (False, True)
        for one in flash
    )
    return {
        "prefill": Phase("prefill", PROMPT, {"do": "prefill", "prompt": tokens(PROMPT)}, flash),
        "decode": Phase("decode", n, {"do": "decode", "prompts": [tokens(START)], "n": n}, flash, n),
        "batch32": Phase(
            "batch32",
            32 * steps,
            {"do": "decode", "prompts": [tokens(START, seed) for seed in range(32)], "n": steps},
            batch,
            steps,
        ),
    }


def tokens(n: int, seed: int = 0) -> list[int]:
    """Ids that every model here has, none of them special."""
    return [int(i) for i in np.random.default_rng(seed).integers(1000, 20000, n)]


def path_of(model: str) -> Path:
    """The file of a test model; the random mixture of experts is written on first use."""
    if model != "moe":
        return model_path(model)
    path = models_dir() / "moe.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        write_moe(partial)
        partial.replace(path)
    return path


def bytes_per_token(path: Path, n_context: float) -> float:
    """Bytes that generating one token has to read: weights as in the file, and 16-bit keys and values."""
    gguf = GGUF.open(path)
    meta = gguf.metadata
    arch = meta["general.architecture"]

    def number(key: str, default: int) -> int:
        value = meta.get(f"{arch}.{key}", default)
        assert isinstance(value, int)
        return value

    used = number("expert_used_count", 1) / max(1, number("expert_count", 1))
    total = 0.0
    for name, tensor in gguf.tensors.items():
        if name == "token_embd.weight" and "output.weight" in gguf.tensors:
            continue  # one row
        total += tensor.n_bytes * (used if "_exps." in name else 1)
    heads = number("attention.head_count", 1)
    head_dim = number("attention.key_length", number("embedding_length", 0) // heads)
    per_key = number("block_count", 0) * number("attention.head_count_kv", heads) * head_dim * 2 * 2
    return total + n_context * per_key


PAUSE = 0.2
"""Seconds before each turn: threads of the one who was at work before stop waiting for more."""


def seconds(worker: Worker, phase: Phase) -> float:
    """One measurement."""
    time.sleep(PAUSE)
    return float(worker.ask(**phase.request))


def fastest_settings(peer: Worker, phase: Phase) -> dict[str, Any]:
    """Try the peer's variants and leave it configured with the best one."""
    trials: list[tuple[float, int]] = []
    for index, variant in enumerate(phase.variants):
        peer.ask("configure", **variant)
        seconds(peer, phase)
        trials.append((min(seconds(peer, phase) for _ in range(2)), index))
    best = phase.variants[min(trials)[1]]
    peer.ask("configure", **best)
    return best


def compare(ours: Worker, peer: Worker, phase: Phase, rounds: int, bandwidth: Callable[[], float]) -> Row:
    """Take turns over some rounds; speeds in tokens/s."""
    settings = fastest_settings(peer, phase)
    seconds(ours, phase)
    seconds(peer, phase)
    a, b, reads = [], [], []
    for _ in range(rounds):
        a.append(phase.tokens / seconds(ours, phase))
        b.append(phase.tokens / seconds(peer, phase))
        if phase.name == "decode":
            reads.append(bandwidth())
    row = {"ours": median(a), "peer": median(b), "ratio": median(a) / median(b), "bandwidth_share": None}
    if reads:
        row["read_gb_per_s"] = median(reads) / 1e9
    return {**row, "ours_rounds": a, "peer_rounds": b, "peer_settings": settings}


def measure(
    model: str, instructions: str, python: str, wanted: list[str], args: argparse.Namespace
) -> list[Row]:
    """All phases of one model under one instruction set."""
    path = path_of(model)
    environment = {} if instructions == "native" else {"CHABOK_ISA": instructions}
    rows = []
    with contextlib.ExitStack() as stack:
        ours, peer = (
            Worker(sys.executable, "chabok_worker.py", environment),
            Worker(python, "peer_worker.py"),
        )
        stack.callback(ours.close)
        stack.callback(peer.close)
        own = ours.ask("load", path=str(path), threads=args.threads)
        facts = peer.ask("load", path=str(path), threads=args.threads)
        for name in wanted:
            phase = phases(args.quick)[name]
            row = compare(
                ours, peer, phase, args.rounds, lambda: float(ours.ask("bandwidth", threads=args.threads))
            )
            if name == "decode":
                needed = bytes_per_token(path, START + phase.steps / 2)
                row["bandwidth_share"] = needed * row["ours"] / (row["read_gb_per_s"] * 1e9)
            rows.append(
                {"model": model, "phase": name, "isa": own["isa"], **row, "peer_version": facts["version"]}
            )
            print(line(rows[-1]), flush=True)
    return rows


def line(row: Row) -> str:
    """A row of the printed table."""
    share = "" if row["bandwidth_share"] is None else f"{row['bandwidth_share']:8.0%}"
    return (
        f"{row['model']:9} {row['isa']:7} {row['phase']:8} "
        f"{row['ours']:9.1f} {row['peer']:9.1f} {row['ratio']:7.2f} {share}"
    )


def machine() -> str:
    """The processor's name."""
    with contextlib.suppress(OSError):
        for text in Path("/proc/cpuinfo").read_text().splitlines():
            if text.startswith("model name"):
                return text.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    peer = os.environ.get("CHABOK_PEER_PYTHON", sys.executable)
    parser.add_argument(
        "--peer-python", default=peer, help="interpreter with llama-cpp-python, built natively"
    )
    parser.add_argument(
        "--peer-avx2-python",
        default=os.environ.get("CHABOK_PEER_AVX2_PYTHON"),
        help="interpreter with llama-cpp-python built without AVX-512; adds the rows isa: avx2",
    )
    parser.add_argument("--models", nargs="+", default=[*MODELS, "moe"], choices=[*MODELS, "moe"])
    parser.add_argument(
        "--phases", nargs="+", choices=list(phases(True)), help="default: batch32 for smollm2 only"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="shorter generation, for a first look")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()

    runs = [(model, "native", args.peer_python) for model in args.models]
    if args.peer_avx2_python:
        runs += [(model, "avx2", args.peer_avx2_python) for model in args.models if model in AVX2_MODELS]
    else:
        print("no --peer-avx2-python: the rows for isa avx2 are left out", file=sys.stderr)
    about = {"machine": machine(), "threads": args.threads, "date": datetime.date.today().isoformat()}
    print(f"{about['machine']}, {args.threads} threads, {about['date']}; tokens/s")
    print("model     isa     phase         ours      peer   ratio   share of read bandwidth")
    rows: list[Row] = []
    for model, instructions, python in runs:
        usual = ["prefill", "decode", *(["batch32"] if model == "smollm2" else [])]
        for row in measure(model, instructions, python, args.phases or usual, args):
            rows.append({**row, **about})
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
