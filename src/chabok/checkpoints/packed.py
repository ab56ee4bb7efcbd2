"""Weights in the layout of the kernels, kept on disk, mapped, and shared by processes.

A packed model is a folder ``<root>/<key>/``: ``weights.bin`` holds the arrays, each at a multiple of 4096
bytes, and ``manifest.json`` says what they are, and carries its own checksum; ``written`` has the time of
weights.bin, so that its checksums are compared again once it was changed. The folder is written under another
name, synced, and renamed, so that it is either whole or not there. What the arrays mean is not
known here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import mmap
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from chabok.checkpoints import paths
from chabok.checkpoints.progress import Progress, Silent
from chabok.checkpoints.storage import (
    discard,
    explained,
    format_bytes,
    free_bytes,
    is_locked,
    locked,
    parse_bytes,
    sweep_trash,
    sync_directory,
)
from chabok.compute.memory import anonymous
from chabok.errors import ResourceError

FORMAT_VERSION = 1
ALIGNMENT = 4096
DEFAULT_LIMIT = 20 * 10**9
_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PackedEntry:
    """One array to pack: ``fill`` writes all ``n_bytes`` of the uint8 array it is given."""

    name: str
    n_bytes: int
    fill: Callable[[np.ndarray], None]


class PackedFile:
    """The arrays of a packed model by name, uint8 and read-only, and the ``meta`` given when it was made."""

    def __init__(
        self,
        arrays: Mapping[str, np.ndarray],
        meta: dict[str, Any],
        path: Path | None,
        checksums: dict[str, int],
    ) -> None:
        """``path``: its folder, None in memory; ``checksums``: the CRC-32 of each array on disk."""
        self.arrays = arrays
        self.meta = meta
        self.path = path
        self._checksums = checksums

    @property
    def n_bytes(self) -> int:
        """Bytes of all arrays, without padding."""
        return sum(array.nbytes for array in self.arrays.values())

    def verify(self) -> list[str]:
        """Read everything; the names of the arrays that are not what was written to disk."""
        return [name for name, crc in self._checksums.items() if zlib.crc32(self.arrays[name].data) != crc]


def in_memory(
    entries: Iterable[PackedEntry], source: dict[str, Any], progress: Progress | None = None
) -> PackedFile:
    """Pack into anonymous memory, for this process only."""
    entries = list(entries)
    progress = progress or Silent()
    offsets, total = _layout(entries)
    memory = anonymous(total)
    arrays: dict[str, np.ndarray] = {}
    progress.begin("Preparing weights", sum(entry.n_bytes for entry in entries))
    try:
        for entry, offset in zip(entries, offsets):
            array = np.frombuffer(memory, np.uint8, entry.n_bytes, offset)
            entry.fill(array)
            array.flags.writeable = False
            arrays[entry.name] = array
            progress.advance(entry.n_bytes)
    finally:
        progress.end()
    return PackedFile(arrays, source, None, {})


def load(
    store: PackedStore | None,
    key: str,
    entries: Callable[[], Sequence[PackedEntry]],
    source: dict[str, Any],
    progress: Progress | None = None,
) -> PackedFile:
    """The packed model ``key``: from ``store`` if it is there, else packed now and kept.

    Without a store, or where the disk cannot take it, it is packed into memory; the latter logs a warning
    that says why, since every start will then pay for packing again.
    """
    if store is None:
        return in_memory(entries(), source, progress)
    found = store.open(key)
    if found is not None:
        return found
    try:
        return store.create(key, entries(), source, progress)
    except ResourceError as error:
        log.warning("%s. Packing into memory instead, at every start.", error)
        return in_memory(entries(), source, progress)


class PackedStore:
    """The packed models under ``root``, bounded in total; the least recently used ones make room."""

    def __init__(self, root: Path | None = None, limit_bytes: int | None = None) -> None:
        """``limit_bytes`` defaults to ``$CHABOK_PACK_LIMIT``, or 20 GB but at most half of the free disk."""
        self.root = root or paths.packed_dir()
        self._limit = limit_bytes

    @property
    def limit_bytes(self) -> int:
        """The most that all packed models together may take."""
        if self._limit is not None:
            return self._limit
        chosen = os.environ.get("CHABOK_PACK_LIMIT")
        if chosen:
            return parse_bytes(chosen, "CHABOK_PACK_LIMIT")
        return min(DEFAULT_LIMIT, (free_bytes(self.root) + sum(self.sizes().values())) // 2)

    def sizes(self) -> dict[str, int]:
        """Bytes of each packed model by key, the least recently used first."""
        found: list[tuple[float, str, int]] = []
        if self.root.is_dir():
            for folder in self.root.iterdir():
                if _KEY.fullmatch(folder.name):
                    with contextlib.suppress(OSError):  # removed meanwhile
                        used = (folder / "manifest.json").stat().st_mtime
                        found.append((used, folder.name, (folder / "weights.bin").stat().st_size))
        return {key: size for _, key, size in sorted(found)}

    def sizes_of(self, fingerprint: str) -> dict[str, int]:
        """Bytes by key of all packed forms of one model; their keys begin with its fingerprint."""
        return {key: size for key, size in self.sizes().items() if key.startswith(fingerprint)}

    def open(self, key: str) -> PackedFile | None:
        """Map the packed model ``key``; None if it is not there. A damaged or outdated one is discarded."""
        folder = self._folder(key)
        try:
            manifest = (folder / "manifest.json").read_bytes()
            with (folder / "weights.bin").open("rb") as file:
                state = os.fstat(file.fileno())
                size = state.st_size
                weights = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else None
        except FileNotFoundError:
            if folder.is_dir():  # a folder is renamed into place whole: somebody took a file out
                discard(folder)
            return None
        except OSError as error:
            log.warning("The packed weights in %s cannot be read (%s); packing again.", folder, error)
            return None
        try:
            packed = _mapped(manifest, weights, size, folder)
            if not _untouched(folder, state):
                log.warning("The packed weights in %s changed after they were kept; checking them.", folder)
                if damaged := packed.verify():
                    raise ValueError(f"array '{damaged[0]}' is not what was written")
                _note_time(folder, state)
        except (ValueError, KeyError, TypeError) as error:
            log.warning(
                "The packed weights in %s are damaged or outdated (%s); packing again.", folder, error
            )
            discard(folder)
            return None
        with contextlib.suppress(OSError):  # the cache may be read-only
            os.utime(folder / "manifest.json")
        return packed

    def create(
        self,
        key: str,
        entries: Sequence[PackedEntry],
        source: dict[str, Any],
        progress: Progress | None = None,
    ) -> PackedFile:
        """Pack ``entries`` and keep them; if another process is doing just that, wait and use its result.

        ``source`` is kept as ``meta``: anything JSON can hold. Raises ResourceError if the disk has no
        room, the limit is too small, or the folder cannot be written.
        """
        progress = progress or Silent()
        folder = self._folder(key)
        with explained("Keeping packed weights", self.root):
            waiting = "Another process is preparing the same weights; waiting for it."
            with locked(self._lock(key), lambda: progress.say(waiting)):
                done = self.open(key)
                if done is not None:
                    return done
                self._sweep(key)
                self._make_room(_layout(entries)[1])
                temporary = self.root / f".{key}.tmp"
                try:
                    self._write(temporary, entries, source, progress)
                    temporary.rename(folder)
                except BaseException:
                    shutil.rmtree(temporary, ignore_errors=True)
                    raise
                sync_directory(self.root)
        packed = self.open(key)
        if packed is None:
            raise ResourceError(f"the packed weights in {folder} disappeared right after they were written")
        return packed

    def remove(self, key: str) -> int:
        """Forget the packed model ``key``; returns the bytes freed."""
        size = self.sizes().get(key, 0)
        discard(self._folder(key))
        return size

    def _folder(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise ValueError(f"not a key: {key!r}")
        return self.root / key

    def _lock(self, key: str) -> Path:
        return self.root / ".locks" / f"{key}.lock"

    def _sweep(self, key: str) -> None:
        """Remove what killed processes left: ours is safe under our lock, others' if nobody holds theirs."""
        sweep_trash(self.root)
        for temporary in self.root.glob(".*.tmp"):
            owner = temporary.name[1 : -len(".tmp")]
            if owner == key or not is_locked(self._lock(owner)):
                shutil.rmtree(temporary, ignore_errors=True)

    def _make_room(self, n_bytes: int) -> None:
        limit = self.limit_bytes
        if n_bytes > limit:
            raise ResourceError(
                f"The packed weights take {format_bytes(n_bytes)}, more than the limit of "
                f"{format_bytes(limit)} for {self.root}; raise it with CHABOK_PACK_LIMIT"
            )
        sizes = self.sizes()
        kept = sum(sizes.values())
        for key, size in sizes.items():
            if kept + n_bytes <= limit and free_bytes(self.root) > n_bytes:
                break
            log.info("Removing packed weights not used for longest: %s (%s)", key, format_bytes(size))
            kept -= self.remove(key)
        if free_bytes(self.root) <= n_bytes:
            raise ResourceError(
                f"No room for {format_bytes(n_bytes)} of packed weights in {self.root} "
                f"({format_bytes(free_bytes(self.root))} free); free some or set CHABOK_CACHE to another disk"
            )

    def _write(
        self, folder: Path, entries: Sequence[PackedEntry], source: dict[str, Any], progress: Progress
    ) -> None:
        folder.mkdir()
        offsets, total = _layout(entries)
        buffer = np.empty(max((entry.n_bytes for entry in entries), default=0), np.uint8)
        listing: dict[str, list[int]] = {}
        progress.begin("Preparing weights", sum(entry.n_bytes for entry in entries))
        try:
            with (folder / "weights.bin").open("xb") as file:
                for entry, offset in zip(entries, offsets):
                    array = buffer[: entry.n_bytes]
                    entry.fill(array)
                    # Plain writes rather than a writable map: a full disk is then an error, not a signal.
                    file.seek(offset)
                    file.write(array.data)
                    listing[entry.name] = [offset, entry.n_bytes, zlib.crc32(array.data)]
                    progress.advance(entry.n_bytes)
                file.truncate(total)
                file.flush()
                os.fsync(file.fileno())
        finally:
            progress.end()
        if len(listing) != len(entries):
            raise ValueError("two packed arrays have the same name")
        _note_time(folder, (folder / "weights.bin").stat())
        body = {"version": FORMAT_VERSION, "size": total, "arrays": listing, "meta": source}
        with (folder / "manifest.json").open("xb") as file:
            file.write(json.dumps({"checksum": _checksum(body), **body}).encode())
            file.flush()
            os.fsync(file.fileno())
        sync_directory(folder)


def _layout(entries: Sequence[PackedEntry]) -> tuple[list[int], int]:
    """Where each array starts, and the size of the file."""
    offsets: list[int] = []
    at = 0
    for entry in entries:
        offsets.append(at)
        at += -(-entry.n_bytes // ALIGNMENT) * ALIGNMENT
    return offsets, at


def _untouched(folder: Path, state: os.stat_result) -> bool:
    """Whether weights.bin has the time it had when its content was last known to be right.

    Reading all of it to compare checksums takes seconds, so that is done only if something wrote to it.
    """
    try:
        return (folder / "written").read_text() == str(state.st_mtime_ns)
    except (OSError, UnicodeDecodeError):
        return False


def _note_time(folder: Path, state: os.stat_result) -> None:
    with contextlib.suppress(OSError):  # the cache may be read-only
        (folder / "written").write_text(str(state.st_mtime_ns))


def _checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _mapped(manifest: bytes, weights: mmap.mmap | None, size: int, folder: Path) -> PackedFile:
    """The arrays as the manifest says; ValueError, KeyError or TypeError if it cannot be true."""
    body = json.loads(manifest)
    if not isinstance(body, dict) or body.pop("checksum", None) != _checksum(body):
        raise ValueError("the checksum of its manifest is wrong")
    if body["version"] != FORMAT_VERSION:
        raise ValueError(f"format version {body['version']}")
    if body["size"] != size:
        raise ValueError(f"weights.bin has {size:,} bytes instead of {body['size']:,}")
    arrays: dict[str, np.ndarray] = {}
    checksums: dict[str, int] = {}
    for name, (offset, n_bytes, checksum) in body["arrays"].items():
        if offset % ALIGNMENT or offset < 0 or n_bytes < 0 or offset + n_bytes > size:
            raise ValueError(f"array '{name}' lies outside weights.bin")
        if weights is None or n_bytes == 0:
            arrays[name] = np.empty(0, np.uint8)
        else:
            arrays[name] = np.frombuffer(weights, np.uint8, n_bytes, offset)
        checksums[name] = checksum
    return PackedFile(arrays, body["meta"], folder, checksums)
