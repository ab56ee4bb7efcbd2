"""The server as an ASGI application: every interface's paths, request ids, and errors told in its form."""

from __future__ import annotations

import difflib
import re
import secrets
from functools import cache
from time import perf_counter
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chabok.server import anthropic, completions, ollama, openai, openapi, operating, responses, tokens
from chabok.server import page as pages
from chabok.server.auth import Keys
from chabok.server.errors import RefusedError, answer
from chabok.server.gate import Gate, with_cors
from chabok.server.logs import RequestLog
from chabok.server.metrics import Metrics
from chabok.server.record import Observer, Watch
from chabok.server.streaming import GoneError
from chabok.server.tracing import tracing

if TYPE_CHECKING:
    from chabok.server.roster import Roster
    from chabok.server.settings import Settings

_SANE_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")


def routes(*, page: bool = True) -> list[BaseRoute]:
    """The paths of every interface, and those of the page if it is served."""
    return [
        *openai.routes(),
        *completions.routes(),
        *responses.routes(),
        *anthropic.routes(),
        *ollama.routes(),
        *tokens.routes(),
        *operating.routes(),
        *openapi.routes(),
        *pages.routes(served=page),
    ]


def build(roster: Roster, settings: Settings, keys: Keys | None = None) -> ASGIApp:
    """The application that serves the models of a roster. keys: that open it; default: the settings'."""
    server = Server(roster, settings, Keys(settings.api_keys) if keys is None else keys)
    observers: list[Observer] = [RequestLog()] if settings.log_requests else []
    if settings.metrics:
        server.metrics = Metrics(roster, routes())
        observers.append(server.metrics)
    tracer = tracing()
    if tracer is not None:
        observers.append(tracer)
    return Watch(with_cors(server, settings), observers)


class Server:
    """Gives each request an id, hands it to its handler, and tells errors in the form of its interface.

    ``scope["chabok"]`` is this object, ``scope["state"]["request_id"]`` the id.
    """

    metrics: Metrics | None = None

    def __init__(self, roster: Roster, settings: Settings, keys: Keys) -> None:
        self.roster = roster
        self.settings = settings
        self._router = Gate(Router(routes(page=settings.page)), settings, keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request."""
        if scope["type"] != "http":
            return
        state = scope.setdefault("state", {})
        state["arrived"] = perf_counter()
        request_id = _request_id(scope)
        state["request_id"] = request_id.decode()
        scope["chabok"] = scope["app"] = self
        started = False

        async def reply(message: Message) -> None:
            nonlocal started
            if not started:
                started = True
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        try:
            await self._router(scope, receive, reply)
        except GoneError:
            return  # and the connection is closed
        except HTTPException as error:
            if started:
                raise
            _note(scope, _named(error, scope))
            await _answer(_named(error, scope), scope)(scope, receive, reply)
        except Exception as error:
            if started:
                raise
            _note(scope, error)
            await _answer(error, scope)(scope, receive, reply)


def _answer(error: BaseException, scope: Scope) -> Response:
    return answer(error, scope["path"], scope["headers"], scope["state"]["request_id"])


def _note(scope: Scope, error: Exception) -> None:
    """Note what kind of error it was; its text may quote what was said."""
    record = scope["state"].get("record")
    if record is not None:
        record.error = getattr(error, "code", "") or type(error).__name__


def _request_id(scope: Scope) -> bytes:
    """The client's own id if it is harmless, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _SANE_ID.fullmatch(value):
            return bytes(value)
    return b"req-" + secrets.token_hex(12).encode()


_ABSENT = {
    "/v1/embeddings": "embeddings", "/v1/images": "images", "/v1/audio": "sounds", "/v1/files": "files",
    "/v1/moderations": "moderations", "/v1/batches": "batches", "/v1/messages/batches": "batches",
    "/v1/fine_tuning": "fine-tuning", "/v1/assistants": "assistants", "/v1/threads": "assistants",
    "/v1/rerank": "rankings",
}  # fmt: skip
"""What people ask for by what its paths begin with, and is not there."""


@cache
def _known_paths() -> list[str]:
    return [route.path for route in routes() if isinstance(route, Route) and "{" not in route.path]


def _nowhere(path: str) -> str:
    """What to say of a path that is not there."""
    for begin, what in _ABSENT.items():
        if path == begin or path.startswith(begin + "/"):
            return f"{path}: {what} are not supported; this server writes text only"
    near = difflib.get_close_matches(path.rstrip("/")[:100], _known_paths(), 1, 0.8)
    return f"there is no {path} here{f'; did you mean {near[0]}?' if near else ''}"


def _named(error: HTTPException, scope: Scope) -> RefusedError:
    """An error of the router with the path and what to do."""
    what = f"{scope['method']} {scope['path']}"
    headers = dict(error.headers or {})
    if error.status_code == 404:
        return RefusedError(404, _nowhere(scope["path"]), "not_found", headers)
    if error.status_code == 405:
        allowed = headers.get("Allow", "")
        return RefusedError(405, f"{what} is not possible; use {allowed}", "method_not_allowed", headers)
    return RefusedError(error.status_code, error.detail, "", headers)
