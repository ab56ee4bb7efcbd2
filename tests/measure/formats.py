"""The same answer in the words of every dialect."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.measure.scripted import Script, Step

SSE = {"Content-Type": "text/event-stream; charset=utf-8"}
NDJSON = {"Content-Type": "application/x-ndjson"}


@dataclass
class Said:
    """One event of an answer: milliseconds since the one before, kind, text."""

    wait_ms: float
    text: str
    kind: str = "content"


@dataclass
class Answer:
    """An answer in no dialect yet: events, then usage after ``usage_ms``."""

    said: Sequence[Said]
    usage: dict[str, int] = field(default_factory=dict)  # prompt, output, reasoning, cached
    usage_ms: float = 0.0
    finish: str = "length"


def sse(data: object, name: str = "") -> bytes:
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


def line(data: object) -> bytes:
    return json.dumps(data, ensure_ascii=False).encode() + b"\n"


def _chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return sse({"id": "x", "object": "chat.completion.chunk", "choices": [choice]})


def _openai_usage(usage: dict[str, int]) -> dict[str, Any]:
    found: dict[str, Any] = {"prompt_tokens": usage["prompt"], "completion_tokens": usage["output"]}
    if "cached" in usage:
        found["prompt_tokens_details"] = {"cached_tokens": usage["cached"]}
    if "reasoning" in usage:
        found["completion_tokens_details"] = {"reasoning_tokens": usage["reasoning"]}
    return found


def openai_chat(answer: Answer) -> Script:
    steps = [Step(0, _chunk({"role": "assistant", "content": ""}))]
    for said in answer.said:
        delta: dict[str, Any] = {"content": said.text}
        if said.kind == "reasoning":
            delta = {"reasoning_content": said.text}
        elif said.kind == "tool":
            delta = {"tool_calls": [{"index": 0, "function": {"arguments": said.text}}]}
        steps.append(Step(said.wait_ms, _chunk(delta)))
    steps.append(Step(answer.usage_ms, _chunk({}, answer.finish)))
    if answer.usage:
        steps.append(Step(0, sse({"choices": [], "usage": _openai_usage(answer.usage)})))
    return Script([*steps, Step(0, sse("[DONE]"))], headers=SSE)


def openai_completions(answer: Answer) -> Script:
    steps = [
        Step(said.wait_ms, sse({"choices": [{"index": 0, "text": said.text, "finish_reason": None}]}))
        for said in answer.said
    ]
    steps.append(
        Step(answer.usage_ms, sse({"choices": [{"index": 0, "text": "", "finish_reason": answer.finish}]}))
    )
    if answer.usage:
        steps.append(Step(0, sse({"choices": [], "usage": _openai_usage(answer.usage)})))
    return Script([*steps, Step(0, sse("[DONE]"))], headers=SSE)


def openai_responses(answer: Answer) -> Script:
    names = {
        "content": "response.output_text.delta",
        "reasoning": "response.reasoning_text.delta",
        "tool": "response.function_call_arguments.delta",
    }

    def event(name: str, **fields: Any) -> bytes:
        return sse({"type": name, **fields}, name)

    steps = [Step(0, event("response.created", response={"status": "in_progress"}))]
    steps += [
        Step(said.wait_ms, event(names[said.kind], delta=said.text, output_index=0)) for said in answer.said
    ]
    final: dict[str, Any] = {"status": "completed"}
    if answer.usage:
        usage = answer.usage
        final["usage"] = {
            "input_tokens": usage["prompt"],
            "input_tokens_details": {"cached_tokens": usage.get("cached", 0)},
            "output_tokens": usage["output"],
            "output_tokens_details": {"reasoning_tokens": usage.get("reasoning", 0)},
        }
    end = "response.incomplete" if answer.finish == "length" else "response.completed"
    return Script([*steps, Step(answer.usage_ms, event(end, response=final))], headers=SSE)


def anthropic(answer: Answer) -> Script:
    usage = answer.usage or {"prompt": 1, "output": len(answer.said)}
    cached = usage.get("cached", 0)
    start = {
        "input_tokens": usage["prompt"] - cached,
        "cache_read_input_tokens": cached,
        "output_tokens": 1,
    }

    def event(name: str, **fields: Any) -> bytes:
        return sse({"type": name, **fields}, name)

    block = {"type": "text", "text": ""}
    steps = [
        Step(0, event("message_start", message={"role": "assistant", "usage": start})),
        Step(0, event("content_block_start", index=0, content_block=block) + event("ping")),
    ]
    for said in answer.said:
        delta = {
            "content": {"type": "text_delta", "text": said.text},
            "reasoning": {"type": "thinking_delta", "thinking": said.text},
            "tool": {"type": "input_json_delta", "partial_json": said.text},
        }[said.kind]
        steps.append(Step(said.wait_ms, event("content_block_delta", index=0, delta=delta)))
    reason = {"length": "max_tokens", "stop": "end_turn"}[answer.finish]
    steps += [
        Step(answer.usage_ms, event("content_block_stop", index=0)),
        Step(
            0,
            event("message_delta", delta={"stop_reason": reason}, usage={"output_tokens": usage["output"]}),
        ),
        Step(0, event("message_stop")),
    ]
    return Script(steps, headers=SSE)


def _ollama_end(answer: Answer) -> dict[str, Any]:
    found: dict[str, Any] = {"done": True, "done_reason": answer.finish}
    if answer.usage:
        found |= {"prompt_eval_count": answer.usage["prompt"], "eval_count": answer.usage["output"]}
        found |= {"load_duration": 3_000_000, "prompt_eval_duration": 20_000_000}
        found |= {"eval_duration": 40_000_000, "total_duration": 70_000_000}
    return found


def ollama_chat(answer: Answer) -> Script:
    steps = []
    for said in answer.said:
        message: dict[str, Any] = {"role": "assistant", "content": said.text}
        if said.kind == "reasoning":
            message = {"role": "assistant", "content": "", "thinking": said.text}
        elif said.kind == "tool":
            call = {"function": {"name": "f", "arguments": {"x": said.text}}}
            message = {"role": "assistant", "content": "", "tool_calls": [call]}
        steps.append(Step(said.wait_ms, line({"message": message, "done": False})))
    end = {"message": {"role": "assistant", "content": ""}} | _ollama_end(answer)
    return Script([*steps, Step(answer.usage_ms, line(end))], headers=NDJSON)


def ollama_generate(answer: Answer) -> Script:
    steps = []
    for said in answer.said:
        field_name = "thinking" if said.kind == "reasoning" else "response"
        steps.append(Step(said.wait_ms, line({"response": "", field_name: said.text, "done": False})))
    return Script(
        [*steps, Step(answer.usage_ms, line({"response": ""} | _ollama_end(answer)))], headers=NDJSON
    )


FORMATS = {
    "openai-chat": openai_chat,
    "openai-completions": openai_completions,
    "openai-responses": openai_responses,
    "anthropic": anthropic,
    "ollama-chat": ollama_chat,
    "ollama-generate": ollama_generate,
}
LEADING = {"openai-chat": 1, "openai-responses": 1, "anthropic": 2}
"""Steps before the first token, by dialect."""
