"""The answer of the Responses interface: items of output, and the events that tell how they grow.

Source of the shapes and of the order of events: the OpenAI API reference, "Responses" and "Streaming events".
"""

from __future__ import annotations

from typing import Any

from chabok.server.accounts import timings_dict
from chabok.server.errors import encode, problem_of
from chabok.server.events import CallArguments, CallStart, Ended, Event, Reasoning, Text, TokenInfo
from chabok.server.openai import chat_logprobs


class ResponseItems:
    """Grows a response by events.

    response: the object as it is before anything was generated; ``add`` fills it in. Each event is given to
    ``tell`` as its type and what it holds besides.
    """

    def __init__(self, response: dict[str, Any], load_s: float = 0.0) -> None:
        self.response = response
        self.output: list[dict[str, Any]] = response["output"]
        self._id = response["id"].removeprefix("resp_")
        self._load_s = load_s
        self._item: dict[str, Any] | None = None
        self._pieces: list[str] = []
        self._tokens: list[TokenInfo] = []
        self.told: list[tuple[str, dict[str, Any]]] = []

    def begin(self) -> None:
        """Tell that there is a response."""
        response = {**self.response, "output": []}  # as it is now, whenever it is written
        self._tell("response.created", response=response)
        self._tell("response.in_progress", response=response)

    def add(self, event: Event) -> None:
        """Take one event."""
        match event:
            case Text():
                self._text(event)
            case Reasoning():
                if not self._in("reasoning"):
                    self._open({"type": "reasoning", "summary": [], "content": []}, "rs", "reasoning_text")
                self._pieces.append(event.text)
                self._part("response.reasoning_text.delta", delta=event.text)
            case CallStart():
                self._close()
                call = {"type": "function_call", "call_id": event.id, "name": event.name, "arguments": ""}
                self._open(call, "fc", None)
            case CallArguments():
                self._pieces.append(event.text)
                self._told_of("response.function_call_arguments.delta", delta=event.text)
            case Ended():
                self._end(event)

    def _text(self, event: Text) -> None:
        if not event.text and not event.tokens:
            return
        if not self._in("message"):
            self._open({"type": "message", "role": "assistant", "content": []}, "msg", "output_text")
        self._pieces.append(event.text)
        self._tokens += event.tokens
        self._part("response.output_text.delta", delta=event.text, logprobs=chat_logprobs(event.tokens))

    def _in(self, kind: str) -> bool:
        return self._item is not None and self._item["type"] == kind

    def _tell(self, kind: str, **fields: Any) -> None:
        self.told.append((kind, fields))

    def _told_of(self, kind: str, **fields: Any) -> None:
        assert self._item is not None
        self._tell(kind, item_id=self._item["id"], output_index=len(self.output), **fields)

    def _part(self, kind: str, **fields: Any) -> None:
        self._told_of(kind, content_index=0, **fields)

    def _open(self, item: dict[str, Any], prefix: str, part: str | None) -> None:
        self._close()
        self._item = {"id": f"{prefix}_{self._id}_{len(self.output)}", **item, "status": "in_progress"}
        self._tell("response.output_item.added", output_index=len(self.output), item=dict(self._item))
        if part is not None:
            self._part("response.content_part.added", part=self._content(part, "", []))

    def _content(self, part: str, text: str, tokens: list[TokenInfo]) -> dict[str, Any]:
        if part == "reasoning_text":
            return {"type": part, "text": text}
        return {"type": part, "text": text, "annotations": [], "logprobs": chat_logprobs(tokens)}

    def _close(self, status: str = "completed") -> None:
        """End the item that is growing."""
        item = self._item
        if item is None:
            return
        text = "".join(self._pieces)
        if item["type"] == "function_call":
            item["arguments"] = text
            self._told_of("response.function_call_arguments.done", name=item["name"], arguments=text)
        else:
            kind = "output_text" if item["type"] == "message" else "reasoning_text"
            part = self._content(kind, text, self._tokens)
            more = {"logprobs": part["logprobs"]} if kind == "output_text" else {}
            self._part(f"response.{kind}.done", text=text, **more)
            self._part("response.content_part.done", part=part)
            item["content"] = [part]
        item["status"] = status
        self._tell("response.output_item.done", output_index=len(self.output), item=item)
        self.output.append(item)
        self._item, self._pieces, self._tokens = None, [], []

    def _end(self, event: Ended) -> None:
        cut = event.reason in ("length", "deadline")
        self._close("incomplete" if cut else "completed")
        usage = event.usage
        response = self.response
        response["status"] = "incomplete" if cut else "completed"
        if cut:
            reason = "max_output_tokens" if event.reason == "length" else "deadline"
            response["incomplete_details"] = {"reason": reason}
        response["usage"] = {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached},
            "output_tokens": usage.output,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning},
            "total_tokens": usage.prompt + usage.output,
        }
        response["timings"] = timings_dict(event.completion.timings, self._load_s)
        self._tell(f"response.{response['status']}", response=response)


class ResponseWriter:
    """Writes a response as server-sent events."""

    media_type = "text/event-stream; charset=utf-8"
    keep_alive = b": keep-alive\n\n"

    def __init__(self, items: ResponseItems) -> None:
        self._items = items
        self._n = 0
        items.begin()

    def write(self, events: list[Event]) -> bytes:
        """The bytes of events."""
        for event in events:
            self._items.add(event)
        told, self._items.told = self._items.told, []
        return b"".join([self._event(kind, fields) for kind, fields in told])

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        data = encode({"type": kind, "sequence_number": self._n, **fields})
        self._n += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    def fail(self, error: BaseException) -> bytes:
        """An error in the middle of the stream: the response as far as it came, failed."""
        problem = problem_of(error)
        code = "server_error" if problem.status >= 500 else problem.code or "invalid_prompt"
        response = self._items.response
        response["status"] = "failed"
        response["error"] = {"code": code, "message": problem.message}
        return self._event("response.failed", {"response": response})

    def end(self) -> bytes:
        """Nothing more: the last event says that it is the last."""
        return b""
