"""HTTP/1.1 for a stopwatch: connections to one origin, opened before they are needed and used again."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Mapping
from time import perf_counter
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from chabok.measure.connection import Clock, Collected, Connection, Patience, Receiver, Sizes
from chabok.measure.failures import ConnectError, DisconnectedError, MeasureError, TlsError


class Origin(NamedTuple):
    """Where connections go: ``scheme``, ``host``, ``port``."""

    scheme: str
    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> tuple[Origin, str]:
        """The origin of a URL and its path without a slash at the end; MeasureError if it is not one."""
        text = url if "://" in url else f"http://{url}"
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise MeasureError(f"{url!r} is not a URL: {error}; try http://127.0.0.1:8000") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise MeasureError(f"{url!r} is not an http:// or https:// URL; try http://127.0.0.1:8000")
        if parts.username is not None or parts.query or parts.fragment:
            raise MeasureError(f"{url!r}: give no user, query or fragment; a key goes into --api-key")
        if any(ord(letter) <= 32 or ord(letter) >= 127 for letter in parts.path):
            raise MeasureError(
                f"{url!r}: the path must be plain ASCII without spaces; percent-encode the rest"
            )
        chosen = port if port is not None else (443 if parts.scheme == "https" else 80)
        return cls(parts.scheme, parts.hostname, chosen), parts.path.rstrip("/")

    @property
    def authority(self) -> str:
        """The value of the ``Host`` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == {"http": 80, "https": 443}[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}"


def proxy_unused(origin: Origin) -> str:
    """Says that a proxy of the environment is not asked, if it would be by others; else empty.

    A proxy has its own buffers and its own time, so the stopwatch goes around it.
    """
    proxy = getproxies().get(origin.scheme) or getproxies().get("all")
    if not proxy or proxy_bypass(origin.host):
        return ""
    return f" ({origin.scheme.upper()}_PROXY is set, but is not used for measuring)"


class Client:
    """Connections to one origin, reused; an async context manager.

    Never follows redirects, never decompresses, keeps no cookies, knows no proxies: what it times is what the
    endpoint does.
    """

    def __init__(
        self,
        origin: Origin,
        *,
        patience: Patience | None = None,
        sizes: Sizes | None = None,
        verify: ssl.SSLContext | bool = True,
    ) -> None:
        """``verify``: False accepts any certificate; a context is used as it is."""
        self.origin = origin
        self.patience = patience or Patience()
        self.sizes = sizes or Sizes()
        self._verify = verify
        self._tls: ssl.SSLContext | None = None
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self._addresses: list[tuple[int, str]] = []

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
        await asyncio.sleep(0)  # let transports say goodbye

    def close(self) -> None:
        """Close every connection."""
        for connection in list(self._all):
            connection.close()
        self._idle.clear()

    async def warm(self, connections: int) -> float:
        """Open connections until so many are idle; the median time one took, s (0 if none was needed)."""
        self._idle = [each for each in self._idle if each.alive]
        took: list[float] = []

        async def one() -> None:
            began = perf_counter()
            self._idle.append(await self._connect())
            took.append(perf_counter() - began)

        missing = connections - len(self._idle)
        while missing > 0:  # a few at a time: a listen queue is short
            step = min(missing, 32)
            results = await asyncio.gather(*(one() for _ in range(step)), return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    raise result
            missing -= step
        return sorted(took)[len(took) // 2] if took else 0.0

    async def send(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes,
        receiver: Receiver,
        clock: Clock | None = None,
    ) -> Clock:
        """Send a request and let ``receiver`` have the response; the instants, also while it goes on.

        ExchangeError (a subclass says which): no complete response. Whatever came until then was received.
        """
        clock = clock if clock is not None else Clock()
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.origin.authority}", "Accept-Encoding: identity"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if body or method == "POST":
            lines.append(f"Content-Length: {len(body)}")
        data = "\r\n".join([*lines, "\r\n"]).encode("latin-1") + body
        connection = self._take()
        if connection is not None:
            try:
                await self._exchange(connection, data, receiver, clock)
                return clock
            except DisconnectedError:
                # The server closed an idle connection just as it was used again; nothing was answered.
                if connection.touched:
                    raise
        began = perf_counter()
        connection = await self._connect()
        clock.connect_s = perf_counter() - began
        await self._exchange(connection, data, receiver, clock)
        return clock

    async def fetch(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes = b""
    ) -> Collected:
        """Send a request and collect its whole response."""
        collected = Collected(self.sizes.body)
        await self.send(method, path, headers or {}, body, collected)
        return collected

    async def _exchange(self, connection: Connection, data: bytes, receiver: Receiver, clock: Clock) -> None:
        await connection.exchange(data, receiver, clock)
        if connection.alive:
            self._idle.append(connection)

    def _take(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.alive:
                return connection
        return None

    def _forget(self, connection: Connection) -> None:
        self._all.discard(connection)

    async def _connect(self) -> Connection:
        origin = self.origin
        try:
            async with asyncio.timeout(self.patience.connect_s):
                return await self._open()
        except TimeoutError:
            limit = self.patience.connect_s
            raise ConnectError(
                f"no connection to {origin} within {limit:g} s; is the host right, and a firewall in between?"
                f"{proxy_unused(origin)}"
            ) from None
        except ssl.SSLCertVerificationError as error:
            raise TlsError(
                f"{origin}: the certificate is not trusted ({error.verify_message}); "
                "--insecure measures all the same"
            ) from None
        except ssl.SSLError as error:
            raise TlsError(
                f"{origin} does not speak TLS ({error.reason or error}); is it an http:// address?"
            ) from None
        except socket.gaierror as error:
            raise ConnectError(
                f"the host {origin.host!r} is not known ({error.strerror}){proxy_unused(origin)}"
            ) from None
        except ConnectionRefusedError:
            raise ConnectError(
                f"nothing listens at {origin}; is the server running, and on this port?{proxy_unused(origin)}"
            ) from None
        except OSError as error:
            raise ConnectError(
                f"no connection to {origin}: {error.strerror or error}{proxy_unused(origin)}"
            ) from None

    async def _open(self) -> Connection:
        loop = asyncio.get_running_loop()
        if not self._addresses:
            found = await loop.getaddrinfo(self.origin.host, self.origin.port, type=socket.SOCK_STREAM)
            self._addresses = [(family, str(address[0])) for family, _, _, _, address in found]
        secure = self.origin.scheme == "https"
        if secure and self._tls is None:
            self._tls = self._context()
        failure: OSError | None = None
        for place, (family, address) in enumerate(self._addresses):
            try:
                _, connection = await loop.create_connection(
                    lambda: Connection(self.patience, self.sizes, self._forget),
                    address,
                    self.origin.port,
                    family=family,
                    ssl=self._tls if secure else None,
                    server_hostname=self.origin.host if secure else None,
                )
            except ssl.SSLError:
                raise
            except OSError as error:
                failure = failure or error
                continue
            if place:  # what answered once is asked first from now on
                self._addresses.insert(0, self._addresses.pop(place))
            self._all.add(connection)
            return connection
        raise failure or ConnectError(f"the host {self.origin.host!r} has no address")

    def _context(self) -> ssl.SSLContext:
        if isinstance(self._verify, ssl.SSLContext):
            return self._verify
        context = ssl.create_default_context()
        if not self._verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        context.set_alpn_protocols(["http/1.1"])
        return context
