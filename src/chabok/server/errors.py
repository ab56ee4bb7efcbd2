"""Errors as HTTP answers, in the form that the clients of each interface expect.

OpenAI: {"error": {"message", "type", "param", "code"}}. Anthropic: {"type": "error", "error": {"type",
"message"}}. Ollama: {"error": "message"}.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import msgspec
from starlette.responses import Response

from chabok.errors import (
    BusyError,
    ChabokError,
    RequestError,
    StoppingError,
    TemplateError,
    UnknownModelError,
)

_log = logging.getLogger("chabok.server")

UNSUPPORTED_THREAD = "thread_unsupported_request"
"""What Anthropic's clients have to be told to send whole conversations."""

Dialect: TypeAlias = Literal["openai", "anthropic", "ollama"]


class RefusedError(ChabokError):
    """A request that HTTP has a status of its own for: no key, too large a body, too slow a client.

    code: a short name for programs, such as "invalid_api_key". headers: to answer with.
    """

    def __init__(
        self, status: int, message: str, code: str = "", headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = headers or {}


@dataclass(frozen=True, slots=True)
class Problem:
    """An error as a client is told it."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)


def problem_of(error: BaseException) -> Problem:
    """What to tell a client about an error; of one that is our own fault, no more than that it is."""
    text = str(error)
    match error:
        case RefusedError():
            return Problem(error.status, text, error.code or None, None, error.headers)
        case RequestError():
            code = "context_length_exceeded" if "the context is" in text else "invalid_value"
            return Problem(400, text, code, error.field)
        case TemplateError():
            return Problem(400, text, "invalid_value", "messages")
        case UnknownModelError():
            return Problem(404, text, "model_not_found", "model")
        case BusyError():
            seconds = max(1, math.ceil(error.retry_after_s))
            return Problem(429, text, "server_busy", None, {"Retry-After": str(seconds)})
        case StoppingError():
            return Problem(503, text, "server_stopping", None, {"Retry-After": "1"})
        case ChabokError():  # a model that cannot be loaded, not enough memory
            return Problem(503, text, "model_unavailable")
    _log.error("a request failed", exc_info=error)
    return Problem(500, "the server failed at this request; its log says how", "internal_error")


# Names of kinds of errors, by status.
_OPENAI = {401: "authentication_error", 403: "permission_error", 404: "invalid_request_error",
           429: "rate_limit_error", 503: "service_unavailable_error"}  # fmt: skip
_ANTHROPIC = {401: "authentication_error", 403: "permission_error", 404: "not_found_error",
              413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}  # fmt: skip


def _kind(names: dict[int, str], other: str, status: int) -> str:
    return names.get(status, "invalid_request_error" if status < 500 else other)


def shape(problem: Problem, dialect: Dialect, request_id: str = "") -> dict[str, Any]:
    """The body of an error's answer; request_id: for clients that look for it there."""
    status, message = problem.status, problem.message
    if dialect == "ollama":
        return {"error": message}
    if dialect == "anthropic":
        kind = _kind(_ANTHROPIC, "api_error", status)
        error: dict[str, Any] = {"type": kind, "message": message}
        if problem.code == UNSUPPORTED_THREAD:
            error["details"] = {"error_code": problem.code, "unsupported": ["thread"]}
        return {"type": "error", "error": error, "request_id": request_id or None}
    kind = _kind(_OPENAI, "server_error", status)
    return {"error": {"message": message, "type": kind, "param": problem.param, "code": problem.code}}


def dialect_of(path: str, headers: Iterable[tuple[bytes, bytes]] = ()) -> Dialect:
    """Whose clients speak on a path; headers tell OpenAI's from Anthropic's where they share one."""
    if path.startswith("/v1/messages"):
        return "anthropic"
    if path.startswith("/api/"):
        return "ollama"
    return "anthropic" if any(name == b"anthropic-version" for name, _ in headers) else "openai"


def answer(
    error: BaseException, path: str, headers: Iterable[tuple[bytes, bytes]] = (), request_id: str = ""
) -> Response:
    """The response that tells of an error to a client of the interface at ``path``."""
    problem = problem_of(error)
    body = encode(shape(problem, dialect_of(path, headers), request_id))
    return Response(body, problem.status, problem.headers, media_type="application/json")


def encode(value: Any) -> bytes:
    """JSON; a lone surrogate, which UTF-8 cannot hold, becomes U+FFFD."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(_well_formed(value))


def _well_formed(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, dict):
        return {_well_formed(key): _well_formed(item) for key, item in value.items()}
    return [_well_formed(item) for item in value] if isinstance(value, list) else value
