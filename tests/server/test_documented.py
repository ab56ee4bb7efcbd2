"""The documentation of the interfaces names every parameter that they have."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from chabok.server import anthropic_bodies, ollama_bodies

TEXT = (Path(__file__).parents[2] / "docs" / "interfaces.md").read_text(encoding="utf-8")


def section(name: str) -> str:
    return TEXT.split(f"\n## {name}\n")[1].split("\n## ")[0] + TEXT.split("\n## ")[0]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Anthropic", anthropic_bodies.MessageBody),
        ("Anthropic", anthropic_bodies.CountBody),
        ("Anthropic", anthropic_bodies.Tool),
        ("Ollama", ollama_bodies.ChatBody),
        ("Ollama", ollama_bodies.GenerateBody),
        ("Ollama", ollama_bodies.Options),
    ],
)
def test_every_parameter_is_documented(name: str, kind: Any) -> None:
    words = set(re.findall(r"[a-z0-9_]+", " ".join(re.findall(r"`([^`]*)`", section(name)))))
    missing = [field.encode_name for field in msgspec.structs.fields(kind) if field.encode_name not in words]
    assert missing == []


def test_every_block_of_content_is_documented() -> None:
    import typing

    for kind in typing.get_args(anthropic_bodies.Block):
        tag = kind.__struct_config__.tag
        assert f"`{tag}`" in section("Anthropic") or tag in ("server_tool_use", "web_search_tool_result")
