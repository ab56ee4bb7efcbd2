"""URLs, keys and headers; finding out what answers, and how long prompts are for it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from chabok.measure import Endpoint, MeasureError, Ruler, Synthetic, calibrate, detect


@pytest.mark.parametrize(
    ("url", "dialect", "expected"),
    [
        ("http://h:1", "openai-chat", "http://h:1/v1/chat/completions"),
        ("http://h:1/v1/", "openai-chat", "http://h:1/v1/chat/completions"),
        ("http://h:1/proxy/v1", "anthropic", "http://h:1/proxy/v1/messages"),
        ("http://h:1/v1/completions", "openai-chat", "http://h:1/v1/completions"),
        ("https://h/api", "ollama-chat", "https://h/api/chat"),
        ("http://h:1/api/generate", "openai-chat", "http://h:1/api/generate"),
    ],
)
def test_a_url_may_be_that_of_the_server_its_version_or_a_method(
    url: str, dialect: str, expected: str
) -> None:
    assert Endpoint.at(url, dialect=dialect).url == expected


def test_a_key_from_the_environment_goes_to_its_vendor_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    assert Endpoint.at("https://api.openai.com").key == "sk-secret"
    assert Endpoint.at("https://api.openai.com.evil.example").key == ""
    assert Endpoint.at("http://127.0.0.1:8000").key == ""
    assert "sk-secret" not in repr(Endpoint.at("https://api.openai.com"))


def test_openai_itself_gets_only_fields_that_it_takes() -> None:
    endpoint = Endpoint.at("https://api.openai.com", model="m", key="k")
    body = endpoint.dialect.body(endpoint.ask("hi", 5))
    assert "ignore_eos" not in body
    assert body["max_completion_tokens"] == 5


def test_headers_and_keys_that_would_break_the_request_are_refused() -> None:
    for options in ({"key": "a\r\nX: y"}, {"key": "schlüssel"}, {"headers": {"X-A": "b\nc"}}):
        with pytest.raises(MeasureError, match="plain ASCII"):
            Endpoint.at("http://h", **options)  # type: ignore[arg-type]
    with pytest.raises(MeasureError, match="no dialect 'grpc'"):
        Endpoint.at("http://h", dialect="grpc")


Routes = dict[str, Callable[[Any], tuple[int, Any]]]


@pytest.fixture
def serve() -> Iterator[Callable[[Routes], str]]:
    running: list[ThreadingHTTPServer] = []

    def start(routes: Routes) -> str:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length) or b"null")
                found = routes.get(self.path)
                status, answer = found(body) if found else (404, {"error": "no such method"})
                content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                kind = "text/event-stream" if content.startswith(b"data:") else "application/json"
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = handle_any  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        running.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def models(*names: str) -> dict[str, Any]:
    return {"data": [{"id": name, "owned_by": "vllm"} for name in names]}


def test_an_openai_compatible_server_is_found_with_its_model(serve: Callable[[Routes], str]) -> None:
    url = serve({"/v1/models": lambda _: (200, models("a", "b"))})
    found = asyncio.run(detect(url + "/v1"))
    assert (found.dialect.name, found.model, found.server) == ("openai-chat", "a", "vllm")
    assert "there are also b" in found.notes[0]
    unknown = asyncio.run(detect(url, model="c"))
    assert unknown.model == "c"
    assert "does not list 'c'" in unknown.notes[0]


def test_ollama_is_asked_in_its_own_dialect_and_a_loaded_model_is_preferred(
    serve: Callable[[Routes], str],
) -> None:
    url = serve(
        {
            "/": lambda _: (200, b"Ollama is running"),
            "/api/tags": lambda _: (200, {"models": [{"name": "x:1b"}, {"name": "y:1b"}]}),
            "/api/ps": lambda _: (200, {"models": [{"name": "y:1b"}]}),
            "/v1/models": lambda _: (200, models("x:1b")),
        }
    )
    found = asyncio.run(detect(url))
    assert (found.dialect.name, found.model) == ("ollama-chat", "y:1b")


def test_an_anthropic_server_is_found_by_its_method(serve: Callable[[Routes], str]) -> None:
    url = serve({"/v1/messages": lambda body: (400, {"error": {"message": "model: field required"}})})
    assert asyncio.run(detect(url, model="claude")).dialect.name == "anthropic"


def test_what_offers_no_known_api_or_wants_a_key_is_said_so(serve: Callable[[Routes], str]) -> None:
    with pytest.raises(MeasureError, match="offers no API that is known"):
        asyncio.run(detect(serve({"/": lambda _: (200, b"hello")})))
    with pytest.raises(MeasureError, match=r"status 401.*--api-key"):
        asyncio.run(detect(serve({"/v1/models": lambda _: (401, {"error": "who are you"})})))
    with pytest.raises(MeasureError, match="name one with --model"):
        asyncio.run(detect(serve({"/v1/models": lambda _: (200, models())})))


class Words:
    """A tokenizer of words; those that begin with ``split`` letters are two tokens."""

    def __init__(self, split: str = "", overhead: int = 11, tells: bool = True) -> None:
        self.split, self.overhead, self.tells, self.calls = split, overhead, tells, 0

    def count(self, text: str) -> int:
        return sum(2 if word[0] in self.split else 1 for word in text.split()) + self.overhead

    def __call__(self, body: Any) -> tuple[int, bytes]:
        self.calls += 1
        usage = {"prompt_tokens": self.count(body["messages"][0]["content"]), "completion_tokens": 1}
        chunks = [
            {"choices": [{"delta": {"content": "x"}, "finish_reason": "length"}]},
            {"choices": [], "usage": usage if self.tells else None},
        ]
        return 200, b"".join(
            b"data: " + json.dumps(c).encode() + b"\n\n" for c in chunks
        ) + b"data: [DONE]\n\n"


def ruler_for(url: str) -> Ruler:
    async def go() -> Ruler:
        endpoint = Endpoint.at(url, model="m")
        async with endpoint.client() as client:
            return await calibrate(endpoint, client)

    return asyncio.run(go())


def test_prompts_have_exactly_the_tokens_asked_for_after_asking_the_server(
    serve: Callable[[Routes], str],
) -> None:
    words = Words()
    ruler = ruler_for(serve({"/v1/chat/completions": words}))
    assert (ruler.source, ruler.overhead) == ("usage", 11)
    assert words.calls <= 4
    for number in range(20):
        made = Synthetic(100, 1, ruler=ruler)(number)
        assert words.count(made.text) == made.tokens == 100


def test_words_that_the_model_cuts_in_two_are_left_out(serve: Callable[[Routes], str]) -> None:
    words = Words(split="s")
    ruler = ruler_for(serve({"/v1/chat/completions": words}))
    assert ruler.source == "usage"
    assert not any(word.startswith("s") for word in ruler.words)
    assert words.count(Synthetic(77, 1, ruler=ruler)(5).text) == 77


def test_a_server_that_tells_no_counts_leaves_lengths_assumed(serve: Callable[[Routes], str]) -> None:
    assert ruler_for(serve({"/v1/chat/completions": Words(tells=False)})).source == "assumed"
