"""What all downloads share: watching one grow, checking hashes, and putting finished files in place."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from chabok.checkpoints import paths
from chabok.checkpoints.installed import Receipt
from chabok.checkpoints.progress import Progress
from chabok.checkpoints.storage import format_bytes, free_bytes, sync_directory
from chabok.errors import ResourceError, SourceError

CHUNK = 1 << 20
FORGET_AFTER_S = 7 * 24 * 3600


def staging_folder(kind: str, name: str) -> Path:
    """Where a download of ``name`` is collected until it is whole; it is kept after a kill, to be continued.

    What others left there and nobody continued for a week is removed.
    """
    root = paths.models_dir() / ".staging"
    old = time.time() - FORGET_AFTER_S
    for folder in root.glob("*/*"):
        with contextlib.suppress(OSError):
            if max(path.stat().st_mtime for path in (folder, *folder.rglob("*"))) < old:
                shutil.rmtree(folder, ignore_errors=True)
    folder = root / kind / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def watched(folder: Path, what: str, total_bytes: int | None, progress: Progress) -> Iterator[None]:
    """Report how the files under ``folder`` grow while another program or library downloads into it.

    Every downloader writes to some file; watching the file works with all of them.
    """
    progress.begin(what, total_bytes)
    done = threading.Event()

    def watch() -> None:
        seen = 0
        while True:
            last = done.wait(0.1)
            size = _size_under(folder)
            if size > seen:
                progress.advance(size - seen)
                seen = size
            if last:
                return

    watcher = threading.Thread(target=watch, name="download progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        progress.end()


def _size_under(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # renamed or removed meanwhile
            if path.is_file():
                total += path.stat().st_size
    return total


def check_room(folder: Path, n_bytes: int, what: str) -> None:
    """Raise ResourceError unless ``n_bytes`` still fit on the disk of ``folder``."""
    free = free_bytes(folder)
    if n_bytes > free:
        raise ResourceError(
            f"no room for {what}: it needs {format_bytes(n_bytes)}, and {folder} has {format_bytes(free)} "
            "free; free some, or set CHABOK_CACHE to a folder on another disk"
        )


def sha256_of(path: Path, name: str, progress: Progress) -> str:
    """The SHA-256 of the file at ``path``, hexadecimal; ``name`` is shown meanwhile."""
    digest = hashlib.sha256()
    progress.begin(f"Checking {name}", path.stat().st_size)
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
                progress.advance(len(chunk))
    finally:
        progress.end()
    return digest.hexdigest()


def check_sha256(found: str, expected: str, what: str) -> None:
    """Raise SourceError if a hash is not the expected one."""
    if found != expected.lower():
        raise SourceError(
            f"{what}: its content is not what it should be (SHA-256 {found[:16]}…, not {expected[:16]}…); "
            "nothing was kept. Try again; if it happens again, the source has changed or is damaged"
        )


def put_in_place(staged: list[Path], folder: Path, receipt: Receipt) -> Path:
    """Move checked files to ``folder``, the first shard last, so that a split model shows up complete.

    Returns where the first one is now.
    """
    folder.mkdir(parents=True, exist_ok=True)
    first = folder / staged[0].name
    receipt.write(first)
    for path in reversed(staged):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        path.rename(folder / path.name)
    sync_directory(folder)
    return first
