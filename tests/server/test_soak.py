"""Ten minutes of everything at once: every greedy text as if alone, and nothing that grows."""

from __future__ import annotations

import gc
import json
import os
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.breaking import FIXTURES, Alone, Process, serving, streamed, tiny

SOAK_S = float(os.environ.get("CHABOK_SOAK_S", "600"))
CLIENTS = 14
SHARED = "All of these begin in the same way, as prompts with a long instruction do. " * 8
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


class Client:
    """One client that asks for all kinds of things in turn, and notes what is not as it should be."""

    def __init__(self, server: Process, alone: dict[str, Alone], seed: int) -> None:
        self.wrong: list[str] = []
        self.done: Counter[str] = Counter()
        self._server, self._alone = server, alone
        self._chosen = random.Random(seed)
        self._http = httpx.Client(base_url=server.address, timeout=900)

    def run(self, until: float) -> None:
        kinds: list[Callable[[], None]] = [self.text, self.text, self.text, self.several, self.chat]
        kinds += [self.anthropic, self.ollama, self.responses, self.leaving, self.late, self.formed]
        kinds += [self.wrong_request, self.sampled, self.other_model]
        while time.monotonic() < until and len(self.wrong) < 3:
            kind = self._chosen.choice(kinds)
            try:
                kind()
            except httpx.HTTPError as error:
                self.wrong.append(f"{kind.__name__}: {error!r}")
            self.done[kind.__name__] += 1
        self._http.close()

    # What may be asked.

    def _prompt(self) -> str:
        chosen = self._chosen
        start = SHARED[: chosen.choice((0, 0, 300, 600))]
        return f"{start}Number {chosen.randrange(8)}. " + "word " * chosen.choice((0, 3, 150))

    def _body(self, **more: Any) -> dict[str, Any]:
        body = {
            "model": "tiny",
            "prompt": self._prompt(),
            "max_tokens": self._chosen.choice((1, 20, 150)),
            "temperature": 0,
            "priority": self._chosen.choice((0, 0, 0, 5, -5)),
        }
        return body | more

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        """The answer, asking again where the server is full."""
        while (answer := self._http.post(path, json=body)).status_code == 429:
            time.sleep(min(float(answer.headers["retry-after"]), 2))
        if answer.status_code != 200:
            self.wrong.append(f"{path} {body}: {answer.status_code} {answer.text}")
            return None
        return answer

    def _compare(self, what: str, found: str, expected: str) -> None:
        if found != expected:
            self.wrong.append(f"{what}: {found!r} instead of {expected!r}")

    # The kinds of requests.

    def text(self) -> None:
        body = self._body(stream=self._chosen.random() < 0.6)
        answer = self._post("/v1/completions", body)
        if answer is None:
            return
        if body["stream"]:
            found, end = streamed(answer.text)
            self._compare(f"end of {body}", end, "[DONE]")
        else:
            found = answer.json()["choices"][0]["text"]
        self._compare(str(body), found, self._alone["tiny"](body))

    def several(self) -> None:
        prompts = [self._prompt() for _ in range(3)]
        body = self._body(prompt=prompts, n=2)
        answer = self._post("/v1/completions", body)
        for i, choice in enumerate(answer.json()["choices"] if answer is not None else ()):
            expected = self._alone["tiny"]({**body, "prompt": prompts[i // 2]})
            self._compare(f"choice {i} of {body}", choice["text"], expected)

    def other_model(self) -> None:
        name = self._chosen.choice(("other", "third"))
        body = self._body(model=name, prompt=f"Other {self._chosen.randrange(9)}.", max_tokens=20)
        answer = self._post("/v1/completions", body)
        if answer is not None:
            self._compare(str(body), answer.json()["choices"][0]["text"], self._alone[name](body))

    def _conversation(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"Say {self._chosen.randrange(20)}"}]

    def _talk(self, body: dict[str, Any], path: str, text_of: Callable[[httpx.Response], str]) -> None:
        """The same conversation must have the same answer in every dialect, streamed or not, all the time."""
        answer = self._post(path, body)
        if answer is None:
            return
        key = str(body.get("messages", body.get("input")))
        self._compare(f"{path} {body}", text_of(answer), TALKS.setdefault(key, text_of(answer)))

    def chat(self) -> None:
        body = {"model": "tiny", "messages": self._conversation(), "max_tokens": 24, "temperature": 0}
        if self._chosen.random() < 0.5:
            self._talk(
                body, "/v1/chat/completions", lambda one: one.json()["choices"][0]["message"]["content"]
            )
        else:
            self._talk({**body, "stream": True}, "/v1/chat/completions", _deltas)

    def anthropic(self) -> None:
        body = {"model": "tiny", "messages": self._conversation(), "max_tokens": 24, "temperature": 0}
        self._talk({**body, "stream": True}, "/v1/messages", _blocks)

    def ollama(self) -> None:
        options = {"num_predict": 24, "temperature": 0}
        body = {"model": "tiny", "messages": self._conversation(), "options": options}
        self._talk(body, "/api/chat", _lines)

    def responses(self) -> None:
        body = {"model": "tiny", "input": self._conversation(), "max_output_tokens": 24, "temperature": 0}
        self._talk(body, "/v1/responses", _items)

    def leaving(self) -> None:
        body = self._body(stream=True, max_tokens=500, ignore_eos=True)
        n = self._chosen.choice((0, 1, 5, 30))
        with self._http.stream("POST", "/v1/completions", json=body) as answer:
            for _ in zip(range(n), answer.iter_raw(), strict=False):
                pass
        self._http.close()
        self._http = httpx.Client(base_url=self._server.address, timeout=900)

    def late(self) -> None:
        body = self._body(max_tokens=500, ignore_eos=True, deadline_ms=self._chosen.choice((1, 20, 200)))
        answer = self._http.post("/v1/completions", json=body)
        if answer.status_code == 200:
            choice = answer.json()["choices"][0]
            found = choice["text"].rstrip("\ufffd")
            if not self._alone["tiny"](body).startswith(found):
                self.wrong.append(f"{body}: {found!r} is no beginning of what it is alone")
        elif answer.status_code not in (429, 504):
            self.wrong.append(f"{body}: {answer.status_code} {answer.text}")

    def formed(self) -> None:
        body: dict[str, Any] = {
            "model": "tiny",
            "messages": self._conversation(),
            "max_tokens": 60,
            "temperature": 1,
        }
        if self._chosen.random() < 0.5:
            body["response_format"] = {"type": "regex", "pattern": "[a-c]{3,9}x"}
            fits = lambda text: bool(re.fullmatch("[a-c]{3,9}x", text))  # noqa: E731
        else:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
            fits = lambda text: set(json.loads(text)) == {"a", "b"}  # noqa: E731
        answer = self._post("/v1/chat/completions", body)
        if answer is None:
            return
        choice = answer.json()["choices"][0]
        if choice["finish_reason"] == "stop" and not fits(choice["message"]["content"]):
            self.wrong.append(f"{body}: {answer.text}")

    def sampled(self) -> None:
        body = self._body(
            temperature=0.9,
            seed=7,
            n=3,
            logprobs=2,
            prompt=f"Seed {self._chosen.randrange(5)}",
            max_tokens=20,
        )
        answer = self._post("/v1/completions", body)
        if answer is not None:
            texts = [choice["text"] for choice in answer.json()["choices"]]
            self._compare(str(body), str(texts), TALKS.setdefault(body["prompt"], str(texts)))

    def wrong_request(self) -> None:
        body = self._chosen.choice(
            ({"prompt": 1}, {"prompt": "x" * 100_000}, {"prompt": "x", "n": 10**9}, {"x": 1})
        )
        answer = self._http.post("/v1/completions", json=body)
        if answer.status_code != 400:
            self.wrong.append(f"{str(body)[:100]}: {answer.status_code} {answer.text[:200]}")


def _deltas(answer: httpx.Response) -> str:
    choices = (choice for part in events(answer.text) for choice in part["choices"])
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def _blocks(answer: httpx.Response) -> str:
    parts = (part for part in events(answer.text) if part["type"] == "content_block_delta")
    return "".join(part["delta"].get("text", "") for part in parts)


def _lines(answer: httpx.Response) -> str:
    return "".join(json.loads(line)["message"]["content"] for line in answer.text.splitlines())


def _items(answer: httpx.Response) -> str:
    return "".join(part["text"] for item in answer.json()["output"] for part in item.get("content", ()))


TALKS: dict[str, str] = {}
"""What was answered first to each conversation, and to each prompt with a seed."""


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def soak(folder: Path, seconds: float) -> None:
    TALKS.clear()
    paths = {"tiny": tiny(folder), "other": FIXTURES / "gemma3.gguf", "third": FIXTURES / "qwen2.gguf"}
    alone = {name: Alone(path, 2048 if name == "tiny" else 512) for name, path in paths.items()}
    config = folder / "chabok.toml"
    # Memory for one besides the first, so that the other two have to make room for each other.
    config.write_text(
        'memory_budget = "24MB"\n[defaults]\nkv_memory = "8MB"\ncontext = 512\n'
        + "".join(f'[models.{name}]\nsource = "{path}"\n' for name, path in paths.items()).replace(
            "[models.tiny]", '[models.tiny]\npreload = true\ncontext = 2048\nkv_memory = "12MB"', 1
        )
    )
    with serving(folder / "cache", "--config", str(config)) as server:
        begun = time.monotonic()
        until = begun + seconds
        clients = [Client(server, alone, seed) for seed in range(CLIENTS)]
        threads = [threading.Thread(target=client.run, args=(until,)) for client in clients]
        for thread in threads:
            thread.start()
        taken: list[tuple[int, int, int]] = []  # memory, files, threads at regular times
        while time.monotonic() < until and any(thread.is_alive() for thread in threads):
            time.sleep(min(seconds / 60, 5))
            taken.append((server.rss, server.n_files, server.n_threads))
        for thread in threads:
            thread.join(900)
            assert not thread.is_alive()
        done = sum((client.done for client in clients), Counter())
        print(f"{done.total()} requests in {time.monotonic() - begun:.0f} s: {dict(done)}")
        print("MB, files, threads:", [(a >> 20, b, c) for a, b, c in taken[:: max(len(taken) // 30, 1)]])
        wrong = [each for client in clients for each in client.wrong]
        assert wrong == [], "\n".join(wrong[:5])
        assert server.settled()
        server.unharmed()
        assert seconds < 30 or len(done) == 12
        assert server.metric("chabok_model_loads_total") > seconds / 5
        assert server.metric("chabok_cached_tokens_total") > 0
        assert server.metric("chabok_requests_running") == server.metric("chabok_requests_waiting") == 0
        assert server.metric("chabok_http_requests_in_progress") <= 1  # this one
        # Growth: the last third against the middle one, when everything had been used once.
        third = len(taken) // 3
        for at, allowed in ((0, 12e6), (1, 4), (2, 3)):
            middle, last = (
                sorted(each[at] for each in part) for part in (taken[third : 2 * third], taken[2 * third :])
            )
            assert last[len(last) // 2] - middle[len(middle) // 2] <= allowed, (at, taken)
        assert server.stop() == 0
    gc.collect()


@pytest.mark.wide
@pytest.mark.skipif(SOAK_S <= 0, reason="CHABOK_SOAK_S is 0")
def test_ten_minutes_of_everything_at_once_mix_nothing_up_and_let_nothing_grow(tmp_path: Path) -> None:
    soak(tmp_path, SOAK_S)
