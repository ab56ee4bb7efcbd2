"""The dialects that language-model endpoints speak, one file each."""

from __future__ import annotations

from chabok.measure.failures import MeasureError
from chabok.measure.wire.anthropic import AnthropicMessages
from chabok.measure.wire.ollama import OllamaChat, OllamaGenerate
from chabok.measure.wire.openai import OpenAIChat, OpenAICompletions
from chabok.measure.wire.reader import Ask, Dialect, Reader
from chabok.measure.wire.responses import OpenAIResponses

DIALECTS: dict[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        OpenAIChat(),
        OpenAICompletions(),
        OpenAIResponses(),
        AnthropicMessages(),
        OllamaChat(),
        OllamaGenerate(),
    )
}
"""By name."""

__all__ = ["DIALECTS", "Ask", "Dialect", "Reader", "dialect_named"]


def dialect_named(name: str) -> Dialect:
    """The dialect of a name; MeasureError lists them if there is none."""
    found = DIALECTS.get(name)
    if found is None:
        raise MeasureError(f"there is no dialect {name!r}; there are {', '.join(DIALECTS)}")
    return found
