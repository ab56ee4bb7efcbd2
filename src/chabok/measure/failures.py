"""What can go wrong between a stopwatch and an endpoint, in one line each, with what to do about it."""

from __future__ import annotations

from chabok.errors import ChabokError


class MeasureError(ChabokError):
    """A measurement could not be made as asked; the text says why and what to try."""


class ExchangeError(MeasureError):
    """One request failed.

    kind: the class it is counted under, such as ``connect`` or ``timeout``; reports group by it.
    """

    kind = "failed"


class ConnectError(ExchangeError):
    """No connection: nothing listens, the name is unknown, or it took too long."""

    kind = "connect"


class TlsError(ConnectError):
    """The certificate or the handshake was refused."""

    kind = "tls"


class SlowError(ExchangeError):
    """A time limit passed: headers, silence between bytes, or the whole request."""

    kind = "timeout"


class DisconnectedError(ExchangeError):
    """The other side closed the connection before the answer was complete."""

    kind = "disconnected"


class ProtocolError(ExchangeError):
    """What came is not HTTP, not the announced format, or larger than the limits."""

    kind = "protocol"


class StatusError(ExchangeError):
    """A status other than 2xx.

    status: HTTP status. retry_after_s: seconds the server asks to wait, if it says so.
    """

    def __init__(self, status: int, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        self.kind = f"http {status}"


class ServerSaidError(ExchangeError):
    """An error event inside a stream that began with 200: a failure, never a success."""

    kind = "error event"


class TruncatedError(ExchangeError):
    """The stream ended without saying that it was complete."""

    kind = "truncated"
