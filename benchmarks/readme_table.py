"""Puts the figures of a run of ``peers.py`` or ``serving.py`` into the README.

python benchmarks/readme_table.py peers.json serving.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

NAMES = {
    "smollm2": "SmolLM2-135M Q4_1",
    "gemma3": "Gemma-3-270m Q4_K_M",
    "qwen05": "Qwen2.5-Coder-0.5B Q4_K_M",
    "qwen15": "Qwen2.5-Coder-1.5B Q4_K_M",
    "moe": "Qwen3-MoE shape, 1 B, 8 of 64 experts",
}
PHASES = {"prefill": "prompt of 512", "decode": "generation", "batch32": "32 sequences at once"}


def peers_table(rows: list[dict[str, object]]) -> str:
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


def serving_table(run: dict[str, Any]) -> str:
    """The rows of a run of serving.py as Markdown; times in which Chabok does better."""
    about = run["about"]
    lines = [
        f"Both servers on {about['threads']} threads of the same machine, {about['date']}, {about['model']}: "
        "same file, threads and client, taking turns, medians (`python benchmarks/serving.py`).",
        "",
        "| case | streams | Chabok | llama-server | times | unit |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for row in run["rows"]:
        peer = "" if row["peer"] is None else _figure(row["peer"])
        ours = f"{row['ours']:.0%}" if row["unit"] == "share" else _figure(row["ours"])
        ratio = f"**{row['ratio']:.1f}**" if row["ratio"] else ""
        unit = "" if row["unit"] == "share" else row["unit"]
        lines.append(f"| {row['case']} | {row['concurrency'] or ''} | {ours} | {peer} | {ratio} | {unit} |")
    return "\n".join(lines)


def _figure(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def main() -> None:
    readme = Path(__file__).parents[1] / "README.md"
    for name in sys.argv[1:]:
        run = json.loads(Path(name).read_text())
        mark, table = ("peers", peers_table) if isinstance(run, list) else ("serving", serving_table)
        begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
        before, rest = readme.read_text().split(begin)
        readme.write_text(f"{before}{begin}\n{table(run)}\n{end}{rest.split(end)[1]}")


if __name__ == "__main__":
    main()
