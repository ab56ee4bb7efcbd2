"""Switching a model's thinking on and off, as far as its chat template can."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal, cast

from chabok.errors import RequestError

if TYPE_CHECKING:
    from chabok.server.roster import Served
    from chabok.text.chat import ChatTemplate

SWITCHES = ("enable_thinking", "thinking")
"""What templates call the switch: Qwen3, GLM, SmolLM3 and others; DeepSeek 3.1, Granite."""

EFFORT = "reasoning_effort"
"""What templates call how much to think (gpt-oss)."""

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
"""How much to think, in OpenAI's words."""

_TAG = re.compile(r"\{[%{].*?[%}]\}", re.DOTALL)


def variables(served: Served, wanted: bool | None, effort: str | None, field: str) -> dict[str, Any]:
    """What to tell a model's template about thinking.

    wanted: True to think, False not to, None as the model does. effort: a hint of how much, for templates
    that take one. field: the parameter by which it is asked. Raises RequestError where the model cannot do
    what is asked for.
    """
    template = template_of(served)
    found: dict[str, Any] = {}
    if effort is not None and _reads(template.source, EFFORT):
        found[EFFORT] = effort
    if wanted is None:
        return found
    switch = _switch(template.source)
    if switch is not None:
        return found | {switch: wanted}
    if wanted and not thinks(served):
        raise RequestError(f"{field}: {served.name} does not think before it answers; leave it out", field)
    if not wanted and thinks(served):
        raise RequestError(f"{field}: {served.name} always thinks before it answers; leave it out", field)
    return found


def asked(served: Served, effort: Effort | None, field: str) -> dict[str, Any]:
    """What to tell a model's template where OpenAI's clients say how much it shall think; "none": not at all.
    Raises RequestError where a model cannot but think.
    """
    if effort is None:
        return {}
    return variables(served, False if effort == "none" else None, effort, field)


def template_of(served: Served) -> ChatTemplate:
    """The chat template of a model."""
    return cast("ChatTemplate", served.llm.llm.template)


def can_switch(served: Served) -> bool:
    """Whether a model's template has a switch for thinking."""
    return _switch(template_of(served).source) is not None


def thinks(served: Served) -> bool:
    """Whether a model is known to write its thoughts before its answers."""
    return source_thinks(template_of(served).source)


def source_thinks(source: str) -> bool:
    """Whether a chat template is that of a model which writes its thoughts before its answers."""
    from chabok.text.reasoning import FAMILIES

    return any(markers.begin in source or markers.end in source for markers in FAMILIES)


def _switch(source: str) -> str | None:
    return next((name for name in SWITCHES if _reads(source, name)), None)


def _reads(source: str, name: str) -> bool:
    """Whether a template reads a variable of this name; a key, an attribute or plain text is none."""
    pattern = re.compile(rf"(?<![\w.'\"]){name}(?![\w'\"])")
    return any(pattern.search(tag) for tag in _TAG.findall(source))
