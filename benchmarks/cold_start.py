"""From starting the process to the first token of ``chabok run``, and how much memory it takes.

    python benchmarks/cold_start.py [--model smollm2] [--rounds 5] [--json FILE]

    first     nothing cached but the model file: kernels are compiled and weights packed (once per round)
    warm      the second time ever, and every time after it
    help      ``chabok --help``, for scale

Times are wall clock, from before the process is started until the first byte of the answer can be read.
Memory is the most the process held, mapped weights included; the size of the file is shown beside it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.peers import machine
from tests.models import MODELS, model_path

PROMPT = "Hello"
CHABOK = [sys.executable, "-c", "import sys; from chabok.cli.main import main; sys.exit(main())"]


@dataclass(frozen=True)
class Start:
    """One run of the program: seconds to its first byte and to its end, and its peak memory in bytes."""

    first_byte_s: float
    total_s: float
    memory: int


def start(arguments: list[str], cache: Path) -> Start:
    """Run the program to its end with a cache folder of its own."""
    begin = time.perf_counter()
    process = subprocess.Popen(
        [*CHABOK, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "CHABOK_CACHE": str(cache)},
    )
    assert process.stdout is not None
    os.read(process.stdout.fileno(), 1)
    first_byte = time.perf_counter() - begin
    process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"chabok {' '.join(arguments)} ended with {process.returncode}")
    return Start(first_byte, time.perf_counter() - begin, usage.ru_maxrss * 1024)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args()
    path = model_path(args.model)
    subprocess.run(["cat", path], stdout=subprocess.DEVNULL, check=True)  # as after a download: in memory
    run = ["run", "--model", str(path), "--quiet", "--temperature", "0", "--max-tokens", "4", PROMPT]
    first, warm, helped = [], [], []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            first.append(start(run, Path(folder)))
            warm += [start(run, Path(folder)) for _ in range(3)]
            helped.append(start(["--help"], Path(folder)))
    about = {"machine": machine(), "date": datetime.date.today().isoformat(), "model": args.model}
    print(f"{about['machine']}, {about['date']}; {args.model}, {path.stat().st_size / 1e6:.0f} MB")
    print("start   first token (s)   to the end (s)   peak memory (MB)")
    rows = []
    for name, runs in (("first", first), ("warm", warm), ("help", helped)):
        row = {
            "start": name,
            "first_token_s": median(one.first_byte_s for one in runs),
            "total_s": median(one.total_s for one in runs),
            "peak_memory": max(one.memory for one in runs),
            "file_bytes": path.stat().st_size,
        }
        print(
            f"{name:7} {row['first_token_s']:15.3f} {row['total_s']:16.3f} {row['peak_memory'] / 1e6:18.0f}"
        )
        rows.append({**row, **about})
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
