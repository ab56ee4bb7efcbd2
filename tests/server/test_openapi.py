"""The description of the interfaces, and a stranger who tries everything that it allows and forbids."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from tests.server.conftest import Running, serving, tiny

from chabok.server.settings import Settings


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
def test_nothing_that_the_description_allows_or_forbids_makes_the_server_fail() -> None:
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis.generation import GenerationMode

    models = (tiny("tiny", "llama.gguf", context=128),)
    with serving(Settings(models=models, installed=False, prefix_disk=False, pull=False)) as small:
        schema = schemathesis.openapi.from_url(small.url + "/openapi.json")
        for result in schema.get_all_operations():
            operation = result.ok()
            negative = [GenerationMode.NEGATIVE] if list(operation.body) else []
            for mode in (GenerationMode.POSITIVE, *negative):

                @given(case=operation.as_strategy(generation_mode=mode))
                @settings(
                    max_examples=40,
                    deadline=None,
                    phases=[Phase.generate],
                    suppress_health_check=list(HealthCheck),
                    derandomize=True,
                    database=None,
                )
                def tried(case: Any) -> None:
                    if isinstance(case.body, dict) and "model" in case.body:
                        case.body["model"] = "tiny"  # or few would get far
                    answer = case.call(timeout=60)
                    assert answer.status_code not in (500, 502), (case.path, case.body, answer.text)
                    if answer.status_code != 200:
                        assert "error" in answer.json()

                tried()
