"""Puts the figures of a run of ``peers.py`` into the README.

python benchmarks/readme_table.py peers.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

NAMES = {
    "smollm2": "SmolLM2-135M Q4_1",
    "gemma3": "Gemma-3-270m Q4_K_M",
    "qwen05": "Qwen2.5-Coder-0.5B Q4_K_M",
    "qwen15": "Qwen2.5-Coder-1.5B Q4_K_M",
    "moe": "Qwen3-MoE shape, 1 B, 8 of 64 experts",
}
PHASES = {"prefill": "prompt of 512", "decode": "generation", "batch32": "32 sequences at once"}
BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"


def table(rows: list[dict[str, object]]) -> str:
    """The rows as Markdown, under a line that names machine, threads and date."""
    first = rows[0]
    lines = [
        f"Tokens per second on {first['threads']} threads of an {first['machine']}, {first['date']}, against "
        "llama.cpp built for the same machine (llama-cpp-python 0.3.36): same file and threads, taking "
        "turns, medians.",
        "",
        "| model | phase | instructions | Chabok | llama.cpp | times | of read bandwidth |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        share = row.get("bandwidth_share")
        model, phase = NAMES[str(row["model"])], PHASES[str(row["phase"])]
        speeds = f"{row['ours']:.0f} | {row['peer']:.0f} | **{row['ratio']:.1f}**"
        lines.append(f"| {model} | {phase} | {row['isa']} | {speeds} | {f'{share:.0%}' if share else ''} |")
    return "\n".join(lines)


def main() -> None:
    rows = json.loads(Path(sys.argv[1]).read_text())
    readme = Path(__file__).parents[1] / "README.md"
    before, rest = readme.read_text().split(BEGIN)
    after = rest.split(END)[1]
    readme.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{after}")


if __name__ == "__main__":
    main()
