"""Reading tool calls out of an answer while it streams, one class for each family's way to write them.

What the classes have in common: text and calls come out in the order of the answer; a call's name comes as
soon as it is known and its arguments as they grow, each character checked; what turns out to be no call comes
out as the text it is. Nothing is lost and nothing is invented: text that was held back because it might have
become a marker is given as soon as it cannot.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from chabok.text.calls import CallReader, MalformedJSONError
from chabok.text.markers import first, overlap


@dataclass(frozen=True)
class ToolCall:
    """A call: the function's name and its arguments as JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class TextPiece:
    """Text beside calls."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call begins; index counts the calls of the answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of a call's arguments."""

    index: int
    text: str


Piece: TypeAlias = TextPiece | CallStart | CallArguments


class ToolParser:
    """Text in, pieces out.

    ``calls``: those that are complete; their arguments are JSON objects. ``broken``: a call was begun whose
    text then was no JSON, or ended early; its CallStart is out, and it is not among ``calls``.
    """

    markers: tuple[str, ...] = ()
    """What begins a call."""

    def __init__(self, names: frozenset[str], new_id: Callable[[], str]) -> None:
        self.calls: list[ToolCall] = []
        self.broken = False
        self._names = names
        self._new_id = new_id
        self._held = ""  # read, but not decided
        self._reader: CallReader | None = None
        self._raw: list[str] = []  # of the call being read, from its marker on, until it counts as one
        self._begun: CallStart | None = None
        self._arguments: list[str] = []
        self._n_begun = 0
        self._loose = False  # the call being read is known by its form alone
        self._pieces: list[Piece] = []
        self._step: Callable[[bool], bool] = self._in_text

    def push(self, text: str) -> list[Piece]:
        """Take a piece of the answer; what is certain with it."""
        self._held += text
        while self._held and self._step(False):
            pass
        return self._taken()

    def finish(self) -> list[Piece]:
        """What was held back, when nothing more will come."""
        while self._held and self._step(True):
            pass
        if self._reader is not None or self._raw:
            self._give_up()
            while self._held and self._step(True):
                pass
        self._say(self._held)
        self._held = ""
        return self._taken()

    def _taken(self) -> list[Piece]:
        """The pieces so far, neighbours of one kind joined."""
        joined: list[Piece] = []
        for piece in self._pieces:
            last = joined[-1] if joined else None
            if isinstance(piece, TextPiece) and isinstance(last, TextPiece):
                joined[-1] = TextPiece(last.text + piece.text)
            elif isinstance(piece, CallArguments) and isinstance(last, CallArguments):
                joined[-1] = CallArguments(piece.index, last.text + piece.text)
            else:
                joined.append(piece)
        self._pieces.clear()
        return joined

    def _say(self, text: str) -> None:
        if text:
            self._pieces.append(TextPiece(text))

    # States: each takes what it can off the held text and returns whether another look is worthwhile.

    def _in_text(self, last: bool) -> bool:
        at, marker = first(self._held, self.markers)
        if at < 0:
            # White space in front of a marker goes with it.
            whole = len(self._held) - overlap(self._held, self.markers)
            keep = len(self._held) if last else len(self._held[:whole].rstrip())
            self._say(self._held[:keep])
            self._held = self._held[keep:]
            return False
        before = self._held[:at].rstrip()
        self._say(before)
        self._raw = [self._held[len(before) : at + len(marker)]]
        self._held = self._held[at + len(marker) :]
        self._step = self._after_marker
        return True

    def _after_marker(self, last: bool) -> bool:
        """Begin to read a call."""
        return self._begin(CallReader())

    def _begin(self, reader: CallReader) -> bool:
        self._reader = reader
        self._step = self._in_call
        return True

    def _in_call(self, last: bool) -> bool:
        reader = self._reader
        assert reader is not None
        held = self._held
        for at, char in enumerate(held):
            try:
                reader.push(char)
            except (MalformedJSONError, RecursionError):
                self._held = held[at:]
                self._give_up()
                return True
            if self._begun is None:
                self._raw.append(char)
                if reader.name is not None and not self._may_be(reader.name):
                    self._held = held[at + 1 :]
                    self._give_up()
                    return True
            if reader.done:
                self._held = held[at + 1 :]
                self._show()
                self._end()
                return True
        self._held = ""
        self._show()
        return False

    def _may_be(self, name: str) -> bool:
        """Whether a call of this name counts as one."""
        return not self._loose or name in self._names

    def _show(self) -> None:
        reader = self._reader
        assert reader is not None
        if reader.name is None:
            return
        text = reader.take()
        if self._begun is None and (text or reader.done):
            self._begun = CallStart(self._n_begun, self._new_id(), reader.name)
            self._n_begun += 1
            self._raw.clear()
            self._pieces.append(self._begun)
        if text and self._begun is not None:
            self._arguments.append(text)
            self._pieces.append(CallArguments(self._begun.index, text))

    def _end(self) -> None:
        assert self._begun is not None
        self.calls.append(ToolCall(self._begun.id, self._begun.name, "".join(self._arguments)))
        self._forget()
        self._step = self._after_call

    def _forget(self) -> None:
        self._reader, self._begun = None, None
        self._raw, self._arguments = [], []

    def _give_up(self) -> None:
        """What is being read is no call."""
        if self._reader is not None:
            self._show()
        if self._begun is not None:
            self.broken = True
        self._say("".join(self._raw))
        self._forget()
        self._step = self._in_text

    def _after_call(self, last: bool) -> bool:
        """Skip what closes a call."""
        self._held = self._held.lstrip()
        self._step = self._in_text
        return True


class LooseParser(ToolParser):
    """A parser that also knows calls by nothing but their form, where the answer begins with them or one
    follows another. Only one of a tool that there is, with its arguments, counts then."""

    def __init__(self, names: frozenset[str], new_id: Callable[[], str]) -> None:
        super().__init__(names, new_id)
        self._step = self._at_start

    def _at_start(self, last: bool) -> bool:
        return self._bare() if self._held.strip() else False

    def _bare(self) -> bool:
        """Go on with a call that has no marker, or with text."""
        found = self._held.lstrip()
        if found[0] != "{":
            self._step = self._in_text
            return True
        self._raw = [self._held[: len(self._held) - len(found)]]
        self._held = found
        self._loose = True
        return self._begin(CallReader(needs_arguments=True))

    def _after_marker(self, last: bool) -> bool:
        self._loose = False
        return super()._after_marker(last)


class HermesParser(LooseParser):
    """``<tool_call>{"name": "f", "arguments": {}}</tool_call>``, any number of them, with text between.

    Small models often forget the tags, or write a block of code instead, which is understood too.
    """

    markers = ("<tool_call>", "```json")
    _close = "</tool_call>"

    def _after_marker(self, last: bool) -> bool:
        self._loose = self._raw[0].endswith("```json")
        self._close = "```" if self._loose else "</tool_call>"
        return self._begin(CallReader(needs_arguments=self._loose))

    def _bare(self) -> bool:
        self._close = ""
        return super()._bare()

    def _after_call(self, last: bool) -> bool:
        held = self._held.lstrip()
        if not self._close:
            self._held = held
            return self._bare() if held else False
        if held.startswith(self._close):
            self._held = held[len(self._close) :]
            self._step = self._between
            return True
        if self._close.startswith(held):
            if last:  # cut off within the end marker, which is no text either
                self._held = ""
            return False
        # The end marker is missing: the call is one all the same.
        self._held = held
        self._step = self._in_text
        return True

    def _between(self, last: bool) -> bool:
        self._held = self._held.lstrip()
        if self._held:
            self._step = self._in_text
        return bool(self._held)


class LlamaParser(LooseParser):
    """``{"name": "f", "parameters": {}}`` as the whole answer, several separated by ";", perhaps after
    ``<|python_tag|>``."""

    markers = ("<|python_tag|>",)

    def _may_be(self, name: str) -> bool:
        return name in self._names

    def _after_call(self, last: bool) -> bool:
        found = self._held.lstrip(" \t\r\n;,")
        if not found:
            if last:
                self._held = ""
            return False
        if found[0] == "{":
            return self._bare_after(found)
        self._held = found if found.startswith(self.markers) else self._held.lstrip()
        self._step = self._in_text
        return True

    def _bare_after(self, found: str) -> bool:
        """A call after another one and what separates them."""
        before = self._held[: len(self._held) - len(found)]
        self._held = found
        self._bare()
        self._raw = [before]
        return True


class MistralParser(ToolParser):
    """``[TOOL_CALLS][{"name": "f", "arguments": {}}, ...]``, or ``[TOOL_CALLS]f[ARGS]{}`` for each call."""

    markers = ("[TOOL_CALLS]",)
    _name = re.compile(r"\s*([A-Za-z0-9_.-]+)(\[CALL_ID\][A-Za-z0-9]*)?\s*(\[ARGS\])?\s*(?=\{)")
    _begun_name = re.compile(
        r"\s*[A-Za-z0-9_.-]*(\s*|\[[A-Z_]{0,7}|\[CALL_ID\][A-Za-z0-9]*(\s*|\[[A-Z]{0,4})|.*\[ARGS\]\s*)"
    )

    def _after_marker(self, last: bool) -> bool:
        held = self._held.lstrip()
        if not held:
            return False
        if held[0] in "[{":
            array = held[0] == "["
            if array:
                self._raw.append(self._held[: len(self._held) - len(held)] + "[")
                self._held = held[1:]
            self._in_array = array
            return self._begin(CallReader())
        self._in_array = False
        match = self._name.match(self._held)
        if match:
            self._raw.append(match[0])
            self._held = self._held[match.end() :]
            return self._begin(CallReader(match[1]))
        if not last and len(held) < 200 and self._begun_name.fullmatch(held):
            return False
        self._give_up()
        return True

    def _after_call(self, last: bool) -> bool:
        if not self._in_array:
            return super()._after_call(last)
        held = self._held.lstrip()
        if not held:
            return False
        if held[0] == ",":
            self._raw = [self._held[: -len(held)] + ","]
            self._held = held[1:]
            return self._begin(CallReader())
        self._held = held.removeprefix("]").lstrip()
        self._step = self._in_text
        return True
