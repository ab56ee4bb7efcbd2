"""One answer as it grows: the engine's tokens to events, through the parsers of reasoning and calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chabok.engine.request import Completion, Token
from chabok.server.events import (
    Ask,
    CallArguments,
    CallStart,
    Ended,
    Event,
    Reason,
    Reasoning,
    Started,
    Text,
    TokenInfo,
    Usage,
)
from chabok.server.prompts import Encoded

if TYPE_CHECKING:
    from chabok.engine.aio import AsyncStream
    from chabok.engine.llm import LLM


class Output:
    """The events of one answer; index: its number."""

    def __init__(self, index: int, stream: AsyncStream, ask: Ask, encoded: Encoded, llm: LLM) -> None:
        self.index = index
        self.stream = stream
        self.ended = False
        self._ask = ask
        self._encoded = encoded
        self._llm = llm
        self._logprobs = ask.params.logprobs is not None
        self._started = False
        self._held: list[TokenInfo] = []  # tokens whose text is still to come
        self._thinking = encoded.reasoning_parser()
        self._calling = encoded.tool_parser()
        self._plain = self._thinking is None and self._calling is None
        self._n_reasoning = 0
        self._n_calls = 0
        self._cut = False  # one call was all that was wanted
        # The prompt's log probabilities come at the end, and are to be given first.
        self._late = ask.echo and ask.prompt_logprobs is not None

    def take(self, events: list[Event]) -> None:
        """Append what there is by now. Raises what made the request fail."""
        stream = self.stream
        done = stream.done  # looked at first: what is there afterwards is all there will be
        if self._late and not done:
            return
        tokens = stream.take()
        completion = stream.result() if done else None
        if not self._started and (tokens or done):
            self._start(events, completion)
        last = tokens[-1] if completion is not None and tokens else None
        for token in tokens:
            self._token(token, events, completion if token is last else None)
        if completion is not None:
            self._end(completion, events)

    def _start(self, events: list[Event], completion: Completion | None) -> None:
        self._started = True
        index, prompt = self.index, self._encoded.tokens
        events.append(Started(index, len(prompt), self.stream.timings.cached_tokens))
        if self._ask.echo:
            infos = self._prompt_infos(completion) if completion is not None else ()
            events.append(Text(index, self._encoded.text, infos))

    def _token(self, token: Token, events: list[Event], completion: Completion | None) -> None:
        if self._logprobs:
            self._held.append(self._info(token))
            if completion is not None and completion.stopped_by is not None:
                self._drop_stop(token.text, completion.stopped_by)
        if self._plain:
            if token.text:
                events.append(Text(self.index, token.text, self._release()))
        else:
            self._parse(token.text, events)

    def _parse(self, text: str, events: list[Event]) -> None:
        thinking = self._thinking
        if thinking is None:
            self._content(text, events)
            return
        before = thinking.reasoning
        pieces = thinking.push(text)
        if before or thinking.reasoning:
            self._n_reasoning += 1
            self._held = []
        for kind, piece in pieces:
            if kind == "reasoning":
                events.append(Reasoning(self.index, piece))
            else:
                self._content(piece, events)

    def _content(self, text: str, events: list[Event], *, finish: bool = False) -> None:
        calling = self._calling
        if calling is None:
            if text:
                events.append(Text(self.index, text, self._release()))
            return
        pieces = calling.push(text) if text else []
        if finish:
            pieces = [*pieces, *calling.finish()]
        from chabok.text.toolparsers import CallStart as Begun
        from chabok.text.toolparsers import TextPiece

        for piece in pieces:
            if self._cut:
                return
            if isinstance(piece, TextPiece):
                if piece.text:
                    events.append(Text(self.index, piece.text, self._release()))
            elif isinstance(piece, Begun):
                if self._n_calls and not self._ask.parallel_tool_calls:
                    self._cut = True
                    self.stream.close()
                    return
                self._n_calls += 1
                self._held = []
                events.append(CallStart(self.index, piece.index, piece.id, piece.name))
            else:
                self._held = []
                events.append(CallArguments(self.index, piece.index, piece.text))

    def _release(self) -> tuple[TokenInfo, ...]:
        if not self._held:
            return ()
        held, self._held = tuple(self._held), []
        return held

    def _drop_stop(self, text: str, stopped_by: str | int) -> None:
        """Let go of the tokens that ended the answer: they are not part of it."""
        if isinstance(stopped_by, int):
            self._held.pop()
            return
        room = len(text.encode("utf-8", "replace"))
        kept: list[TokenInfo] = []
        for info in self._held:
            if room <= 0:
                break
            kept.append(info)
            room -= len(info.data)
        self._held = kept

    def _end(self, completion: Completion, events: list[Event]) -> None:
        self.ended = True
        if self._thinking is not None:
            for kind, piece in self._thinking.finish():
                if kind == "reasoning":
                    events.append(Reasoning(self.index, piece))
                else:
                    self._content(piece, events)
        self._content("", events, finish=True)
        if self._held:  # tokens without text, such as half a character
            events.append(Text(self.index, "", self._release()))
        reason: Reason = completion.finish_reason
        complete = self._calling is not None and self._calling.calls and not self._calling.broken
        if self._cut or (complete and reason == "stop"):
            reason = "tool_calls"
        cached = completion.timings.cached_tokens
        usage = Usage(len(self._encoded.tokens), len(completion.tokens), cached, self._n_reasoning)
        events.append(Ended(self.index, reason, completion.stopped_by, completion, usage))

    def _info(self, token: Token) -> TokenInfo:
        return self._of(token.id, token.logprob, token.top)

    def _of(self, id_: int, logprob: float | None, top: tuple[tuple[int, float], ...]) -> TokenInfo:
        data = self._llm.token_bytes
        return TokenInfo(id_, data(id_), logprob, tuple((other, data(other), value) for other, value in top))

    def _prompt_infos(self, completion: Completion) -> tuple[TokenInfo, ...]:
        if completion.prompt_logprobs is None or completion.prompt_top_logprobs is None:
            return ()
        each = zip(
            self._encoded.tokens, completion.prompt_logprobs, completion.prompt_top_logprobs, strict=True
        )
        return tuple(self._of(*one) for one in each)
