"""What every request passes before a handler sees it: from where, who asks, and whether that may be."""

from __future__ import annotations

import asyncio
import ipaddress
from time import perf_counter
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Receive, Scope, Send

from chabok.server.auth import CALLER, Admission, Caller, Keys, given_key
from chabok.server.errors import RefusedError

if TYPE_CHECKING:
    from chabok.server.settings import Settings

OPEN = ("/health", "/ready", "/", "/favicon.ico")
"""Paths for which nobody needs a key: probes have none, and the page asks for it itself."""

OPEN_UNDER = "/page/"

LATE_S = 5.0
"""How long after its deadline a request that has not ended by itself is ended."""


class Gate:
    """Lets a request through to the application, or raises RefusedError.

    ``scope["state"]["caller"]`` is who asks.
    """

    def __init__(self, app: ASGIApp, settings: Settings, keys: Keys) -> None:
        self._app, self._settings, self._keys = app, settings, keys
        self._hosts = {name.lower() for name in settings.allowed_hosts} | {"localhost"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        state = scope["state"]
        record = state.get("record")
        if not self._keys:
            self._check_host(scope)
            self._check_origin(scope)
        caller = state["caller"] = self._caller(scope)
        limit_s = self._settings.request_timeout
        caller.deadline = perf_counter() + limit_s
        caller.record = record
        if record is not None:
            record.key = caller.name
        CALLER.set(caller)
        try:
            with Admission(caller):
                async with asyncio.timeout(limit_s + LATE_S):
                    await self._app(scope, receive, send)
        except TimeoutError:
            raise RefusedError(
                504, f"this took longer than the {limit_s:g} seconds a request may take", "request_timeout"
            ) from None

    def _caller(self, scope: Scope) -> Caller:
        path = scope["path"]
        if not self._keys or path in OPEN or path.startswith(OPEN_UNDER):
            return Caller()
        return self._keys.caller(given_key(scope["headers"]))

    def _check_host(self, scope: Scope) -> None:
        """Where no key is needed, refuse names that a web page could have made point here (DNS rebinding).

        An address is harmless: a browser sends the name of the page's own server, and that is a name.
        """
        if not self._settings.is_local:
            return
        host = _host(_header(scope, b"host"))
        if host and host not in self._hosts and not _is_address(host) and not host.endswith(".localhost"):
            raise RefusedError(
                403,
                f"this server is not called {host[:100]!r}; use localhost, or start it with --allowed-hosts",
                "host_not_allowed",
            )

    def _check_origin(self, scope: Scope) -> None:
        """Where no key is needed, refuse other servers' web pages: a browser sends their simple requests
        without asking first, and they must not drive the local model.
        """
        origin = _header(scope, b"origin")
        if not origin or "*" in self._settings.cors_origins or origin in self._settings.cors_origins:
            return
        if origin.partition("://")[2].lower() != _header(scope, b"host").lower():
            raise RefusedError(
                403,
                f"pages of {origin[:100]!r} may not use this server unless started with --cors-origins",
                "origin_not_allowed",
            )


def with_cors(app: ASGIApp, settings: Settings) -> ASGIApp:
    """The application, telling browsers which pages may use it; unchanged where none may."""
    if not settings.cors_origins:
        return app
    from starlette.middleware.cors import CORSMiddleware

    return CORSMiddleware(
        app,
        allow_origins=settings.cors_origins,
        allow_methods=["GET", "POST", "HEAD", "DELETE"],
        allow_headers=["*"],
        expose_headers=["X-Request-Id", "Server-Timing", "Retry-After"],
        max_age=3600,
    )


def _header(scope: Scope, wanted: bytes) -> str:
    value = next((value for name, value in scope["headers"] if name == wanted), b"")
    return str(value.decode("latin-1")).strip()


def _host(value: str) -> str:
    """The host of a Host header, without its port."""
    value = value.lower()
    if value.startswith("["):
        return value[1:].partition("]")[0]
    return value.partition(":")[0].rstrip(".")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
