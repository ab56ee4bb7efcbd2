"""What a server writes down: a line for each request, and what happens to models; never what was said.

Lines go through a queue to a thread that writes them: a full pipe must not stop the streams.
"""

from __future__ import annotations

import atexit
import json
import logging
import queue
import sys
import time
from logging.handlers import QueueHandler, QueueListener
from typing import Any

from chabok.server.record import Record
from chabok.server.settings import Settings

QUIET = ("/health", "/ready", "/metrics", "/page/")
"""Paths whose requests are logged only if they fail: they are asked for every few seconds."""

_LOST = 20_000
"""Lines that may wait to be written; more are lost."""


class RequestLog:
    """One line for each request that has ended."""

    def __init__(self) -> None:
        self._log = logging.getLogger("chabok.request")

    def began(self, record: Record) -> None:
        """Nothing is written before the end."""

    def ended(self, record: Record) -> None:
        """Write the line."""
        if record.path.startswith(QUIET) and record.status < 500:
            return
        level = logging.ERROR if record.status >= 500 else logging.INFO
        if record.status in (503, 504):  # not yet, not any more, or not in time: nothing failed
            level = logging.INFO if record.path.startswith(QUIET) else logging.WARNING
        self._log.log(level, "request", extra={"fields": fields(record)})


def fields(record: Record) -> dict[str, Any]:
    """What a line says of a request, in its order; durations in milliseconds."""
    found: dict[str, Any] = {"id": record.request_id, "client": record.client}
    if record.key:
        found["key"] = record.key
    found |= {"method": record.method, "path": record.path[:200], "status": record.status}
    if record.model:
        found["model"] = record.model
    timings = record.timings
    if timings is not None:
        found |= {
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "output_tokens": record.output_tokens,
            "queue_ms": round(timings.queue_s * 1000, 1),
            "prefill_ms": round(timings.prefill_s * 1000, 1),
            "first_token_ms": round(timings.first_token_s * 1000, 1),
            "worst_gap_ms": round(timings.worst_gap_s * 1000, 1),
            "tokens_per_s": round(timings.tokens_per_s, 1),
        }
    found["total_ms"] = round(record.duration_s * 1000, 1)
    if record.reasons:
        found["finish"] = ",".join(record.reasons)
    if record.error:
        found["error"] = record.error[:300]
    return found


class TextFormat(logging.Formatter):
    """Time, level, and either a message or ``name=value`` pairs."""

    def format(self, record: logging.LogRecord) -> str:
        """One line; what is not printable is escaped, so that nobody can forge lines."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(record.created))
        pairs: dict[str, Any] | None = getattr(record, "fields", None)
        if pairs is None:
            said = record.getMessage().replace("\n", "\\n").replace("\r", "\\r")
        else:
            said = " ".join(f"{name}={_plain(value)}" for name, value in pairs.items())
        line = f"{at}.{int(record.msecs):03d} {record.levelname.lower():7} {said}"
        return f"{line}\n{record.exc_text}" if record.exc_text else line


class JSONFormat(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        found: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        found |= getattr(record, "fields", None) or {}
        if record.exc_text:
            found["exception"] = record.exc_text
        return json.dumps(found)


def _plain(value: Any) -> str:
    """A value without spaces or control characters, quoted where it has any."""
    text = str(value)
    return text if text.isprintable() and text and not set(text) & set(' "=\\') else json.dumps(text)


def configure(settings: Settings) -> None:
    """Send what is logged to standard error, in the form the settings ask for."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONFormat() if settings.log_format == "json" else TextFormat())
    lines: queue.Queue[logging.LogRecord] = queue.Queue(_LOST)
    listener = QueueListener(lines, handler)
    listener.start()
    atexit.register(listener.stop)
    root = logging.getLogger()
    root.handlers = [_Queued(lines)]
    root.setLevel(logging.WARNING)
    logging.getLogger("chabok").setLevel(logging.INFO)


class _Queued(QueueHandler):
    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Put the message together now, but leave the format to the one who writes."""
        record.msg, record.args = record.getMessage(), None
        if record.exc_info:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
            record.exc_info = None
        return record

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's own name
        """The queue is full: the line is lost, and saying so would only be another."""
