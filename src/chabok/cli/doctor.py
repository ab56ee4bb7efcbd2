"""``chabok doctor``: what this machine offers, and what Chabok makes of it."""

from __future__ import annotations

import argparse
import os
import platform
import threading
import time
from pathlib import Path
from typing import Any

READ_BYTES = 256 * 2**20
"""How much the bandwidth measurement reads at a time: far more than any cache holds."""


def main(arguments: list[str]) -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser("chabok doctor", description="Show what this machine offers.")
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
    found = {"one_thread": read_bandwidth(1)}
    if threads > 1:
        found["all_threads"] = read_bandwidth(threads)
    return found


def read_bandwidth(threads: int, seconds: float = 0.4) -> float:
    """Bytes per second that so many threads read from memory: the best of what fits into the time."""
    import numpy as np

    # numpy's maximum of float32 is one vector load and one instruction per 16 values, and runs without the
    # GIL.
    parts = [np.ones(READ_BYTES // threads // 4, np.float32) for _ in range(threads)]
    n_bytes = sum(part.nbytes for part in parts)
    best = float("inf")
    barrier = threading.Barrier(threads + 1)
    end = time.perf_counter() + seconds
    done = False

    def read(part: np.ndarray[Any, Any]) -> None:
        while True:
            barrier.wait()
            if done:
                return
            part.max()
            barrier.wait()

    workers = [threading.Thread(target=read, args=(part,), daemon=True) for part in parts]
    for worker in workers:
        worker.start()
    while time.perf_counter() < end:
        barrier.wait()
        start = time.perf_counter()
        barrier.wait()
        best = min(best, time.perf_counter() - start)
    done = True
    barrier.wait()
    for worker in workers:
        worker.join()
    return n_bytes / best


def _caches() -> dict[str, dict[str, Any]]:
    from chabok.checkpoints import paths

    folders = {"models": paths.models_dir(), "packed": paths.packed_dir(), "kernels": paths.kernels_dir()}
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
    rates = [f"{format_bytes(bandwidth['one_thread'])}/s with one thread"]
    if "all_threads" in bandwidth:
        rates.append(f"{format_bytes(bandwidth['all_threads'])}/s with {cores['threads']}")
    rows = [
        ("CPU", cpu["name"]),
        ("Instructions", (cpu["instructions"] or f"none that Chabok can use: {cpu['problem']}") + also),
        (
            "Cores",
            f"{cores['logical']} logical, {cores['allowed']} allowed, {quota}: {cores['threads']} threads",
        ),
        ("Memory", f"{format_bytes(memory['available'])} free of {format_bytes(memory['total'])}"),
        ("Reads", ", ".join(rates)),
    ]
    for name, cache in report["caches"].items():
        rows.append((name.capitalize(), f"{cache['path']} ({format_bytes(cache['bytes'])})"))
    rows.append(("Versions", ", ".join(f"{name} {version}" for name, version in report["versions"].items())))
    return "\n".join(f"{name:13} {value}" for name, value in rows)
