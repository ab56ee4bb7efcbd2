from __future__ import annotations

import sys
from pathlib import Path

import pytest

from chabok.checkpoints.memory import available_memory, require
from chabok.errors import ResourceError


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal: 32000 kB\nMemFree: 1000 kB\nMemAvailable:   20000 kB\n"


def test_page_cache_counts_as_available(tmp_path: Path) -> None:
    assert available_memory(machine(tmp_path, {"proc/meminfo": MEMINFO})) == 20_000 * 1024


def test_the_tightest_cgroup_counts_less_what_it_can_drop(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/user/job\n",
            "sys/fs/cgroup/user/memory.max": "9000000",
            "sys/fs/cgroup/user/memory.current": "6000000",
            "sys/fs/cgroup/user/memory.stat": "anon 1\ninactive_file 2000000\n",
            "sys/fs/cgroup/user/job/memory.max": "max",
            "sys/fs/cgroup/user/job/memory.current": "5000000",
        },
    )
    assert available_memory(root) == 5_000_000


@pytest.mark.parametrize("folder", ["docker/abc", ""])
def test_old_cgroups_count_too(tmp_path: Path, folder: str) -> None:
    root = machine(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "9:cpu,cpuacct:/x\n4:memory:/docker/abc\n",
            f"sys/fs/cgroup/memory/{folder}/memory.limit_in_bytes": "4000000",
            f"sys/fs/cgroup/memory/{folder}/memory.usage_in_bytes": "1000000",
        },
    )
    assert available_memory(root) == 3_000_000


def test_without_any_of_these_files_there_is_still_an_answer(tmp_path: Path) -> None:
    assert 0 < available_memory(tmp_path) <= sys.maxsize


def test_what_does_not_fit_is_refused_with_both_sizes() -> None:
    require(10, "a model")
    require(10**9, "a model", available=10**9)
    with pytest.raises(ResourceError, match=r"a model needs about 8\.0 GB, and 3\.0 GB are available"):
        require(8 * 10**9, "a model", available=3 * 10**9)
