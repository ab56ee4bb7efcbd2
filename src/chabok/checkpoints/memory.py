"""How much memory this process may still use, asked before a model is loaded rather than found out after."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from chabok.checkpoints.storage import format_bytes
from chabok.errors import ResourceError


def available_memory(root: Path = Path("/")) -> int:
    """Bytes this process can still take: what the machine has free, within the limits of its cgroups.

    Page cache that can be dropped counts as free. ``root`` is where /proc and /sys are, for tests.
    """
    bounds = [_machine(root)]
    bounds += _cgroup_v2(root)
    bounds += _cgroup_v1(root)
    return max(0, min(bounds))


def require(n_bytes: int, what: str, available: int | None = None) -> None:
    """Raise ResourceError unless ``n_bytes`` for ``what`` fit in the memory that is available now."""
    if available is None:
        available = available_memory()
    if n_bytes > available:
        raise ResourceError(
            f"not enough memory: {what} needs about {format_bytes(n_bytes)}, and {format_bytes(available)} "
            "are available; close other programs, choose a smaller model, or a shorter context"
        )


def _machine(root: Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    # Not Linux. macOS does not tell what can be reclaimed, so its total stands in.
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return sys.maxsize


def _cgroup_v2(root: Path) -> list[int]:
    """What is left under each limit from this process's own group up to the root."""
    top = root / "sys/fs/cgroup"
    left: list[int] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        if not line.startswith("0::"):
            continue
        group = top / line[3:].strip("/")
        while True:
            limit, used = _number(group / "memory.max"), _number(group / "memory.current")
            if limit is not None and used is not None:
                left.append(limit - used + _statistic(group / "memory.stat", "inactive_file"))
            if group == top or top not in group.parents:
                break
            group = group.parent
    return left


def _cgroup_v1(root: Path) -> list[int]:
    top = root / "sys/fs/cgroup/memory"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        if "memory" not in controllers.split(","):
            continue
        group = top / name.strip("/")
        group = group if group.is_dir() else top  # inside a container its own group is mounted as the top
        limit, used = _number(group / "memory.limit_in_bytes"), _number(group / "memory.usage_in_bytes")
        if limit is not None and used is not None:
            return [limit - used + _statistic(group / "memory.stat", "total_inactive_file")]
    return []


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None  # "max" means no limit


def _statistic(path: Path, name: str) -> int:
    for line in _read(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return 0
