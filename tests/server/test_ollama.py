"""Ollama's interface, as its own client and as bytes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import ollama
import pytest
from tests.checkpoints.hub_server import Hub, serving
from tests.models import model_path
from tests.server.conftest import FIXTURES, Running, tiny
from tests.server.conftest import serving as serving_models

from chabok.engine.request import Completion
from chabok.engine.timings import Timings
from chabok.errors import RequestError
from chabok.server.events import CallArguments, CallStart, Ended, Event, Reasoning, Text, Usage
from chabok.server.ollama import Writer
from chabok.server.ollama_bodies import Message, _messages, keep_alive_s
from chabok.server.settings import ModelSettings, Settings

HELLO = [{"role": "user", "content": "Hello"}]
GREEDY = {"temperature": 0, "num_predict": 12}


@pytest.fixture(scope="module")
def client(running: Running) -> ollama.Client:
    return ollama.Client(running.url)


def post(running: Running, path: str, body: Any) -> httpx.Response:
    return httpx.post(running.url + path, json=body, timeout=60)


def test_a_chat_has_the_form_the_client_knows(client: ollama.Client) -> None:
    answer = client.chat("tiny", HELLO, options=GREEDY)
    assert answer.message.role == "assistant"
    assert answer.message.content
    assert (answer.done, answer.done_reason, answer.eval_count) == (True, "length", 12)
    assert answer.prompt_eval_count
    durations = [answer.total_duration, answer.prompt_eval_duration, answer.eval_duration]
    assert all(each is not None and each > 0 for each in durations)
    assert answer.total_duration > answer.eval_duration  # type: ignore[operator]


def test_durations_are_the_engines_in_nanoseconds(running: Running) -> None:
    body = {"model": "tiny", "messages": HELLO, "options": GREEDY, "stream": False}
    answer = post(running, "/api/chat", body).json()
    timings = answer["timings"]
    assert answer["total_duration"] == pytest.approx(timings["total_ms"] * 1e6, rel=1e-3)
    assert answer["prompt_eval_duration"] == pytest.approx(timings["prefill_ms"] * 1e6, rel=1e-2)
    assert answer["eval_duration"] >= timings["decode_ms"] * 1e6 * 0.999
    assert answer["prompt_eval_count"] == timings["prompt_tokens"]


def test_the_text_is_that_of_the_python_api(running: Running, client: ollama.Client) -> None:
    from chabok import SamplingParams

    params = SamplingParams(max_tokens=12)
    assert client.chat("tiny", HELLO, options=GREEDY).message.content == running.llm.chat(HELLO, params).text
    raw = client.generate("tiny", "Hello", raw=True, options=GREEDY).response
    assert raw == running.llm.generate("Hello", params).text
    assert client.generate("tiny", "Hello", options=GREEDY).response == running.llm.chat(HELLO, params).text


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_a_streamed_answer_is_the_one_given_at_once(running: Running, path: str) -> None:
    body: dict[str, Any] = {"model": "tiny", "options": GREEDY}
    body |= {"messages": HELLO} if path == "/api/chat" else {"prompt": "Hello"}
    whole = post(running, path, {**body, "stream": False}).json()
    response = post(running, path, body)
    assert response.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in response.text.splitlines()]

    def text(line: dict[str, Any]) -> str:
        return line["message"]["content"] if path == "/api/chat" else line["response"]

    assert len(lines) > 2
    assert "".join(map(text, lines)) == text(whole) != ""
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    same = ("model", "done_reason", "eval_count", "prompt_eval_count")
    assert [lines[-1][key] for key in same] == [whole[key] for key in same]


def test_the_client_streams(client: ollama.Client) -> None:
    whole = client.chat("tiny", HELLO, options=GREEDY).message.content
    pieces = [part.message.content or "" for part in client.chat("tiny", HELLO, options=GREEDY, stream=True)]
    assert "".join(pieces) == whole
    parts = list(client.generate("tiny", "Hello", options=GREEDY, stream=True))
    assert parts[-1].done_reason == "length"


async def _answers(url: str) -> tuple[str, str]:
    client = ollama.AsyncClient(url)
    whole = await client.chat("tiny", HELLO, options=GREEDY)
    pieces = [part async for part in await client.chat("tiny", HELLO, options=GREEDY, stream=True)]
    return whole.message.content or "", "".join(part.message.content or "" for part in pieces)


def test_the_asynchronous_client_gets_the_same(running: Running) -> None:
    whole, streamed = asyncio.run(_answers(running.url))
    assert whole == streamed != ""


def test_log_probabilities_are_given_where_asked_for(client: ollama.Client) -> None:
    answer = client.chat("tiny", HELLO, options=GREEDY, logprobs=True, top_logprobs=3)
    assert answer.logprobs is not None
    assert len(answer.logprobs) == 12
    assert all(len(each.top_logprobs or ()) == 3 for each in answer.logprobs)
    assert all(each.logprob == each.top_logprobs[0].logprob for each in answer.logprobs)  # type: ignore[index]


def test_a_seed_gives_the_same_text_again(client: ollama.Client) -> None:
    options = {"temperature": 1.5, "seed": 7, "num_predict": 16}
    first, second = (client.chat("tiny", HELLO, options=options).message.content for _ in range(2))
    other = client.chat("tiny", HELLO, options={**options, "seed": 8}).message.content
    assert first == second != other


def test_without_a_prompt_a_model_is_loaded(client: ollama.Client) -> None:
    loaded = client.generate("tiny")
    assert (loaded.response, loaded.done_reason) == ("", "load")
    assert client.chat("tiny", []).done_reason == "load"
    with pytest.raises(ollama.ResponseError, match="stays") as caught:
        client.generate("tiny", keep_alive=0)
    assert caught.value.status_code == 409


def test_a_model_is_kept_as_long_as_asked_and_unloaded_on_request(tmp_path: Path) -> None:
    settings = Settings(
        models=(tiny("tiny", "llama.gguf", preload=False),), installed=False, prefix_disk=False
    )
    with serving_models(settings) as one:
        client = ollama.Client(one.url)
        assert client.ps().models == []
        first = client.chat("tiny", HELLO, options=GREEDY, keep_alive="10m")
        assert first.load_duration is not None
        assert first.load_duration > 1_000_000  # nanoseconds
        (loaded,) = client.ps().models
        assert loaded.expires_at is not None
        assert 590 < loaded.expires_at.timestamp() - time.time() <= 601
        assert client.chat("tiny", HELLO, options=GREEDY).load_duration < first.load_duration  # type: ignore
        assert client.generate("tiny", keep_alive=0).done_reason == "unload"
        assert client.ps().models == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"colour": "blue"}, "colour"),
        ({"options": {"colour": "blue"}}, "colour"),
        ({"options": {"mirostat": 2}}, "options.mirostat"),
        ({"options": {"tfs_z": 0.5}}, "options.tfs_z"),
        ({"options": {"num_ctx": 10_000_000}}, "options.num_ctx"),
        ({"options": {"repeat_penalty": 1.1, "repeat_last_n": 64}}, "options.repeat_last_n"),
        ({"options": {"temperature": "hot"}}, "options.temperature"),
        ({"options": {"top_p": 7}}, "top_p"),
        ({"options": {"num_predict": -7}}, "options.num_predict"),
        ({"format": "xml"}, "format"),
        ({"keep_alive": "soon"}, "keep_alive"),
        ({"truncate": True}, "truncate"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": "", "images": ["aGk="]}]}, "images"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"messages": None, "model": ""}, "model"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    running: Running, change: dict[str, Any], named: str
) -> None:
    response = post(running, "/api/chat", {"model": "tiny", "messages": HELLO, **change})
    assert response.status_code == 400, response.text
    assert list(response.json()) == ["error"]
    assert named in response.json()["error"]


@pytest.mark.parametrize(
    "change",
    [{"suffix": "end"}, {"template": "{{ .Prompt }}"}, {"context": [1]}, {"images": ["aGk="]}, {"width": 9}],
)
def test_what_generate_has_no_room_for_is_refused_by_name(running: Running, change: dict[str, Any]) -> None:
    response = post(running, "/api/generate", {"model": "tiny", "prompt": "Hello", **change})
    assert response.status_code == 400
    assert next(iter(change)) in response.json()["error"]


def test_an_unknown_model_is_the_clients_own_error(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="tiny") as caught:
        client.chat("tinny", HELLO)
    assert caught.value.status_code == 404


def test_models_are_listed_and_shown(running: Running, client: ollama.Client) -> None:
    listed = client.list().models
    assert [model.model for model in listed] == ["tiny", "tiny-spm"]
    assert listed[0].details is not None
    assert listed[0].details.family == "llama"
    shown = client.show("tiny:latest")
    assert shown.modelinfo is not None
    assert shown.modelinfo["general.architecture"] == "llama"
    assert "completion" in (shown.capabilities or [])
    running_now = client.ps().models
    assert {model.name for model in running_now} == {"tiny", "tiny-spm"}
    assert running_now[0].context_length == running.llm.context


@pytest.mark.parametrize("path", ["create", "copy", "push", "embed", "embeddings", "delete"])
def test_what_is_not_offered_says_so(running: Running, path: str) -> None:
    response = post(running, f"/api/{path}", {"model": "tiny"})
    assert response.status_code == 501
    assert f"/api/{path}" in response.json()["error"]


def test_only_known_sources_are_fetched(running: Running, client: ollama.Client) -> None:
    for name in ("/etc/passwd", "nobody-knows-it", "../x.gguf", "https://example.com/x.gguf"):
        with pytest.raises(ollama.ResponseError, match="catalogue") as caught:
            client.pull(name)
        assert caught.value.status_code == 400


def test_a_sign_of_life_is_what_clients_look_for(running: Running) -> None:
    assert httpx.get(running.url).text == "Ollama is running"
    assert httpx.head(running.url).status_code == 200
    assert httpx.get(running.url + "/api/version").json()["version"]


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (None, None),
        (0, 0),
        ("0", 0),
        (-1, float("inf")),
        ("-1m", float("inf")),
        ("5m", 300),
        ("1h30m", 5400),
        ("1.5s", 1.5),
        ("250ms", 0.25),
        (90, 90),
        ("90", 90),
    ],
)
def test_keep_alive_is_seconds_or_a_duration(given: Any, seconds: float | None) -> None:
    assert keep_alive_s(given) == seconds


@pytest.mark.parametrize("given", ["", "m", "5 minutes", "1x", "h5"])
def test_another_keep_alive_is_refused(given: str) -> None:
    with pytest.raises(RequestError, match="keep_alive"):
        keep_alive_s(given)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A stand-in for the hub, and an empty folder for models."""
    with serving() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setenv("CHABOK_CACHE", str(tmp_path / "cache"))
        running.repos["someone/Tiny-GGUF"] = {"Tiny-Q4_K_M.gguf": (FIXTURES / "llama.gguf").read_bytes()}
        yield running


def test_a_model_is_fetched_and_its_progress_told(client: ollama.Client, hub: Hub, tmp_path: Path) -> None:
    lines = list(client.pull("hf.co/someone/Tiny-GGUF:Q4_K_M", stream=True))
    assert lines[-1].status == "success"
    size = (FIXTURES / "llama.gguf").stat().st_size
    downloads = [line for line in lines if line.status == "Downloading Tiny-Q4_K_M.gguf"]
    assert (downloads[-1].completed, downloads[-1].total) == (size, size)
    assert list((tmp_path / "cache").rglob("Tiny-Q4_K_M.gguf"))
    assert client.pull("hf:someone/Tiny-GGUF:Q4_K_M").status == "success"  # at once: it is here


def test_a_model_that_is_not_there_is_the_clients_own_error(client: ollama.Client, hub: Hub) -> None:
    with pytest.raises(ollama.ResponseError, match="not found"):
        client.pull("hf:someone/Else-GGUF")
    with pytest.raises(ollama.ResponseError, match="not found"):
        list(client.pull("hf:someone/Else-GGUF", stream=True))


def test_a_client_that_leaves_ends_its_download_and_lets_the_next_one_begin(
    running: Running, client: ollama.Client, hub: Hub
) -> None:
    hub.repos["someone/Tiny-GGUF"]["Tiny-Q4_K_M.gguf"] += bytes(300_000)
    hub.stall_after = 50_000
    body = {"model": "hf:someone/Tiny-GGUF"}
    with httpx.stream("POST", running.url + "/api/pull", json=body, timeout=60) as response:
        lines = response.iter_lines()
        while "Downloading" not in next(lines):
            pass
        busy = post(running, "/api/pull", body)
        assert busy.status_code == 429
        assert int(busy.headers["retry-after"]) > 0
    hub.stall_after = None
    hub.gone.set()
    until = time.monotonic() + 20
    while (again := post(running, "/api/pull", {**body, "stream": False})).status_code == 429:
        assert time.monotonic() < until
        time.sleep(0.1)
    assert again.status_code in (200, 502)  # the file has a tail that is no model's


def test_a_server_may_fetch_nothing(running: Running, monkeypatch: pytest.MonkeyPatch, hub: Hub) -> None:
    monkeypatch.setattr(type(running.roster.settings), "allows_pull", False)
    refused = post(running, "/api/pull", {"model": "hf:someone/Tiny-GGUF"})
    assert refused.status_code == 403
    assert "chabok pull" in refused.json()["error"]
    assert hub.requests == []


def test_calls_are_given_whole_and_in_their_place() -> None:
    writer = Writer("m", chat=True, load_s=0.0)
    events: list[Event] = [
        Reasoning(0, "Hm."),
        Text(0, "Look: "),
        CallStart(0, 0, "a", "add"),
        CallArguments(0, 0, '{"x": '),
        CallArguments(0, 0, "1}"),
        CallStart(0, 1, "b", "now"),
        Text(0, "Done."),
        Ended(0, "tool_calls", None, Completion("", [], "stop", Timings()), Usage(1, 1)),
    ]
    lines = [json.loads(line) for line in b"".join(writer.write([event]) for event in events).splitlines()]
    messages = [line["message"] for line in lines]
    assert [message["content"] for message in messages] == ["", "Look: ", "", "", "Done.", ""]
    assert messages[0]["thinking"] == "Hm."
    assert [message["tool_calls"][0]["function"] for message in messages if "tool_calls" in message] == [
        {"index": 0, "name": "add", "arguments": {"x": 1}},
        {"index": 1, "name": "now", "arguments": {}},
    ]
    assert lines[-1]["done"]
    assert lines[-1]["eval_duration"] > 0


def test_an_error_within_a_stream_is_a_line_of_its_own() -> None:
    assert json.loads(Writer("m", chat=True, load_s=0.0).fail(RequestError("no"))) == {"error": "no"}


def test_results_of_tools_find_their_calls() -> None:
    call = {"function": {"name": "add", "arguments": {"x": 1}}}
    other = {"function": {"name": "now", "arguments": {}}}
    given = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "thinking": "Hm.", "tool_calls": [call, other]},
        {"role": "tool", "content": "noon", "tool_name": "now"},
        {"role": "tool", "content": "2"},
    ]
    made = _messages(msgspec.convert(given, list[Message]))
    assert made[1]["reasoning_content"] == "Hm."
    assert [each["id"] for each in made[1]["tool_calls"]] == ["call_1", "call_2"]
    assert [(each["tool_call_id"], each["name"]) for each in made[2:]] == [
        ("call_2", "now"),
        ("call_1", "add"),
    ]


@pytest.mark.wide
def test_a_real_model_calls_a_function_and_answers_in_a_form() -> None:
    model = ModelSettings("qwen", str(model_path("qwen15")), preload=True, sampling={"temperature": 0.0})
    with serving_models(Settings(models=(model,), installed=False, prefix_disk=False)) as one:
        client = ollama.Client(one.url)

        def get_weather(city: str) -> str:
            """The weather in a city.

            Args:
                city: its name
            """
            return f"{city}: 31 degrees, sunny"

        asked: list[Any] = [{"role": "user", "content": "What is the weather in Tehran? Use the function."}]
        whole = client.chat("qwen", asked, tools=[get_weather])
        streamed = list(client.chat("qwen", asked, tools=[get_weather], stream=True))
        calls = [call for part in streamed for call in part.message.tool_calls or ()]
        assert [call.function for call in whole.message.tool_calls or ()] == [call.function for call in calls]
        text = "".join(part.message.content or "" for part in streamed)
        assert text == whole.message.content
        schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
        schema |= {"additionalProperties": False}
        form = client.chat(
            "qwen", [{"role": "user", "content": "Ali is thirty. How old is he?"}], format=schema
        )
        assert json.loads(form.message.content or "") == {"age": 30}
