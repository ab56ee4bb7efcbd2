"""The description of the interfaces, and a stranger who tries everything that it allows and forbids."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from tests.server.conftest import Running


@pytest.fixture(scope="module")
def described(running: Running) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(running.url + "/openapi.json").json()
    return found


def test_every_path_is_described_and_every_reference_leads_somewhere(described: dict[str, Any]) -> None:
    assert {
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/v1/models/{model}",
        "/v1/messages", "/v1/messages/count_tokens", "/api/chat", "/api/generate", "/api/tags", "/health",
    } <= set(described["paths"])  # fmt: skip
    chat = described["paths"]["/v1/chat/completions"]["post"]
    assert chat["summary"]
    text = json.dumps(described)
    for part in text.split('"$ref": "')[1:]:
        where: Any = described
        for name in part.partition('"')[0].removeprefix("#/").split("/"):
            where = where[name]


@pytest.mark.wide
def test_nothing_that_the_description_allows_or_forbids_makes_the_server_fail(running: Running) -> None:
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis.generation import GenerationMode

    schema = schemathesis.openapi.from_url(running.url + "/openapi.json")
    schema.config.generation.update(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
    for result in schema.get_all_operations():
        operation = result.ok()
        if "pull" in operation.path:
            continue  # it would fetch models

        @given(case=operation.as_strategy())
        @settings(
            max_examples=60,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            derandomize=True,
            database=None,
        )
        def tried(case: Any) -> None:
            if isinstance(case.body, dict):
                for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
                    if isinstance(case.body.get(name), int):
                        case.body[name] = min(case.body[name], 2)
                    elif name in json.dumps(operation.body.definition if False else case.path) or True:
                        case.body.setdefault(name, 2) if name in _known(operation) else None
            answer = case.call(timeout=60)
            assert answer.status_code < 500, (case.path, case.body, answer.text)

        tried()


def _known(operation: Any) -> str:
    return json.dumps(operation.definition.resolved if hasattr(operation.definition, "resolved") else {})
