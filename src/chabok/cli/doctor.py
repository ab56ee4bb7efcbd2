"""``chabok doctor``: what this machine offers, and what Chabok makes of it."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from chabok.cli.params import Parser

READ_BYTES = 256 * 2**20
"""How much the bandwidth measurement reads at a time: far more than any cache holds."""


def main(arguments: list[str]) -> int:
    """Run the command; the exit code."""
    parser = Parser("chabok doctor", description="Show what this machine offers.")
    parser.add_argument("--json", action="store_true", help="for programs")
    found = parser.parse_args(arguments)
    report = examine()
    if found.json:
        import json

        print(json.dumps(report, indent=2))
    else:
        print(_text(report))
    return 0


def examine() -> dict[str, Any]:
    """Everything doctor shows, by section; bytes, and bytes per second."""
    cores = _cores()
    return {
        "versions": _versions(),
        "cpu": {"name": _cpu_name(), **_instruction_sets()},
        "cores": cores,
        "memory": _memory(),
        "bandwidth": _bandwidths(cores["threads"]),
        "caches": _caches(),
    }


def _versions() -> dict[str, str]:
    from importlib import metadata

    from chabok import __version__

    found = {"chabok": __version__, "python": platform.python_version(), "system": platform.platform()}
    for name in ("numpy", "llvmlite", "tokenizers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith(("model name", "hardware")):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _instruction_sets() -> dict[str, Any]:
    from chabok.compute import isa

    others = [each.title for each in isa.available()]
    try:
        return {"instructions": isa.choose().title, "available": others}
    except isa.UnsupportedCPUError as error:
        return {"instructions": None, "available": others, "problem": str(error)}


def _cores() -> dict[str, Any]:
    from chabok.compute.pool import cpu_quota, usable_cores

    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"logical": os.cpu_count(), "allowed": affinity, "quota": cpu_quota(), "threads": usable_cores()}


def _memory() -> dict[str, int]:
    from chabok.checkpoints.memory import available_memory

    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"total": total, "available": available_memory()}


def _bandwidths(threads: int) -> dict[str, float]:
    from chabok.checkpoints.paths import kernels_dir
    from chabok.compute import isa
    from chabok.compute.bandwidth import read_bandwidth
    from chabok.compute.library import Library

    try:
        library = Library(isa.choose(), kernels_dir())
    except isa.UnsupportedCPUError:
        return {}
    counts = {"one_thread": 1} | ({"all_threads": threads} if threads > 1 else {})
    return {name: read_bandwidth(library, n, n_bytes=READ_BYTES) for name, n in counts.items()}


def _caches() -> dict[str, dict[str, Any]]:
    from chabok.checkpoints import paths

    folders = {
        "models": paths.models_dir(),
        "packed": paths.packed_dir(),
        "kernels": paths.kernels_dir(),
        "prefixes": paths.prefixes_dir(),
    }
    return {name: {"path": str(folder), "bytes": _size(folder)} for name, folder in folders.items()}


def _size(folder: Path) -> int:
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(where, name)).st_size
            except OSError:
                continue  # it went away meanwhile
    return total


def _text(report: dict[str, Any]) -> str:
    from chabok.checkpoints.storage import format_bytes

    cpu, cores, memory, bandwidth = (report[name] for name in ("cpu", "cores", "memory", "bandwidth"))
    quota = "no quota" if cores["quota"] is None else f"quota {cores['quota']:g}"
    others = [title for title in cpu["available"] if title != cpu["instructions"]]
    also = f" (also: {', '.join(others)}; CHABOK_ISA chooses)" if others else ""
    threads = {"one_thread": "one thread", "all_threads": f"{cores['threads']} threads"}
    rates = [f"{format_bytes(rate)}/s with {threads[name]}" for name, rate in bandwidth.items()]
    rows = [
        ("CPU", cpu["name"]),
        ("Instructions", (cpu["instructions"] or f"none that Chabok can use: {cpu['problem']}") + also),
        (
            "Cores",
            f"{cores['logical']} logical, {cores['allowed']} allowed, {quota}: {cores['threads']} threads",
        ),
        ("Memory", f"{format_bytes(memory['available'])} free of {format_bytes(memory['total'])}"),
        ("Reads", ", ".join(rates) or "not measured"),
    ]
    for name, cache in report["caches"].items():
        rows.append((name.capitalize(), f"{cache['path']} ({format_bytes(cache['bytes'])})"))
    rows.append(("Versions", ", ".join(f"{name} {version}" for name, version in report["versions"].items())))
    return "\n".join(f"{name:13} {value}" for name, value in rows)
