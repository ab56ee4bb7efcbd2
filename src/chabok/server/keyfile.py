"""The file of API keys: read, checked, and added to. It has hashes only; a key is shown once, when made."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from chabok.errors import ResourceError
from chabok.server.kinds import setting, text, texts, whole
from chabok.server.settings import SettingsError, unknown

_NAME = re.compile(r"[A-Za-z0-9][\w.@+-]{0,63}")
_HASH = re.compile(r"sha256:([0-9a-f]{32}):([0-9a-f]{64})")


@dataclass(frozen=True)
class Limits:
    """What one key may do; None: no limit."""

    requests_per_minute: int | None = setting(None, whole(1), "requests in a minute")
    tokens_per_minute: int | None = setting(None, whole(1), "tokens of prompts and answers in a minute")
    tokens_per_day: int | None = setting(None, whole(1), "tokens of prompts and answers in 24 hours")
    concurrent: int | None = setting(None, whole(1), "requests at a time")
    priority: int | None = setting(None, whole(-100, 100), "highest priority its requests may ask for")
    models: tuple[str, ...] = setting((), texts("NAME"), "models it may use (default: all)")
    prefixes: str | None = setting(
        None, text(), "cached prefixes are shared by keys with the same word here (default: with no other)"
    )


@dataclass(frozen=True)
class Entry:
    """One key of the file."""

    name: str
    salt: str
    digest: str
    limits: Limits


def read_keys(path: Path) -> dict[str, Entry]:
    """The keys of a file by id. Raises SettingsError, which names the entry."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        absent = isinstance(error, FileNotFoundError)
        hint = f"; `chabok serve --new-key NAME --api-keys {path}` makes a key and the file" if absent else ""
        raise SettingsError(f"api_keys {path}: {error.strerror or error}{hint}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"api_keys {path}: not TOML: {error}") from None
    found: dict[str, Entry] = {}
    for name, table in tables.items():
        where = f"{path}, table [{name}]:"
        if not isinstance(table, dict):
            raise SettingsError(f"{path}: {name} must be a table, [{name}], with the id and hash of a key")
        key_id, entry = _entry(name, dict(table), where)
        if key_id in found:
            raise SettingsError(f"{where} its id is that of {found[key_id].name}, too")
        found[key_id] = entry
    return found


def _entry(name: str, table: dict[str, Any], where: str) -> tuple[str, Entry]:
    key_id, hashed = table.pop("id", None), table.pop("hash", None)
    match = _HASH.fullmatch(hashed) if isinstance(hashed, str) else None
    if not isinstance(key_id, str) or not re.fullmatch("[0-9a-f]{12}", key_id) or match is None:
        raise SettingsError(f"{where} id and hash must be as `chabok serve --new-key` writes them")
    known = {item.name: item.metadata["kind"] for item in fields(Limits)}
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in known:
            raise unknown(key, ["id", "hash", *known], where)
        try:
            values[key] = known[key].read(value)
        except ValueError as error:
            raise SettingsError(f"{where} {key} must be {error}, not {value!r:.80}", key) from None
    return key_id, Entry(name, match[1], match[2], Limits(**values))


def new_key(name: str, path: Path) -> str:
    """Add a key to the file, which is made if need be and only its owner can read; the key, this once.

    Raises SettingsError for a name that is taken or odd, ResourceError if the file cannot be written.
    """
    if not _NAME.fullmatch(name):
        raise SettingsError(f"a key's name has letters, digits and . _ @ + - (64 at most), not {name!r}")
    if path.exists() and name in {entry.name for entry in read_keys(path).values()}:
        raise SettingsError(
            f"{path} has a key called {name} already; remove its table, or choose another name"
        )
    key_id, secret, salt = secrets.token_hex(6), secrets.token_urlsafe(32), secrets.token_hex(16)
    quoted = name if re.fullmatch(r"[\w-]+", name) else f'"{name}"'
    table = f'[{quoted}]\nid = "{key_id}"\nhash = "sha256:{salt}:{digest_of(salt, secret)}"\n'
    try:
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, f"{before.rstrip()}\n\n{table}".lstrip())
    except OSError as error:
        raise ResourceError(f"{path}: {error.strerror or error}") from None
    return f"ck-{key_id}-{secret}"


def _replace(path: Path, content: str) -> None:
    """Write a file whole or not at all, keeping its permissions; a new one is for its owner alone."""
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o600
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def exposed(path: Path) -> str:
    """What is wrong with the permissions of the file of keys; "" if nothing is."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if os.name == "posix" and mode & 0o022:
        return f"{path} can be changed by others (mode {mode:o}); chmod 600 {path}"
    if os.name == "posix" and mode & 0o004:
        return f"{path} can be read by everybody (mode {mode:o}); chmod 600 {path}"
    return ""


def digest_of(salt: str, secret: str) -> str:
    """What is kept of a key, hexadecimal: SHA-256 of its salt (hexadecimal) and secret."""
    return hashlib.sha256(bytes.fromhex(salt) + secret.encode()).hexdigest()


def state_of(path: Path) -> tuple[int, int, int]:
    """What changes when a file does: time, size, inode."""
    state = path.stat()
    return state.st_mtime_ns, state.st_size, state.st_ino
