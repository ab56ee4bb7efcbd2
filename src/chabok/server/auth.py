"""API keys: who asks, what they may do, and how much of it.

A key is ``ck-ID-SECRET``: the id finds its entry in the file, the secret is 256 random bits. The file keeps
only sha256(salt + secret). A slow hash (scrypt, argon2) makes guessing passwords expensive, which people
choose and which therefore can be guessed; 2**256 equally likely secrets cannot be, however fast the hash, and
a slow one would only make refusing strangers expensive for the server.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from chabok.server.errors import RefusedError
from chabok.server.keyfile import Entry, Limits, digest_of, read_keys, state_of
from chabok.server.settings import SettingsError

if TYPE_CHECKING:
    from chabok.engine.timings import Timings
    from chabok.server.record import Record

log = logging.getLogger("chabok.server")

ENVIRONMENT = "CHABOK_API_KEY"
"""A single key without limits, for containers; at least this long:"""
LEAST_CHARACTERS = 16

LOOK_S = 1.0
"""How often, at most, the file of keys is looked at for changes."""

_KEY = re.compile(r"ck-([0-9a-f]{12})-([A-Za-z0-9_-]{43})")
_NOBODY = ("0" * 32, "0" * 64)


class Bucket:
    """A limit on a sum over time: so much in each ``period_s``, refilled steadily (a token bucket)."""

    def __init__(self, most: float, period_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.most, self.period_s = most, period_s
        self._left, self._at, self._clock = most, clock(), clock

    def wait_s(self, n: float = 1.0) -> float:
        """Seconds until n may be taken; 0 if now."""
        now = self._clock()
        self._left = min(self.most, self._left + (now - self._at) * self.most / self.period_s)
        self._at = now
        return max(n - self._left, 0.0) * self.period_s / self.most

    def take(self, n: float) -> None:
        """Take n; what is not there is owed."""
        self.wait_s()
        self._left -= n


@dataclass(eq=False)
class Account:
    """What a key has used; lives on when the file is read again."""

    running: int = 0
    buckets: dict[str, Bucket] = field(default_factory=dict)

    def apply(self, limits: Limits, clock: Callable[[], float]) -> None:
        """Have the limits hold from now on; what was used within unchanged ones stays used."""
        periods = {"requests_per_minute": 60.0, "tokens_per_minute": 60.0, "tokens_per_day": 86400.0}
        for name, period_s in periods.items():
            most = getattr(limits, name)
            if most is None:
                self.buckets.pop(name, None)
            elif name not in self.buckets or self.buckets[name].most != most:
                self.buckets[name] = Bucket(most, period_s, clock)


@dataclass(eq=False)
class Caller:
    """Who sends a request.

    name: of the key, "" where none is asked for; the engine is shared fairly between names. salt: cached
    prefixes are shared between callers of the same salt. deadline: instant of perf_counter() by which the
    request shall have ended. record: where what it did is noted.
    """

    name: str = ""
    salt: str = ""
    limits: Limits = field(default_factory=Limits)
    account: Account = field(default_factory=Account)
    deadline: float | None = None
    record: Record | None = None

    def check_model(self, *names: str) -> None:
        """Raise RefusedError (403) unless the caller may use the model of these names."""
        if not self.may_use(*names):
            allowed = ", ".join(self.limits.models)
            raise RefusedError(
                403,
                f"the key {self.name!r} may not use {names[0]!r}; it may use {allowed}",
                "model_not_allowed",
            )

    def may_use(self, *names: str) -> bool:
        """Whether the caller may use the model of these names."""
        allowed = {name.lower() for name in self.limits.models}
        return not allowed or any(name.lower() in allowed for name in names)

    def capped(self, priority: int) -> int:
        """The priority that a request gets which asks for one."""
        highest = self.limits.priority
        return priority if highest is None else min(priority, highest)

    def begin(self, model: str, prompt_tokens: int) -> None:
        """A prompt of the caller is handed to a model: note it and count it."""
        if self.record is not None:
            self.record.begin(model, prompt_tokens)
        self._spend(prompt_tokens)

    def ended(self, timings: Timings, reason: str) -> None:
        """One of the answers ended, or the caller left it: note it and count it."""
        if self.record is not None:
            self.record.took(timings, reason)
        self._spend(timings.output_tokens)

    def failed(self, error: BaseException) -> None:
        """A request failed after its answer had begun; what kind of error it was is noted, not its text,
        which may quote what was said.
        """
        if self.record is not None:
            self.record.error = type(error).__name__

    def _spend(self, tokens: int) -> None:
        for name in ("tokens_per_minute", "tokens_per_day"):
            if name in self.account.buckets:
                self.account.buckets[name].take(tokens)


ANYBODY = Caller()
CALLER: ContextVar[Caller] = ContextVar("caller", default=ANYBODY)
"""Who asks in this task. The roster looks here whether a model may be used: no interface can forget to."""


class Keys:
    """The keys that open this server: the file's, which may change while it runs, and the environment's.

    Raises SettingsError for a file that is wrong when it is first read; later ones keep what was, and log.
    """

    def __init__(
        self,
        path: Path | None,
        environment: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path, self._clock = path, clock
        self._looked = -LOOK_S
        self._seen: tuple[int, int, int] | None = None
        self._entries: dict[str, Entry] = {}
        self._accounts: dict[str, Account] = {}
        single = (os.environ if environment is None else environment).get(ENVIRONMENT, "")
        if single and len(single) < LEAST_CHARACTERS:
            raise SettingsError(
                f"{ENVIRONMENT} must have at least {LEAST_CHARACTERS} characters; "
                "a good one is made by `openssl rand -hex 32`"
            )
        self._single = hashlib.sha256(single.encode()).digest() if single else None
        if path is not None:
            self._seen = state_of(path)
            self._take(read_keys(path))

    def __bool__(self) -> bool:
        """Whether a key is needed."""
        return self._path is not None or self._single is not None

    def __len__(self) -> int:
        return len(self._entries) + (self._single is not None)

    def caller(self, key: str | None) -> Caller:
        """Who has this key; raises RefusedError (401)."""
        self._renew()
        if not key:
            raise RefusedError(
                401,
                "this server needs an API key: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                "missing_api_key",
                {"WWW-Authenticate": "Bearer"},
            )
        if self._single is not None and hmac.compare_digest(
            hashlib.sha256(key.encode("utf-8", "replace")).digest(), self._single
        ):
            return Caller("environment", "environment", account=self._account("environment", Limits()))
        match = _KEY.fullmatch(key)
        entry = self._entries.get(match[1]) if match else None
        secret = match[2] if match else ""
        # Somebody who is not known takes as long as somebody who is.
        salt, digest = (entry.salt, entry.digest) if entry else _NOBODY
        if not hmac.compare_digest(digest_of(salt, secret), digest) or entry is None:
            raise RefusedError(
                401, "this API key is not known here", "invalid_api_key", {"WWW-Authenticate": "Bearer"}
            )
        limits = entry.limits
        salt = f"group {limits.prefixes}" if limits.prefixes else f"key {entry.name}"
        return Caller(entry.name, salt, limits, self._account(entry.name, limits))

    def reload(self) -> None:
        """Read the file again, now; a file that is wrong changes nothing and is logged."""
        if self._path is None:
            return
        try:
            self._seen = state_of(self._path)
            self._take(read_keys(self._path))
            log.info("%d keys read from %s", len(self._entries), self._path)
        except (SettingsError, OSError) as error:
            log.error("the keys stay as they were: %s", error)

    def _renew(self) -> None:
        now = self._clock()
        if self._path is None or now - self._looked < LOOK_S:
            return
        self._looked = now
        try:
            changed = state_of(self._path) != self._seen
        except OSError as error:
            if self._seen is not None:
                log.error("%s: %s; the keys stay as they were", self._path, error.strerror)
                self._seen = None
            return
        if changed:
            self.reload()

    def _take(self, entries: dict[str, Entry]) -> None:
        self._entries = entries
        for entry in entries.values():
            self._account(entry.name, entry.limits)

    def _account(self, name: str, limits: Limits) -> Account:
        account = self._accounts.setdefault(name, Account())
        account.apply(limits, self._clock)
        return account


class Admission:
    """Counts a caller's request while it runs: ``with Admission(caller):``; raises RefusedError (429)."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    def __enter__(self) -> None:
        account, limits = self._caller.account, self._caller.limits
        if limits.concurrent is not None and account.running >= limits.concurrent:
            raise _too_much(f"{limits.concurrent} requests at a time", 1.0)
        for name, what in (
            ("tokens_per_day", "tokens in 24 hours"),
            ("tokens_per_minute", "tokens in a minute"),
            ("requests_per_minute", "requests in a minute"),
        ):
            bucket = account.buckets.get(name)
            if bucket is not None:
                wait_s = bucket.wait_s()
                if wait_s > 0:
                    raise _too_much(f"{bucket.most:g} {what}", wait_s)
        if "requests_per_minute" in account.buckets:
            account.buckets["requests_per_minute"].take(1)
        account.running += 1

    def __exit__(self, *_: object) -> None:
        self._caller.account.running -= 1


def _too_much(limit: str, wait_s: float) -> RefusedError:
    import math

    seconds = max(1, math.ceil(wait_s))
    return RefusedError(
        429,
        f"this key is limited to {limit}; try again in {seconds} s",
        "rate_limit_exceeded",
        {"Retry-After": str(seconds)},
    )


def given_key(headers: list[tuple[bytes, bytes]]) -> str | None:
    """The key of a request: of Authorization (Bearer), which OpenAI's clients send, or x-api-key."""
    found: str | None = None
    for name, value in headers:
        if name == b"authorization":
            kind, _, key = value.decode("latin-1").strip().partition(" ")
            if kind.lower() == "bearer":
                return key.strip()
        elif name == b"x-api-key":
            found = value.decode("latin-1").strip()
    return found
