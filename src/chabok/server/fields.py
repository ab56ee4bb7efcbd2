"""Fields that bodies of several interfaces share, and what becomes of them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from chabok.engine.request import SamplingParams
from chabok.errors import RequestError

if TYPE_CHECKING:
    from chabok.server.call import Call
    from chabok.server.roster import Served

MAX_N = 128
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1000
MAX_BIASES = 65536


class Strict(Struct, forbid_unknown_fields=True, kw_only=True):
    """A part of a body; a field that it does not have is an error. A field that is null was not given."""


class Sampling(Strict):
    """Fields of every request for text. Those of the last group change nothing and are taken all the same."""

    model: str = ""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    n: int | None = None
    priority: int | None = None
    deadline_ms: float | None = None

    user: str | None = None
    metadata: dict[str, str] | None = None


_NAMES = (
    "temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "frequency_penalty",
    "presence_penalty", "stop_token_ids", "seed", "ignore_eos", "min_tokens",
)  # fmt: skip


def params_of(
    body: Sampling,
    served: Served,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    limit: str = "max_tokens",
) -> SamplingParams:
    """The sampling parameters: the request's, else the model's settings, else those of the OpenAI interface
    (temperature 1, nothing cut off). limit: what the interface calls max_tokens.
    """
    values: dict[str, Any] = {"temperature": 1.0, **served.settings.sampling}
    for name in _NAMES:
        if (value := getattr(body, name)) is not None:
            values[name] = value
    if body.stop is not None:
        values["stop"] = check_stops(body.stop)
    if body.logit_bias is not None:
        if len(body.logit_bias) > MAX_BIASES:
            what = f"logit_bias has {len(body.logit_bias)} tokens; {MAX_BIASES} is the most"
            raise RequestError(what, "logit_bias")
        values["logit_bias"] = {_token_id(key): bias for key, bias in body.logit_bias.items()}
    if max_tokens is not None:
        values["max_tokens"] = max_tokens
    if logprobs is not None:
        values["logprobs"] = logprobs
    try:
        return naming(SamplingParams.of, values)
    except RequestError as error:
        if error.field == "max_tokens" != limit:
            raise RequestError(str(error).replace("max_tokens", limit, 1), limit) from None
        raise


def naming(make: Callable[[dict[str, Any]], SamplingParams], values: dict[str, Any]) -> SamplingParams:
    """``make(values)``, whose errors say which of the values is wrong."""
    try:
        return make(values)
    except RequestError as error:
        first = re.match(r"\w+", str(error))
        if error.field is None and first is not None and first[0] in values:
            error.field = first[0]
        raise


def check_stops(stop: str | list[str], field: str = "stop") -> tuple[str, ...]:
    """Stop strings as a tuple; refuses empty ones, and more or longer ones than can be looked for quickly."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > MAX_STOPS:
        raise RequestError(f"{field} has {len(stops)} strings; {MAX_STOPS} is the most", field)
    for text in stops:
        if not text or len(text) > MAX_STOP_CHARACTERS:
            raise RequestError(f"{field}: each must have 1 to {MAX_STOP_CHARACTERS} characters", field)
    return stops


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 10):
        raise RequestError(
            f"logit_bias must map token ids to numbers; {key!r:.40} is no token id", "logit_bias"
        )
    return int(key)


def count(value: int | None, field: str, low: int, high: int, default: int) -> int:
    """A whole number within bounds. Raises RequestError."""
    if value is None:
        return default
    if not low <= value <= high:
        raise RequestError(f"{field} must be from {low} to {high}, not {value}", field)
    return value


def priority_of(call: Call, asked: int | None) -> int:
    """The priority of a request: of its body, else of the header X-Chabok-Priority."""
    if asked is None:
        header = call.headers.get("x-chabok-priority")
        if header is None:
            return 0
        if not re.fullmatch(r"[+-]?\d{1,9}", header):
            raise RequestError(f"X-Chabok-Priority must be a whole number, not {header!r:.40}", "priority")
        asked = int(header)
    return count(asked, "priority", -100, 100, 0)


def deadline_of(call: Call, asked: float | None) -> float | None:
    """Milliseconds a request may take: of its body, else of the header X-Chabok-Deadline-Ms."""
    if asked is None:
        header = call.headers.get("x-chabok-deadline-ms")
        if header is None:
            return None
        try:
            asked = float(header)
        except ValueError:
            asked = math.nan
    if not 0 < asked < math.inf:
        raise RequestError("deadline_ms must be a number of milliseconds above 0", "deadline_ms")
    return asked
