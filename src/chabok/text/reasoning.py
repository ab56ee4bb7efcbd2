"""Telling what a model thinks from what it answers, while it streams."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from chabok.text.markers import overlap

if TYPE_CHECKING:
    from chabok.text.chat import ChatTemplate
    from chabok.text.tokenizer import Tokenizer

Kind = Literal["reasoning", "content"]


@dataclass(frozen=True)
class Markers:
    """What a family writes around its reasoning."""

    begin: str
    end: str


# Qwen3, DeepSeek R1, SmolLM3, GLM, MiniMax ...; Mistral's Magistral; Seed-OSS; Granite's older form.
FAMILIES = (
    Markers("<think>", "</think>"),
    Markers("[THINK]", "[/THINK]"),
    Markers("<seed:think>", "</seed:think>"),
    Markers("<reasoning>", "</reasoning>"),
)


class ReasoningParser:
    """Splits an answer into reasoning and content; never gives half a marker.

    Reasoning comes first or not at all: a marker later in the text is text (a model may well write about
    "<think>"). White space around the markers belongs to them: reasoning and content begin and end without
    the line breaks there, and an empty block leaves nothing.
    """

    def __init__(self, markers: Markers, *, inside: bool = False) -> None:
        """``inside``: the prompt opened the reasoning already, so the answer begins within it."""
        self.markers = markers
        self._state: Literal["start", "inside", "between", "content"] = "inside" if inside else "start"
        self._held = ""
        self._said = False  # some reasoning was given

    @classmethod
    def of(cls, template: ChatTemplate, rendered_prompt_end: str) -> ReasoningParser | None:
        """The parser for a template's family, or None if its model is not known to reason.

        ``rendered_prompt_end``: the end of the prompt (a few hundred characters will do), by which it is seen
        whether the template opened the reasoning itself, or wrote an empty block to have none.
        """
        for markers in FAMILIES:
            if markers.begin in template.source or markers.end in template.source:
                end = rendered_prompt_end.rstrip()
                return cls(markers, inside=end.endswith(markers.begin))
        return None

    def visible(self, tokenizer: Tokenizer) -> frozenset[int]:
        """The markers that are control tokens and must reach ``push`` as text: for ``Request.visible``."""
        ids = tokenizer.vocabulary.ids
        found = (ids.get(text.encode()) for text in (self.markers.begin, self.markers.end))
        return frozenset(token for token in found if token is not None and tokenizer.is_special(token))

    @property
    def reasoning(self) -> bool:
        """Whether the text read so far ends within the reasoning."""
        return self._state == "inside"

    def push(self, text: str) -> list[tuple[Kind, str]]:
        """Take a piece of the answer; what is certain with it."""
        self._held += text
        pieces: list[tuple[Kind, str]] = []
        if self._state == "start":
            self._start()
        if self._state == "inside":
            self._inside(pieces)
        if self._state == "between":
            self._held = self._held.lstrip()
            if self._held:
                self._state = "content"
        if self._state == "content" and self._held:
            pieces.append(("content", self._held))
            self._held = ""
        return pieces

    def _start(self) -> None:
        found = self._held.lstrip()
        begin = self.markers.begin
        if found.startswith(begin):
            self._held = found[len(begin) :]
            self._state = "inside"
        elif not begin.startswith(found):
            self._state = "content"

    def _inside(self, pieces: list[tuple[Kind, str]]) -> None:
        end = self.markers.end
        text, marker, rest = self._held.partition(end)
        if not self._said:
            text = text.lstrip()
        if marker:
            if body := text.rstrip():
                pieces.append(("reasoning", body))
            self._held, self._state = rest, "between"
            return
        # White space at the end may belong to the marker that follows.
        whole = len(text) - overlap(text, (end,))
        keep = len(text[:whole].rstrip())
        if keep:
            pieces.append(("reasoning", text[:keep]))
            self._said = True
        self._held = text[keep:]

    def finish(self) -> list[tuple[Kind, str]]:
        """What was held back, when nothing more will come."""
        held, self._held = self._held, ""
        if self._state == "inside":
            held = held.rstrip() if self._said else held.strip()
            return [("reasoning", held)] if held else []
        return [("content", held)] if held and self._state != "between" else []


def strip_reasoning(text: str) -> str:
    """An earlier answer without its reasoning, for templates that would repeat it."""
    for markers in FAMILIES:
        pattern = rf"\A\s*{re.escape(markers.begin)}.*?{re.escape(markers.end)}\s*"
        text = re.sub(pattern, "", text, count=1, flags=re.S)
    return text
