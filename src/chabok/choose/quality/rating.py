"""How probable a text is after another, told by an endpoint: completions with ``echo`` and ``logprobs``.

The format is that of OpenAI's first completions API, as Chabok and vLLM have it: the prompt comes back
with the log probability of each token and where in the text it begins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from chabok.measure.endpoint import Endpoint
from chabok.measure.failures import ExchangeError, MeasureError, StatusError
from chabok.measure.http import Client
from chabok.measure.wire import dialect_named


@dataclass(frozen=True, slots=True)
class Rated:
    """A continuation's log probability (natural, summed over its tokens), and how many tokens it has."""

    logprob: float
    tokens: int


class UnratedError(MeasureError):
    """The endpoint does not tell the probabilities of a text that it is given."""


async def rate(
    endpoint: Endpoint, client: Client, contexts: Sequence[str], continuations: Sequence[str]
) -> list[Rated]:
    """How probable each continuation is after its context. UnratedError: it does not tell; ExchangeError: the
    call failed."""
    if not endpoint.dialect.name.startswith("openai"):
        raise UnratedError(f"{endpoint.dialect.name} has no way to ask for the probability of a given text")
    body = {
        "model": endpoint.model,
        "prompt": [a + b for a, b in zip(contexts, continuations, strict=True)],
        "max_tokens": 1,  # some servers refuse 0
        "temperature": 0,
        "echo": True,
        "logprobs": 1,
    }
    try:
        found = await endpoint.post(client, "/v1/completions", body)
    except StatusError as error:
        if error.status in (400, 404, 405, 422, 501):
            raise UnratedError(f"{endpoint.origin} does not rate a given text: {error}") from None
        raise
    except ExchangeError:
        raise
    except MeasureError as error:  # what came is no JSON
        raise UnratedError(f"{endpoint.origin} does not rate a given text: {error}") from None
    try:
        choices = sorted(found["choices"], key=lambda choice: int(choice["index"]))
        if len(choices) != len(continuations):
            raise UnratedError(f"{endpoint.origin} answered {len(choices)} of {len(continuations)} prompts")
        return [_rated(choice, a, a + b) for choice, a, b in zip(choices, contexts, continuations)]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        raise UnratedError(f"{endpoint.origin} does not report the log probabilities of a prompt") from None


def _rated(choice: Mapping[str, Any], context: str, whole: str) -> Rated:
    text, told = choice["text"], choice["logprobs"]
    before = text.find(whole)  # a token that begins every text may be shown
    if before < 0:
        raise UnratedError("the prompt does not come back; echo is not supported")
    begin, end = before + len(context), before + len(whole)
    offsets, values = told["text_offset"], told["token_logprobs"]
    # Where a token spans the border, the continuation begins with it.
    ends = [*offsets[1:], len(text)]
    inside = [
        float(value)
        for start, stop, value in zip(offsets, ends, values, strict=True)
        if stop > begin and start < end and value is not None
    ]
    if not inside or not all(map(math.isfinite, inside)):
        raise UnratedError("the prompt comes back without log probabilities")
    return Rated(sum(inside), len(inside))


def raw(endpoint: Endpoint) -> Endpoint | None:
    """The same endpoint asked to continue a text without a chat; None: its dialect has no such method."""
    if endpoint.dialect.name.startswith("openai"):
        return replace(endpoint, dialect=dialect_named("openai-completions"))
    if endpoint.dialect.name.startswith("ollama"):
        return replace(
            endpoint, dialect=dialect_named("ollama-generate"), extra={**endpoint.extra, "raw": True}
        )
    return None
