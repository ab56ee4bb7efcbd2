"""The life of a server: listening, ready, stopping; one process, one event loop, no clock ticking."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Generator
from email.utils import formatdate
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from chabok.engine.turnstile import take_quick_turns
from chabok.errors import ChabokError, ResourceError
from chabok.server.connection import connections
from chabok.server.listening import raise_file_limit
from chabok.server.roster import Roster
from chabok.server.settings import Settings

log = logging.getLogger("chabok.server")

LAST_WORDS_S = 2.0
"""How long answers that were ended early have to be written out."""

ONE_STOP_S = 0.5
"""Signals within this time are one: a terminal and what runs the server in it both pass Ctrl-C on."""

CLOSE_S = 20.0
"""How long unloading models and writing the prefix cache may take at the end."""


class _State(ServerState):
    """What connections share; makes the Date header when it is asked for, at most once a second."""

    def __init__(self) -> None:
        self._second = 0
        self._headers: list[tuple[bytes, bytes]] = []
        super().__init__()

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        now = int(time.time())
        if now != self._second:
            self._second = now
            self._headers = [(b"date", formatdate(now, usegmt=True).encode())]
        return self._headers

    @default_headers.setter
    def default_headers(self, value: list[tuple[bytes, bytes]]) -> None:
        """Ignored: uvicorn begins with none."""


class Server(uvicorn.Server):
    """uvicorn's server, which sleeps until something happens and stops in the order that clients need.

    listening, ready: called on the event loop once it is so. hangup: what SIGHUP does; by default it ends the
    process.
    """

    def __init__(
        self,
        app: Any,
        roster: Roster,
        settings: Settings,
        sockets: list[socket.socket],
        *,
        listening: Callable[[], None] = lambda: None,
        ready: Callable[[], None] = lambda: None,
        hangup: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(_config(app, settings))
        self.server_state = _State()
        self.roster = roster
        self.failure: BaseException | None = None
        """Why it stopped, if not because it was asked to."""
        self._settings = settings
        self._sockets = sockets
        self._listening, self._ready, self._hangup = listening, ready, hangup
        self._stop: asyncio.Event | None = None
        self._signalled_at = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None

    def run_to_end(self) -> None:
        """Serve until told to stop; raises what made that necessary. Blocks."""
        raise_file_limit()
        take_quick_turns()
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(self.serve(self._sockets))
        if self.failure is not None:
            raise self.failure

    def stop(self) -> None:
        """Stop gracefully; from any thread."""
        self.should_exit = True
        if self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended already
                self._loop.call_soon_threadsafe(self._stop.set)

    # What uvicorn calls.

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        if self.should_exit:
            self._stop.set()
        await self.lifespan.startup()
        self.servers = []
        for each in self._sockets:
            create = (
                self._loop.create_unix_server if each.family == socket.AF_UNIX else self._loop.create_server
            )
            try:
                server = await create(
                    self._connection, sock=each, ssl=self.config.ssl, backlog=self.config.backlog
                )
            except OSError as error:
                raise ResourceError(f"cannot listen: {error.strerror or error}") from None
            self.servers.append(server)
        self.started = True
        self._listening()

    def _connection(self) -> asyncio.Protocol:
        kind: Any = self.config.http_protocol_class
        made: asyncio.Protocol = kind(
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            _loop=self._loop,
        )
        return made

    async def main_loop(self) -> None:
        """Load what is to be loaded, then sleep until the server is to stop."""
        assert self._stop is not None
        loading = asyncio.create_task(self._preload())
        await self._stop.wait()
        loading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await loading

    async def _preload(self) -> None:
        try:
            await self.roster.preload()
        except Exception as error:
            self.failure = error
            self.stop()
            return
        _notify("READY=1")
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more connections, let running requests end, end those left when the time is up."""
        _notify("STOPPING=1")
        self.roster.stopping = True
        for server in self.servers:
            server.close()
        for each in self._sockets:
            each.close()
        if self._settings.socket is not None:
            self._settings.socket.unlink(missing_ok=True)
        for connection in list(self.server_state.connections):
            connection.shutdown()  # idle ones now, the others after their answer
        tasks = self.server_state.tasks
        started = time.monotonic()
        if tasks:
            running = "1 request has" if len(tasks) == 1 else f"{len(tasks)} requests have"
            log.info("stopping: %s %g s to end", running, self._settings.shutdown_timeout)
        else:
            log.info("stopping")
        await self.roster.drain(self._settings.shutdown_timeout)
        if tasks:
            left = max(self._settings.shutdown_timeout - (time.monotonic() - started), 0.0)
            await asyncio.wait(set(tasks), timeout=left + LAST_WORDS_S)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(set(tasks), timeout=LAST_WORDS_S)
        for connection in list(self.server_state.connections):
            connection.transport.close()
        try:
            await asyncio.wait_for(self.roster.close(), CLOSE_S)
        except TimeoutError:
            log.warning("models were not closed within %g s", CLOSE_S)
        await self.lifespan.shutdown()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Stop at the first SIGINT or SIGTERM, end at once at the second."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        signals = [signal.SIGINT, signal.SIGTERM]
        for number in signals:
            loop.add_signal_handler(number, self._signalled, number)
        if self._hangup is not None:
            loop.add_signal_handler(signal.SIGHUP, self._hangup)
            signals.append(signal.SIGHUP)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def _signalled(self, number: int) -> None:
        now = time.monotonic()
        if self.should_exit:
            if now - self._signalled_at < ONE_STOP_S:
                return
            # What is on disk is whole at any moment; nothing else is worth waiting for.
            print("chabok: stopped at once", file=sys.stderr, flush=True)
            os._exit(128 + number)
        self._signalled_at = now
        self.stop()


def _config(app: Any, settings: Settings) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        http=connections(settings),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=list(settings.trusted_proxies),
        timeout_keep_alive=int(settings.idle_timeout) + 1,  # ours comes first
        backlog=settings.backlog,
    )
    config.load()
    if settings.tls_certificate is not None:
        config.ssl = tls(settings)
    return config


def tls(settings: Settings) -> ssl.SSLContext:
    """What HTTPS is spoken with; raises ChabokError."""
    assert settings.tls_certificate is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(settings.tls_certificate, settings.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ChabokError(
            f"tls_certificate {settings.tls_certificate} and tls_key {settings.tls_key} cannot be used: "
            f"{error.strerror or error}"
        ) from None
    return context


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:  # there is none for Windows
        return asyncio.new_event_loop
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _notify(state: str) -> None:
    """Tell systemd, where it waits for that (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.connect("\0" + address[1:] if address.startswith("@") else address)
        out.sendall(state.encode())
