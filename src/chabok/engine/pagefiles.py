"""Pages of keys and values as files, one each, for the next start of a model and for other processes.

``<root>/<model>/<name>`` holds a header of 120 bytes and the bytes of a page:

    8s magic   u32 format version   u32 header bytes   u64 page bytes
    32s identity of the model and of its pages' layout   32s tag of the page's key   32s SHA-256 of all else

A file is written under another name and renamed, and not synced: what a power cut leaves behind fails its
checksum like any other damage, and is computed again. Names and tags are hashes of the keys with a secret of
the folder, so that a listing says nothing about who asked what, or whose prompts are alike. Several processes
may use one folder: files are whole or not there, and each process counts what all of them keep.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import shutil
import stat
import struct
import time
from hashlib import blake2b, sha256
from pathlib import Path

from chabok.checkpoints import paths
from chabok.checkpoints.storage import free_bytes, parse_bytes

FORMAT_VERSION = 1
DEFAULT_LIMIT = 4 * 10**9
DISK_SHARE = 4
"""The default limit is at most this fraction of what is free, the pages already there included."""

STALE_S = 60.0
"""Age of a temporary file whose writer must be dead: writing one takes milliseconds."""

_MAGIC = b"chabokKV"
_FIXED = struct.Struct("<8sIIQ32s32s")
_DIGEST = 32
HEADER_BYTES = _FIXED.size + _DIGEST
_NAME = re.compile(r"[0-9a-f]{32}")
_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.tmp")
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)

log = logging.getLogger(__name__)


class PageFiles:
    """The page files of one model.

    Reading is safe from any thread; writing, touching and scanning belong to one thread at a time.
    """

    def __init__(
        self,
        fingerprint: str,
        layout: str,
        page_bytes: int,
        *,
        root: Path | None = None,
        limit_bytes: int | None = None,
    ) -> None:
        """fingerprint: of the model; layout: whatever else decides what the bytes of a page mean.

        limit_bytes: most that the pages of all models may take; by default ``$CHABOK_PREFIX_LIMIT``, or 4 GB
        but at most a quarter of the free disk.
        """
        self.root = root or paths.prefixes_dir()
        self.page_bytes = page_bytes
        self._identity = sha256(f"{fingerprint}\0{layout}\0{page_bytes}".encode()).digest()
        model = re.sub(r"[^A-Za-z0-9_-]", "_", fingerprint)[:64]
        self.folder = self.root / f"{model}-{self._identity.hex()[:16]}"
        chosen = os.environ.get("CHABOK_PREFIX_LIMIT")
        if limit_bytes is None and chosen:
            limit_bytes = parse_bytes(chosen, "CHABOK_PREFIX_LIMIT")
        self._limit = limit_bytes
        self._secret = b""
        self._names: set[str] = set()
        self._total = 0  # bytes of all models' files at the last scan, and of what was written since
        self._unseen = 0  # bytes written since the last scan
        self._allowed = 0
        self._complained = False

    @property
    def file_bytes(self) -> int:
        """Bytes of one file."""
        return HEADER_BYTES + self.page_bytes

    @property
    def limit_bytes(self) -> int:
        """Most that the pages of all models may take."""
        if self._limit is not None:
            return self._limit
        return min(DEFAULT_LIMIT, (free_bytes(self.root) + self._total) // DISK_SHARE)

    def open(self) -> None:
        """Make the folders, if need be, and learn which pages are there; OSError if that is not possible."""
        for folder in (self.root, self.folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_private(folder)
        self._secret = self._read_secret()
        self.look()
        self._unseen = self._allowed = 0  # scan before the first write

    def look(self) -> None:
        """Learn which pages other processes wrote or removed."""
        self._names = {name for name in os.listdir(self.folder) if _NAME.fullmatch(name)}

    @staticmethod
    def _check_private(folder: Path) -> None:
        """Keys and values tell what was asked, and whoever writes them decides what is answered."""
        state = folder.lstat()
        if not stat.S_ISDIR(state.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "is not a folder", str(folder))
        if hasattr(os, "getuid"):
            if state.st_uid != os.getuid():
                raise PermissionError(errno.EPERM, "belongs to another user", str(folder))
            if state.st_mode & 0o077:
                folder.chmod(0o700)

    def _read_secret(self) -> bytes:
        path = self.root / "secret"
        for _ in range(2):
            with contextlib.suppress(FileNotFoundError):
                found = path.read_bytes()
                if len(found) == 32:
                    return found
            temporary = self._create(self.root, [secrets.token_bytes(32)])
            os.replace(temporary, path)
            # Another process may have done the same just now: the last one's secret is everybody's.
        return path.read_bytes()

    def _tag(self, key: bytes) -> bytes:
        return blake2b(key, key=self._secret, digest_size=32).digest()

    def _path(self, name: str) -> str:
        return f"{self.folder}{os.sep}{name}"

    def has(self, key: bytes) -> bool:
        """Whether a page is there, as far as is known without asking the disk."""
        return bool(self._names) and self._tag(key).hex()[:32] in self._names

    def __len__(self) -> int:
        return len(self._names)

    # Reading, in any thread.

    def read(self, key: bytes, page: memoryview) -> bool:
        """Fill ``page`` (page_bytes, writable) with what was kept under ``key``; False if there is nothing
        that can be trusted, and its contents are then anything.

        A file that is damaged, or not what its name says, is removed.
        """
        tag = self._tag(key)
        name = tag.hex()[:32]
        path = self._path(name)
        try:
            descriptor = os.open(path, os.O_RDONLY | _NO_FOLLOW)
            with open(descriptor, "rb", buffering=0) as file:
                size = os.fstat(descriptor).st_size
                header = file.read(HEADER_BYTES)
                whole = size == self.file_bytes and _fill(file, page)
        except OSError as error:
            self._names.discard(name)
            if not isinstance(error, FileNotFoundError):
                self._complain("A page of the prefix cache cannot be read: %s", error)
            return False
        fixed = self._header(tag)
        if whole and header[: len(fixed)] == fixed:
            digest = sha256(fixed)
            digest.update(page)
            if digest.digest() == header[len(fixed) :]:
                return True
        self._names.discard(name)
        self._complain("%s in the prefix cache is damaged or outdated; computing it again.", path)
        with contextlib.suppress(OSError):
            os.unlink(path)
        return False

    def _header(self, tag: bytes) -> bytes:
        return _FIXED.pack(_MAGIC, FORMAT_VERSION, HEADER_BYTES, self.page_bytes, self._identity, tag)

    def _complain(self, message: str, what: object) -> None:
        """Once as a warning; a damaged disk would otherwise fill the log."""
        log.log(logging.INFO if self._complained else logging.WARNING, message, what)
        self._complained = True

    # Writing, in one thread.

    def write(self, key: bytes, page: memoryview, used_ns: int) -> bool:
        """Keep a page; whether it is there now. OSError if the disk cannot take it.

        used_ns: when it was last used; of pages used together, the later ones should go first.
        """
        if not self._secret:
            self.open()
        tag = self._tag(key)
        name = tag.hex()[:32]
        if name in self._names:
            self.touch(key, used_ns)
            return True
        if not self._make_room():
            return False
        fixed = self._header(tag)
        digest = sha256(fixed)
        digest.update(page)
        temporary = self._create(self.folder, [fixed + digest.digest(), page], used_ns)
        try:
            os.replace(temporary, self._path(name))
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        self._names.add(name)
        self._total += self.file_bytes
        self._unseen += self.file_bytes
        return True

    @staticmethod
    def _create(folder: Path, parts: list[bytes | memoryview], used_ns: int | None = None) -> str:
        temporary = f"{folder}{os.sep}.{secrets.token_hex(8)}.tmp"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW, 0o600)
        try:
            with open(descriptor, "wb", buffering=0) as file:
                for part in parts:
                    left = memoryview(part).cast("B")
                    while left:
                        left = left[file.write(left) :]
            if used_ns is not None:
                os.utime(temporary, ns=(used_ns, used_ns))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        return temporary

    def touch(self, key: bytes, used_ns: int) -> None:
        """Note that a page was used."""
        with contextlib.suppress(OSError):  # removed meanwhile, or read-only
            os.utime(self._path(self._tag(key).hex()[:32]), ns=(used_ns, used_ns))

    def _make_room(self) -> bool:
        need = self.file_bytes
        # Others write here, too: look again after each twentieth of the limit.
        if self._total + need > self._allowed or self._unseen > self._allowed // 20:
            found = self.scan()
            self._allowed = self.limit_bytes
            if need > self._allowed:
                return False
            # A little more than is needed, so that not every page asks for a scan.
            goal = self._allowed - max(need, self._allowed // 20)
            while self._total > goal and found:
                _, size, path = found.pop()
                with contextlib.suppress(OSError):
                    os.unlink(path)
                    self._names.discard(os.path.basename(path))
                self._total -= size
        return True

    def scan(self) -> list[tuple[int, int, str]]:
        """Look at the files of all models: (time of last use, bytes, path), the latest first.

        Removes what killed writers and old versions left.
        """
        found: list[tuple[int, int, str]] = []
        names = set()
        now = time.time()
        for folder in _folders(self.root):
            ours = folder == str(self.folder)
            for entry in _entries(folder):
                with contextlib.suppress(OSError):  # removed meanwhile
                    state = entry.stat(follow_symlinks=False)
                    if _NAME.fullmatch(entry.name):
                        found.append((state.st_mtime_ns, state.st_size, entry.path))
                        if ours:
                            names.add(entry.name)
                    elif _TEMPORARY.fullmatch(entry.name) and state.st_mtime < now - STALE_S:
                        os.unlink(entry.path)
            if not ours:
                with contextlib.suppress(OSError):  # it has pages
                    os.rmdir(folder)
        self._names = names
        self._total, self._unseen = sum(size for _, size, _ in found), 0
        found.sort(reverse=True)
        return found


def _fill(file: object, page: memoryview) -> bool:
    """Read the rest of a file into ``page``; False if it ends early."""
    at = 0
    while at < len(page):
        n = file.readinto(page[at:])  # type: ignore[attr-defined]
        if not n:
            return False
        at += n
    return True


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:  # removed meanwhile
        return []


def _folders(root: Path) -> list[str]:
    return [entry.path for entry in _entries(root) if entry.is_dir(follow_symlinks=False)]


def clear(root: Path | None = None) -> int:
    """Remove every page of every model; the bytes that were freed.

    Engines that are running find them gone and go on; they may keep others.
    """
    root = root or paths.prefixes_dir()
    freed = 0
    if root.is_dir():
        for folder in _folders(root):
            for entry in _entries(folder):
                with contextlib.suppress(OSError):  # removed meanwhile
                    freed += entry.stat(follow_symlinks=False).st_size
            shutil.rmtree(folder, ignore_errors=True)
    return freed
