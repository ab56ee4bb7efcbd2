"""Bodies, expressions and grammars that are made to take long."""

from __future__ import annotations

import json
from typing import Any

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
MANY = HI * 140_000


def _tool(n: int) -> dict[str, Any]:
    properties = {f"p{i}": {"type": "string"} for i in range(n)}
    return {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": properties}},
    }


def bodies() -> dict[str, tuple[str, bytes]]:
    """By name: a path and what to send there, some of it twenty megabytes."""
    found: dict[str, tuple[str, dict[str, Any]]] = {
        "text": (CHAT, {"messages": [{"role": "user", "content": "x " * 10_000_000}]}),
        "numbers": ("/v1/completions", {"prompt": [1] * 10_000_000}),
        "texts": ("/v1/completions", {"prompt": ["a"] * 290_000}),
        "metadata": (
            CHAT,
            {"messages": HI, "metadata": {f"k{i}": "" for i in range(290_000)}, "max_tokens": 1},
        ),
        "messages": (CHAT, {"messages": MANY, "max_tokens": 1}),
        "Anthropic's": ("/v1/messages", {"model": "tiny", "messages": MANY, "max_tokens": 1}),
        "Ollama's": ("/api/chat", {"model": "tiny", "messages": MANY}),
        "items": ("/v1/responses", {"input": MANY}),
        "variables": (
            CHAT,
            {"messages": HI, "template_variables": {"a": [[1] * 10] * 25_000}, "max_tokens": 1},
        ),
        "biases": (CHAT, {"messages": HI, "logit_bias": {str(i): 1 for i in range(290_000)}}),
        "tools": (CHAT, {"messages": HI, "tools": [_tool(140_000)]}),
        "a million tokens": ("/v1/completions", {"prompt": "hello " * 1_000_000}),
    }
    return {name: (path, json.dumps(body).encode()) for name, (path, body) in found.items()}


_PATTERNS = (
    r"(x+x+)+y",
    r"(a|aa)+$",
    r"(x{1,1000}){1,1000}",
    r"((((a{1,100}){1,100}){1,100}){1,100})",
    r"(.*a){40}",
    r"(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)[^a]",
    r"\p{L}{1,5000}",
    r"(\w{1,300}\s){1,300}",
    "|".join(f"a{{{i}}}b" for i in range(900)),
    "(a?){2000}a{2000}",
    "[a-z]*" * 1000,
)

_GRAMMARS = (
    's: s s s | "a" | ""\nstart: s',
    "start: x{1,100000}\nx: /[a-z]{1,1000}/",
    "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(60)) + '\na60: "x" | ""',
    "start: " + "(" * 10_000 + '"a"' + ")" * 10_000,
    "start: /(.*a){50}/ /(.*b){50}/ /(.*c){50}/",
    "start: " + " | ".join(f"/x.{{{i}}}y.*/" for i in range(300)),
)


def _some(i: int) -> dict[str, Any]:
    one = [{"type": "object", "properties": {f"a{i}_{j}": {"type": "string"}}} for j in range(20)]
    return {"anyOf": one}


_LETTERS = {"type": "string", "pattern": "^(a|b)*c{1,1000}$"}
_DEFS = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 8} for i in range(50)}
_BACK = {f"p{i}": {"type": "string", "pattern": "^(.*x){9}$"} for i in range(4000)}

_SCHEMAS: tuple[dict[str, Any], ...] = (
    {"allOf": [_some(i) for i in range(12)]},
    {"type": "array", "minItems": 10**5, "items": {"type": "array", "items": _LETTERS, "minItems": 1000}},
    {"type": "object", "properties": _BACK},
    {"$defs": {**_DEFS, "d50": {}}, "$ref": "#/$defs/d0"},
    {"type": "string", "minLength": 100_000, "maxLength": 10**9},
    {"type": "integer", "multipleOf": 1e-9},
    {"enum": [f"value {i}" for i in range(15_000)]},
    {"type": "number", "minimum": -1e308, "maximum": 1e308},
)

FORMATS: list[dict[str, Any]] = [
    *({"type": "regex", "pattern": pattern} for pattern in _PATTERNS),
    *({"type": "lark", "grammar": grammar} for grammar in _GRAMMARS),
    *({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}} for schema in _SCHEMAS),
]
"""Values of response_format."""
