"""What Ollama's interface says of models: tags, show, ps, version, pull; the rest is refused by name.

Form: https://docs.ollama.com/api
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from starlette.routing import BaseRoute, Route

from chabok import __version__
from chabok.errors import UnknownModelError
from chabok.server import thinking
from chabok.server.bodies import Body
from chabok.server.call import Call, Endpoint
from chabok.server.errors import RefusedError, encode
from chabok.server.ollama_bodies import PullBody, ShowBody, name_of

if TYPE_CHECKING:
    from chabok.server.entries import ModelEntry

VERSION = "0.12.0"
"""The version of Ollama whose interface this is; clients compare it to know what they may ask for."""

FOREVER = "2300-01-01T00:00:00Z"
"""When a model expires that stays loaded."""

_SHOW = Body(ShowBody)
_PULL = Body(PullBody)

_REFUSED = {
    "/api/create": "models are not made here; set system text and sampling in the server's configuration",
    "/api/copy": "models are not copied here; give one another name in the server's configuration (aliases)",
    "/api/delete": "models are not deleted through the server; `chabok rm` does it",
    "/api/push": "models are not published from here",
    "/api/embed": "embeddings are not supported",
    "/api/embeddings": "embeddings are not supported",
}


def routes() -> list[BaseRoute]:
    """The paths that are about models."""
    refused = [
        Route(path, Endpoint(_refuse), methods=["POST", "DELETE"] if path == "/api/delete" else ["POST"])
        for path in _REFUSED
    ]
    return [
        Route("/api/tags", Endpoint(tags), methods=["GET"]),
        Route("/api/ps", Endpoint(running), methods=["GET"]),
        Route("/api/show", Endpoint(show, _SHOW), methods=["POST"]),
        Route("/api/pull", Endpoint(pull, _PULL), methods=["POST"]),
        Route("/api/version", Endpoint(version), methods=["GET"]),
        *refused,
        Route("/api/blobs/{digest}", Endpoint(_refuse), methods=["POST", "HEAD"]),
    ]


async def _refuse(call: Call) -> None:
    why = _REFUSED.get(call.url.path, "models are not uploaded here")
    raise RefusedError(501, f"{call.url.path}: {why}", "not_supported")


async def version(call: Call) -> None:
    """The version of the interface, and of this server."""
    await call.json({"version": VERSION, "chabok": __version__})


async def tags(call: Call) -> None:
    """Every model that may be asked for."""
    entries = [entry for entry in call.server.roster.entries() if not entry.error]
    await call.json({"models": [_listed(entry) for entry in entries]})


async def running(call: Call) -> None:
    """The models in memory."""
    found = []
    for entry in call.server.roster.entries():
        if entry.loaded:
            expires = FOREVER if entry.expires is None else _when(entry.expires)
            listed = _listed(entry) | {"size": entry.memory_bytes or entry.size_bytes, "expires_at": expires}
            del listed["modified_at"]
            found.append(listed | {"size_vram": 0, "context_length": entry.context})
    await call.json({"models": found})


async def show(call: Call) -> None:
    """What is known of one model, mostly by its file; loads nothing."""
    body = await call.parse(_SHOW)
    entry = await call.server.roster.known(name_of(body))
    await call.json(await asyncio.to_thread(_shown, entry, bool(body.verbose)))


def _shown(entry: ModelEntry, verbose: bool) -> dict[str, Any]:
    from chabok.checkpoints.gguf import GGUF

    if entry.path is None:
        raise UnknownModelError(entry.error or f"{entry.name} is not on this machine any more")
    metadata = GGUF.open(entry.path).metadata
    template = metadata.get("tokenizer.chat_template")
    template = template if isinstance(template, str) else ""
    info = {
        key: _plain(value, verbose) for key, value in metadata.items() if key != "tokenizer.chat_template"
    }
    licence = metadata.get("general.license")
    return {
        "modelfile": f"# Served by Chabok {__version__}\nFROM {entry.name}\n",
        "parameters": f"num_ctx {entry.context}",
        "template": template,
        "license": licence if isinstance(licence, str) else "",
        "modified_at": _when(entry.modified),
        "details": _details(entry),
        "model_info": {"general.parameter_count": entry.parameters, **info},
        "capabilities": _capabilities(template),
    }


def _plain(value: Any, verbose: bool) -> Any:
    """A value of the file's metadata as JSON can hold it; long lists are left out, as Ollama does."""
    if isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    return value.tolist() if verbose and hasattr(value, "tolist") else list(value) if verbose else None


def _capabilities(template: str) -> list[str]:
    found = ["completion"]
    if "tools" in template:
        found.append("tools")
    if thinking.source_thinks(template):
        found.append("thinking")
    return found


def _listed(entry: ModelEntry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "model": entry.name,
        "modified_at": _when(entry.modified),
        "size": entry.size_bytes,
        "digest": entry.digest,
        "details": _details(entry),
    }


def _details(entry: ModelEntry) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "gguf",
        "family": entry.family,
        "families": [entry.family] if entry.family else [],
        "parameter_size": _size(entry.parameters),
        "quantization_level": entry.quantization,
    }


def _size(n: int) -> str:
    """A number of parameters as Ollama writes it: 134.5M, 1.5B."""
    for unit, length in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if n >= length:
            return f"{n / length:.1f}{unit}"
    return str(n)


def _when(seconds: float) -> str:
    moment = datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


async def pull(call: Call) -> None:
    """Fetch a model, telling how it goes; ends when the client leaves."""
    from chabok.server import fetching

    body = await call.parse(_PULL)
    name = fetching.source_of(name_of(body))
    if body.insecure:
        raise RefusedError(
            400, "insecure: models are only fetched over connections that are checked", "invalid_value"
        )
    if not call.server.settings.allows_pull:
        raise RefusedError(
            403, "this server fetches no models; its operator can: `chabok pull`", "pull_disabled"
        )
    call.state.caller.check_model(name)
    fetch = fetching.Fetch.start(name)
    watch = asyncio.create_task(_left(call, fetch))
    try:
        if body.stream is False:
            last: dict[str, Any] = {}
            async for last in fetch.lines():
                if "error" in last:
                    raise RefusedError(502, last["error"], "model_unavailable")
            await fetch.close()  # before the end of the answer, as the client may ask for the next at once
            await call.json(last)
            return
        head = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-cache")]
        await call.reply({"type": "http.response.start", "status": 200, "headers": head})
        async for line in fetch.lines():
            await call.reply({"type": "http.response.body", "body": encode(line) + b"\n", "more_body": True})
        await fetch.close()
        await call.reply({"type": "http.response.body", "body": b""})
    finally:
        watch.cancel()
        await fetch.close()


async def _left(call: Call, fetch: Any) -> None:
    """Wait until the client leaves; then stop fetching."""
    with suppress(Exception):
        while (await call.receive())["type"] != "http.disconnect":
            pass
    await fetch.close()
