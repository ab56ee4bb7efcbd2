"""What every request passes before a handler sees it: a record of it, who asks, and whether that may be."""

from __future__ import annotations

import ipaddress
from time import perf_counter
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Receive, Scope, Send

from chabok.server.auth import Admission, Caller, Keys, given_key
from chabok.server.errors import RefusedError, answer

if TYPE_CHECKING:
    from chabok.server.settings import Settings

OPEN = ("/health", "/ready")
"""Paths for which nobody needs a key: those who watch over the server have none."""


class Gate:
    """Lets a request through to the application, or answers it with why not.

    ``scope["state"]["caller"]`` is who asks.
    """

    def __init__(self, app: ASGIApp, settings: Settings, keys: Keys) -> None:
        self._app, self._settings, self._keys = app, settings, keys
        self._hosts = {name.lower() for name in settings.allowed_hosts} | {"localhost"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        state = scope.setdefault("state", {})
        try:
            self._check_host(scope)
            caller = self._caller(scope)
            caller.deadline = perf_counter() + self._settings.request_timeout
            state["caller"] = caller
            with Admission(caller):
                await self._app(scope, receive, send)
        except RefusedError as error:
            await answer(error, scope["path"], scope["headers"])(scope, receive, send)

    def _caller(self, scope: Scope) -> Caller:
        if not self._keys or self._is_open(scope["path"]):
            return Caller()
        return self._keys.caller(given_key(scope["headers"]))

    def _is_open(self, path: str) -> bool:
        """The page's own files are open, too, unless settings say otherwise: what it asks for is not."""
        page = path == "/" or path.startswith("/page/")
        return path in OPEN or (page and not self._settings.metrics_key)

    def _check_host(self, scope: Scope) -> None:
        """Where no key is needed, refuse names that a web page could have made point here (DNS rebinding).

        An address is harmless: what a page is called is what its browser sends, and that is a name.
        """
        if self._keys or not self._settings.is_local:
            return
        for name, value in scope["headers"]:
            if name == b"host":
                host = _host(value.decode("latin-1"))
                if host not in self._hosts and not _is_address(host) and not host.endswith(".localhost"):
                    raise RefusedError(
                        403,
                        f"this server is not called {host[:100]!r}; use localhost, or start it with "
                        f"--allowed-hosts {host[:100]}",
                        "host_not_allowed",
                    )


def _host(value: str) -> str:
    """The host of a Host header, without its port."""
    value = value.strip().lower()
    if value.startswith("["):
        return value[1:].partition("]")[0]
    return value.partition(":")[0].rstrip(".")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
