"""What is measured: a URL, the dialect it speaks, the model, and how requests to it are sent and timed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Protocol

import msgspec

from chabok.measure.connection import Clock, Patience
from chabok.measure.failures import ExchangeError, MeasureError, StatusError
from chabok.measure.http import Client, Origin
from chabok.measure.timeline import Failure, Timeline
from chabok.measure.wire import DIALECTS, Ask, Dialect, Reader, dialect_named
from chabok.measure.wire.openai import OpenAIChat, OpenAICompletions
from chabok.measure.wire.reader import refused

KEYS = {"anthropic": "ANTHROPIC_API_KEY", "openai": "OPENAI_API_KEY", "ollama": "OLLAMA_API_KEY"}
"""Environment variables that hold a key, by how a dialect's name begins; only for the vendor's own host."""
VENDORS = {"api.openai.com": "openai", "api.anthropic.com": "anthropic", "ollama.com": "ollama"}
PROBE = Patience(connect_s=3.0, headers_s=10.0, idle_s=10.0, total_s=20.0)
"""Time limits of the trivial calls that find out what an endpoint is."""


Messages = tuple[Mapping[str, Any], ...]
"""As in OpenAI's chat: ``role`` and ``content``."""


class Target(Protocol):
    """What can be measured: an endpoint, or a model without a server that is asked in the same way."""

    @property
    def url(self) -> str:
        """Where it is."""

    @property
    def model(self) -> str:
        """The name of the model."""

    def client(self) -> Any:
        """What ``time`` takes: a pool of connections with ``warm`` and ``close``; a context manager."""

    def ask(self, prompt: str, output_tokens: int, *, exact: bool = True, messages: Messages = ()) -> Ask:
        """A request for an answer to a prompt, or to the last of several messages."""

    async def time(self, client: Any, ask: Ask, timeline: Timeline, start: float) -> Timeline:
        """Send a request, and write what happens into its timeline."""

    async def round_trip(self, client: Any) -> float | None:
        """Seconds of a trivial call."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go and in which dialect.

    base: path before the dialect's own, such as ``/openai``; mostly empty. model: may be empty where the
    server does not mind. headers: sent with every request. verify: False accepts any certificate. notes: what
    finding it out had to choose.
    """

    origin: Origin
    dialect: Dialect
    model: str = ""
    base: str = ""
    key: str = field(default="", repr=False)
    headers: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    patience: Patience = field(default_factory=Patience)
    verify: bool = True
    server: str = ""
    notes: tuple[str, ...] = ()

    @classmethod
    def at(
        cls,
        url: str,
        *,
        dialect: str = "openai-chat",
        model: str = "",
        key: str = "",
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
        patience: Patience | None = None,
        verify: bool = True,
    ) -> Endpoint:
        """An endpoint whose dialect is known; asks nothing of the network.

        ``url`` may be the server's, its ``/v1``, or that of a method: ``.../v1/chat/completions`` says the
        dialect, too. ``extra``: fields added to every body. MeasureError: not a usable URL, key or header.
        """
        origin, path = Origin.of(url)
        spoken = dialect_named(dialect)
        for each in DIALECTS.values():
            if path.endswith(each.path):
                spoken, path = each, path.removesuffix(each.path)
        version = "/" + spoken.path.split("/")[1]  # /v1 or /api, which the dialect's path begins with
        path = path.removesuffix(version)
        if origin.host == "api.openai.com":
            strict: list[Dialect] = [OpenAIChat(True), OpenAICompletions(True)]
            spoken = next((each for each in strict if each.name == spoken.name), spoken)
        if not key and origin.host in VENDORS:  # a key goes to its vendor alone
            key = os.environ.get(KEYS[VENDORS[origin.host]], "")
        for name, value in [("API key", key), *(headers or {}).items()]:
            if any(not 32 <= ord(letter) < 127 for letter in name + value):
                raise MeasureError(f"the {name} header must be plain ASCII on one line")
        return cls(
            origin,
            spoken,
            model,
            path,
            key,
            dict(headers or {}),
            dict(extra or {}),
            patience or Patience(),
            verify,
        )

    @property
    def url(self) -> str:
        """The URL of the method that is measured."""
        return f"{self.origin}{self.base}{self.dialect.path}"

    def client(self, patience: Patience | None = None) -> Client:
        """A pool of connections to it."""
        return Client(self.origin, patience=patience or self.patience, verify=self.verify)

    def request_headers(self) -> dict[str, str]:
        """The headers of a request."""
        return self.dialect.headers(self.key) | dict(self.headers)

    def ask(self, prompt: str, output_tokens: int, *, exact: bool = True, messages: Messages = ()) -> Ask:
        """A request for an answer to a prompt, or to the last of several messages."""
        return Ask(self.model, prompt, messages, output_tokens, exact, extra=self.extra)

    async def time(self, client: Client, ask: Ask, timeline: Timeline, start: float) -> Timeline:
        """Send a request, and write what happens into its timeline; never raises ExchangeError.

        start: perf_counter instant from which the timeline's instants count.
        """
        body = msgspec.json.encode(self.dialect.body(ask))
        reader = Reader(self.dialect, timeline, start)
        clock = Clock()
        error: ExchangeError | None = None
        try:
            await client.send(
                "POST", self.base + self.dialect.path, self.request_headers(), body, reader, clock
            )
        except ExchangeError as found:
            error = found
        except asyncio.CancelledError:
            _instants(timeline, clock, start)
            timeline.failure = Failure("cancelled", "the run was stopped before the answer was complete")
            raise
        _instants(timeline, clock, start)
        reader.close(error)
        return timeline

    async def get(self, client: Client, path: str) -> Any:
        """The JSON of a GET below the base; StatusError and its like if there is none."""
        found = await client.fetch("GET", self.base + path, self.request_headers())
        return _decoded(found.status, found.headers, bytes(found.content))

    async def post(self, client: Client, path: str, body: object) -> Any:
        """The JSON that a POST below the base answers; StatusError and its like if there is none."""
        content = msgspec.json.encode(body)
        found = await client.fetch("POST", self.base + path, self.request_headers(), content)
        return _decoded(found.status, found.headers, bytes(found.content))

    async def round_trip(self, client: Client, times: int = 5) -> float | None:
        """Seconds of a trivial call on a warm connection, the least of a few; None if it cannot be told."""
        path = self.base + ("/api/version" if self.dialect.lines else "/v1/models")
        best: float | None = None
        try:
            for _ in range(times + 1):
                began = perf_counter()
                clock = await client.send("GET", path, self.request_headers(), b"", _Ignore())
                if clock.connect_s == 0 and clock.headers is not None:
                    took = clock.headers - began
                    best = took if best is None else min(best, took)
        except ExchangeError:
            return best
        return best


class _Ignore:
    """A receiver to which the content does not matter."""

    finished = False

    def head(self, at: float, status: int, headers: Mapping[str, str]) -> None:
        pass

    def body(self, at: float, data: bytes) -> None:
        pass


def _instants(timeline: Timeline, clock: Clock, start: float) -> None:
    timeline.connect_s = clock.connect_s
    timeline.sent = None if clock.sent is None else round(clock.sent - start, 7)
    timeline.done = round((clock.done if clock.done is not None else perf_counter()) - start, 7)


def _decoded(status: int, headers: Mapping[str, str], content: bytes) -> Any:
    if not 200 <= status < 300:
        raise refused(status, headers, content)
    try:
        return msgspec.json.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise MeasureError("the answer is not JSON; is the URL that of an API?") from None


async def detect(url: str, *, dialect: str = "", model: str = "", **options: Any) -> Endpoint:
    """Find out what answers at a URL: its dialect and its models, unless they are given.

    Ollama is asked in its own dialect, which tells durations; everything else in OpenAI's, if it has that.
    MeasureError: nothing that is known answers there; says why and what to try.
    """
    first = Endpoint.at(url, dialect=dialect or "openai-chat", model=model, **options)
    _, path = Origin.of(url)
    stated = bool(dialect) or any(path.endswith(each.path) for each in DIALECTS.values())
    async with first.client(PROBE) as client:
        if not stated:
            first = replace(first, dialect=await _dialect(first, client))
        names, server = await _models(first, client)
    notes: list[str] = []
    if not model:
        if not names:
            raise MeasureError(f"{first.origin} does not say which models it has; name one with --model")
        model = names[0]
        if len(names) > 1:
            more = ", ".join(names[1:6]) + (", ..." if len(names) > 6 else "")
            notes.append(f"measuring {model}; there are also {more} (--model)")
    elif names and model not in names and not any(name.split(":")[0] == model for name in names):
        notes.append(f"{first.origin} does not list {model!r}; it lists {', '.join(names[:5])}")
    return replace(first, model=model, server=server, notes=tuple(notes))


async def _dialect(endpoint: Endpoint, client: Client) -> Dialect:
    if endpoint.origin.host == "api.anthropic.com":
        return dialect_named("anthropic")
    home = await client.fetch("GET", endpoint.base + "/")
    if b"Ollama is running" in home.content[:200] and not await _owned_by_chabok(endpoint, client):
        return dialect_named("ollama-chat")
    try:
        await endpoint.get(client, "/v1/models")
    except StatusError as error:
        if error.status in (401, 403, 429) or error.status >= 500:
            raise MeasureError(f"{endpoint.origin}: {error}") from None
        anthropic = replace(endpoint, dialect=dialect_named("anthropic"))
        try:
            await anthropic.post(client, "/v1/messages", {})
        except StatusError as refusal:
            if refusal.status == 400:  # it knows the method, and misses the fields
                return anthropic.dialect
        except MeasureError:
            pass
        raise MeasureError(
            f"{endpoint.origin} answers, but offers no API that is known here (GET /v1/models: {error}); "
            "give the whole URL of the method, or --dialect"
        ) from None
    except ExchangeError:
        raise
    except MeasureError as error:
        raise MeasureError(f"{endpoint.origin}/v1/models: {error}") from None
    return endpoint.dialect


async def _owned_by_chabok(endpoint: Endpoint, client: Client) -> bool:
    """Chabok answers Ollama's clients, too; asked as OpenAI's it tells more and can force a length."""
    try:
        listed = await endpoint.get(client, "/v1/models")
        return any(each.get("owned_by") == "chabok" for each in listed["data"])
    except (MeasureError, KeyError, TypeError, AttributeError):
        return False


async def _models(endpoint: Endpoint, client: Client) -> tuple[list[str], str]:
    """Names of the models that are served, and the name of the server software, as far as it tells."""
    try:
        if endpoint.dialect.lines:
            loaded = (await endpoint.get(client, "/api/ps")).get("models") or []
            known = (await endpoint.get(client, "/api/tags")).get("models") or []
            names = list(dict.fromkeys(each["name"] for each in [*loaded, *known]))
            return names, "ollama"
        listed = (await endpoint.get(client, "/v1/models"))["data"]
        return [each["id"] for each in listed], str(listed[0].get("owned_by", "")) if listed else ""
    except StatusError as error:
        if error.status in (401, 403):
            raise
        return [], ""
    except (MeasureError, KeyError, TypeError, AttributeError, IndexError):
        return [], ""
