"""A server that is killed at random moments, and the next one, which finds what the last one left."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from pathlib import Path

import httpx
import pytest
from tests.server.breaking import Alone, Process, greedy, serving, streamed, tiny

SHARED = "A long beginning that many prompts share, so that its pages are worth keeping. " * 4
PROMPTS = [f"{SHARED[: 80 * (i % 5)]}Prompt number {i}." for i in range(12)]
TOKENS = 40
LONG = max(PROMPTS, key=len)


class Load:
    """Clients that stream answers to the prompts, over and over, until the server is gone; wrong: texts that
    differ from those computed alone."""

    def __init__(self, process: Process, expected: dict[str, str], seed: int, n: int = 6) -> None:
        self.wrong: list[tuple[str, str, str]] = []
        self.answered = 0
        self._process, self._expected = process, expected
        self._threads = [threading.Thread(target=self._run, args=(seed * 100 + i,)) for i in range(n)]
        for thread in self._threads:
            thread.start()

    def _run(self, seed: int) -> None:
        chosen = random.Random(seed)
        url = self._process.address + "/v1/completions"
        with httpx.Client(timeout=30) as client:
            while True:
                prompt = chosen.choice(PROMPTS)
                stream = chosen.random() < 0.7
                body = greedy(prompt, TOKENS, stream=stream)
                text = end = ""
                try:
                    if stream:
                        with client.stream("POST", url, json=body) as answer:
                            for piece in answer.iter_text():
                                text += piece
                    else:
                        text = client.post(url, json=body).text
                except httpx.HTTPError:
                    # What had come by then must be right, too.
                    whole = text.rpartition("\n\n")[0] if stream else ""
                    if whole and not self._expected[prompt].startswith(streamed(whole)[0].rstrip("\ufffd")):
                        self.wrong.append((prompt, self._expected[prompt], streamed(whole)[0]))
                    return
                if stream:
                    text, end = streamed(text)
                else:
                    text = httpx.Response(200, text=text).json()["choices"][0]["text"]
                if text != self._expected[prompt] or (stream and end != "[DONE]"):
                    self.wrong.append((prompt, self._expected[prompt], text))
                self.answered += 1

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()


def kill_servers(folder: Path, n: int) -> None:
    path = tiny(folder)
    alone = Alone(path)
    expected = {prompt: alone(greedy(prompt, TOKENS)) for prompt in PROMPTS}
    chosen = random.Random(n)
    cache = folder / "cache"
    options = (f"tiny={path}", "--no-installed", "--threads", "1")
    port = "0"
    starts: list[float] = []
    answered = cached = 0
    for i in range(n):
        if chosen.random() < 0.2:  # its weights are packed anew, and may be half so when it is killed
            shutil.rmtree(cache / "packed", ignore_errors=True)
        process = Process(cache, *options, "--port", port)
        try:
            if chosen.random() < 0.25:  # while it starts: packing weights, loading, reading the cache
                time.sleep(chosen.uniform(0, 1.5))
                continue
            process.ready()
            starts.append(process.start_s)
            port = str(process.port)  # the same again at once: it must be free
            first = process.post("/v1/completions", greedy(LONG, TOKENS)).json()
            assert first["choices"][0]["text"] == expected[LONG]
            cached += first["timings"]["cached_tokens_disk"] > 0
            load = Load(process, expected, i)
            time.sleep(chosen.uniform(0, 1.2))
        finally:
            process.kill()
        load.join()
        assert load.wrong == []
        answered += load.answered
        said = process.said
        assert "damaged" not in said, said
        assert "Traceback" not in said, said
    assert answered > n
    assert n < 10 or cached > len(starts) // 3, "the cache on disk was of no use"
    with serving(cache, *options[:1]) as last:
        for prompt in PROMPTS:
            answer = last.post("/v1/completions", greedy(prompt, TOKENS)).json()
            assert answer["choices"][0]["text"] == expected[prompt]
        starts.append(last.start_s)
        assert last.stop() == 0
    assert "damaged" not in last.said
    starts.sort()
    # Others may have the processors for a while, so not the slowest start.
    assert starts[int(len(starts) * 0.9)] < 3 * starts[0] + 3
    left = [path.name for path in cache.rglob("*") if path.name.endswith((".tmp", ".lock", ".part"))]
    assert len(left) < n, left
    assert os.path.getsize(path) > 0


def test_a_server_killed_at_random_moments_comes_back_with_right_answers(tmp_path: Path) -> None:
    kill_servers(tmp_path, 2)


@pytest.mark.wide
def test_a_server_killed_a_hundred_times_comes_back_with_right_answers(tmp_path: Path) -> None:
    kill_servers(tmp_path, int(os.environ.get("CHABOK_KILLS", "100")))
