"""Writing files so that a kill at any moment leaves the old state or the new one, nothing between."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from chabok.errors import ResourceError

_UNITS = {"": 1, "B": 1, "K": 10**3, "KB": 10**3, "M": 10**6, "MB": 10**6, "G": 10**9, "GB": 10**9}
_UNITS |= {"T": 10**12, "TB": 10**12, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def format_bytes(n: float) -> str:
    """A size for people, e.g. ``"1.1 GB"``."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "bytes" or n >= 100 else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} TB"


def parse_bytes(text: str, name: str) -> int:
    """The size that ``text`` means, e.g. ``"20GB"``; ``name`` is the setting it came from."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ResourceError(f"{name}={text!r} is not a size; write bytes or, for example, 20GB")
    return int(float(match[1]) * unit)


def free_bytes(path: Path) -> int:
    """What an ordinary user can still write on the disk that holds ``path``, which need not exist yet."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


@contextlib.contextmanager
def explained(doing: str, path: Path) -> Iterator[None]:
    """Turn an OSError met while ``doing`` something at ``path`` into a ResourceError that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "no room left on the disk; free some, or set CHABOK_CACHE to a folder on another disk"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            hint = "it cannot be written to; set CHABOK_CACHE to a folder that can"
        else:
            hint = str(error.strerror or error)
        raise ResourceError(f"{doing} in {path}: {hint}") from error


@contextlib.contextmanager
def locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file ``path`` across processes; calls ``waiting`` once if another holds it.

    The operating system lets go of the lock when its holder dies, so there are no stale locks.
    """
    from filelock import FileLock, Timeout

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        waiting()
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def is_locked(path: Path) -> bool:
    """Whether some process holds the lock file ``path`` now."""
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    lock.release()
    return False


def sync_directory(path: Path) -> None:
    """Make renames inside ``path`` survive a power cut."""
    if os.name == "nt":  # directories cannot be opened there
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def discard(folder: Path) -> None:
    """Remove a folder such that nobody ever sees half of it; quietly leave what cannot be removed.

    Processes that have its files mapped keep their view.
    """
    trash = folder.with_name(f".trash-{secrets.token_hex(8)}")
    with contextlib.suppress(OSError):
        folder.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)


def sweep_trash(folder: Path) -> None:
    """Finish removals in ``folder`` that were killed half way."""
    for trash in folder.glob(".trash-*"):
        shutil.rmtree(trash, ignore_errors=True)
