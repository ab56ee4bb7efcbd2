"""Text as tokens and back: /tokenize, /detokenize and /tokenizer_info, in the form of vLLM's server.

Evaluation harnesses ask them in order to know where in a prompt an answer begins.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

from msgspec import Struct
from starlette.routing import BaseRoute, Route

from chabok.errors import RequestError
from chabok.server.bodies import Body
from chabok.server.call import Call, Endpoint

if TYPE_CHECKING:
    from chabok.text.tokenizer import Tokenizer


class TokenizeBody(Struct, forbid_unknown_fields=True):
    """A text, or a conversation as its template writes it. model: default: the first one."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    model: str = ""
    add_special_tokens: bool = True


class DetokenizeBody(Struct, forbid_unknown_fields=True):
    """Token ids. model: default: the first one."""

    tokens: list[int]
    model: str = ""


_TOKENIZE = Body(TokenizeBody)
_DETOKENIZE = Body(DetokenizeBody)


def routes() -> list[BaseRoute]:
    """The paths of this interface."""
    return [
        Route("/tokenize", Endpoint(tokenize, _TOKENIZE), methods=["POST"]),
        Route("/detokenize", Endpoint(detokenize, _DETOKENIZE), methods=["POST"]),
        Route("/tokenizer_info", Endpoint(tokenizer_info), methods=["GET"]),
    ]


async def tokenize(call: Call) -> None:
    """Token ids of a text; special tokens that are written out in it count as such."""
    body = await call.parse(_TOKENIZE)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give one of prompt and messages", "prompt")
    async with call.model(body.model) as served:
        llm = served.llm.llm
        if body.messages is not None:
            tokens = await asyncio.to_thread(llm.tokenize_chat, body.messages, token_limit=llm.context)
        else:
            # None: as the model wants it, which is what "special tokens" are for it.
            bos = None if body.add_special_tokens else False
            tokens = await asyncio.to_thread(
                llm.tokenize, body.prompt or "", special=True, add_bos=bos, limit=llm.context
            )
        await call.json({"tokens": tokens, "count": len(tokens), "max_model_len": llm.context})


async def detokenize(call: Call) -> None:
    """The text of token ids."""
    body = await call.parse(_DETOKENIZE)
    async with call.model(body.model) as served:
        llm = served.llm.llm
        size = cast("Tokenizer", llm.tokenizer).vocab_size
        bad = next((token for token in body.tokens if not 0 <= token < size), None)
        if bad is not None:
            raise RequestError(f"there is no token {bad}; this model's are 0 to {size - 1}", "tokens")
        text = await asyncio.to_thread(llm.detokenize, body.tokens, skip_special=False)
        await call.json({"prompt": text})


async def tokenizer_info(call: Call) -> None:
    """The special tokens and the chat template of a model (``?model=``; default: the first one)."""
    async with call.model(call.query_params.get("model", "")) as served:
        llm = served.llm.llm
        tokenizer = cast("Tokenizer", llm.tokenizer)

        def text(token: int | None) -> str | None:
            return None if token is None else llm.token_bytes(token).decode("utf-8", "replace")

        await call.json(
            {
                "tokenizer_class": type(tokenizer).__name__,
                "bos_token": text(tokenizer.bos_id),
                "eos_token": text(tokenizer.eos_id),
                "pad_token": text(tokenizer.eos_id),
                "add_bos_token": tokenizer.add_bos,
                "chat_template": getattr(llm.template, "source", None),
                "max_model_len": llm.context,
            }
        )
