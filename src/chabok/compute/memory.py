"""Memory that kernels read and write."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np


def aligned(n_bytes: int, alignment: int = 64) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Zeroed bytes at an aligned address: uint8[n_bytes]."""
    raw = np.zeros(n_bytes + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + n_bytes]


def anonymous(n_bytes: int) -> mmap.mmap:
    """Zeroed memory of this process, at least n_bytes, that is taken only when it is written, in huge pages
    where the system has them."""
    memory = mmap.mmap(-1, max(n_bytes, mmap.PAGESIZE))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
