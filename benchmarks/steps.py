"""Where the time of a forward pass goes, kernel by kernel.

    python benchmarks/steps.py MODEL.gguf [--rows 1] [--position 100]

Each step's time includes waiting for the other threads after it.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import numpy as np

from chabok import models
from chabok.checkpoints.gguf import GGUF
from chabok.checkpoints.packed import PackedStore
from chabok.models.batch import PAGE_TOKENS, Segment


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=int, default=1, help="rows of one sequence")
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--position", type=int, default=100, help="tokens read before")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--runs", type=int, default=30)
    args = parser.parse_args()
    model = models.load(GGUF.open(args.model), threads=args.threads, pack=PackedStore())
    each = -(-(args.position + args.rows) // PAGE_TOKENS)
    model.new_cache(each * args.sequences)
    pages = np.arange(each * args.sequences, dtype=np.int32).reshape(args.sequences, each)
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, args.rows, dtype=np.int32)
    batch = [Segment(one, args.position, tokens) for one in pages]
    program = model.program_for(batch)
    for _ in range(3):
        model.forward(batch)
    seconds = np.median([model.pool.profile(program) for _ in range(args.runs)], axis=0)
    spent: dict[str, list[float]] = defaultdict(list)
    for kernel, time in zip(program.kernels, seconds):
        spent[kernel.symbol].append(time)
    print(f"{'us':>9} {'%':>5} {'steps':>6} {'us each':>9}  kernel")
    for name, times in sorted(spent.items(), key=lambda item: -sum(item[1])):
        total = sum(times)
        share, each = 100 * total / seconds.sum(), total / len(times)
        print(f"{total * 1e6:9.1f} {share:5.1f} {len(times):6} {each * 1e6:9.2f}  {name}")
    print(f"{seconds.sum() * 1e6:9.1f} us, {len(seconds)} steps")
    model.close()


if __name__ == "__main__":
    main()
