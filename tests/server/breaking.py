"""``chabok serve`` as a process on tiny models, to be killed, crowded and lied to."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from tests.cli.processes import ROOT, environment
from tests.server.conftest import FIXTURES, roomy

from chabok import LLM, SamplingParams
from chabok.checkpoints import paths


class Process:
    """A server of its own.

    cache: its CHABOK_CACHE; compiled kernels are those of this process. said: what it writes.
    """

    def __init__(self, cache: Path, *arguments: str, logs: Path | None = None, **env: str) -> None:
        cache.mkdir(parents=True, exist_ok=True)
        kernels = cache / "kernels"
        if not kernels.exists():
            paths.kernels_dir().mkdir(parents=True, exist_ok=True)
            kernels.symlink_to(paths.kernels_dir())
        self.cache = cache
        self.log = (logs or cache.parent) / f"{cache.name}-{time.monotonic_ns()}.log"
        started = time.monotonic()
        with self.log.open("wb") as out:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "chabok", "serve", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=ROOT,
                env=environment(CHABOK_CACHE=str(cache), **env),
            )
        self.pid = self.popen.pid
        self._started = started
        self.start_s = 0.0
        """How long it took to be ready; set by ``ready``."""

    def listening(self) -> Process:
        """Wait until it listens."""
        while not (found := re.search(r"listens at (http\S+)", self.said)):
            self._still()
        self.address = found[1]
        self.host, self.port = httpx.URL(self.address).host, httpx.URL(self.address).port or 0
        return self

    def ready(self) -> Process:
        """Wait until its models are loaded."""
        self.listening()
        while httpx.get(self.address + "/ready").status_code != 200:
            self._still()
        self.start_s = time.monotonic() - self._started
        return self

    def _still(self) -> None:
        time.sleep(0.01)
        assert self.popen.poll() is None, self.said
        assert time.monotonic() - self._started < 90, self.said

    @property
    def said(self) -> str:
        return self.log.read_text("utf-8", "replace")

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()

    def stop(self, timeout: float = 60) -> int:
        """End it gracefully; its exit code."""
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(timeout)

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body)
        return httpx.post(self.address + path, content=content, **{"timeout": 120, **more})

    def raw(self, data: bytes, timeout: float = 30) -> bytes:
        """What is answered to these bytes, until the server hangs up or the time is up."""
        with self.connect(timeout) as sock:
            with contextlib.suppress(OSError):  # hung up before all was sent
                sock.sendall(data)
            return read_all(sock)

    def connect(self, timeout: float = 30) -> socket.socket:
        sock = socket.create_connection((self.host, self.port))
        sock.settimeout(timeout)
        return sock

    # What it takes.

    @property
    def rss(self) -> int:
        """Bytes of memory."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return 1024 * int(re.search(r"VmRSS:\s*(\d+)", status)[1])  # type: ignore[index]

    @property
    def n_threads(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/task"))

    @property
    def n_files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        text = httpx.get(self.address + "/metrics").text
        return sum(float(value) for value in re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE))

    def settled(self, timeout: float = 30) -> bool:
        """Wait until no request runs or waits; whether it came to that."""
        until = time.monotonic() + timeout
        while time.monotonic() < until:
            if not self.metric("chabok_requests_running") and not self.metric("chabok_requests_waiting"):
                return True
            time.sleep(0.05)
        return False

    def unharmed(self) -> None:
        """Raise AssertionError if anything failed within the server, or it does not serve any more."""
        assert self.popen.poll() is None, self.said[-5000:]
        said = self.said
        assert "Traceback" not in said, said[max(said.index("Traceback") - 500, 0) :][:4000]
        assert "Error:" not in said, said[-4000:]
        assert httpx.get(self.address + "/health", timeout=30).status_code == 200


def read_all(sock: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionResetError, TimeoutError):
        while piece := sock.recv(65536):
            data += piece
    return data


def status_of(answer: bytes) -> int:
    assert answer.startswith(b"HTTP/1.1 "), answer[:200]
    return int(answer[9:12])


def request(body: bytes = b"", *headers: str, path: str = "/v1/completions", method: str = "POST") -> bytes:
    """A request as bytes, without Content-Length unless it is among the headers."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def sized(body: Any, *headers: str, path: str = "/v1/completions") -> bytes:
    """A whole request with a JSON body."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return request(data, f"Content-Length: {len(data)}", *headers, path=path)


@contextlib.contextmanager
def serving(cache: Path, *arguments: str, logs: Path | None = None, **env: str) -> Iterator[Process]:
    """A server that is ready: of the model "tiny", 4096 tokens of context, unless arguments name others."""
    if not any("=" in argument for argument in arguments):
        arguments = (f"tiny={tiny(cache.parent)}", *arguments)
    process = Process(
        cache, *arguments, "--port", "0", "--no-installed", "--no-pull", "--threads", "1", logs=logs, **env
    )
    try:
        yield process.ready()
    finally:
        process.kill()


def tiny(folder: Path, file: str = "llama.gguf", context: int = 4096) -> Path:
    """The file of a tiny model with room for long prompts."""
    path = folder / file
    return path if path.exists() else roomy(file, folder, context)


class Alone:
    """What a model answers to each prompt alone, greedily, without anything cached."""

    def __init__(self, path: Path, context: int = 4096) -> None:
        self._llm = LLM(path, threads=1, pack=False, context=context, prefix_disk=False)
        self._known: dict[str, str] = {}

    def __call__(self, body: dict[str, Any]) -> str:
        """The answer to a body that ``greedy`` made."""
        given = {name: body[name] for name in ("max_tokens", "ignore_eos", "stop") if name in body}
        key = json.dumps([body["prompt"], given])
        if key not in self._known:
            params = SamplingParams(temperature=0, **given)
            self._known[key] = self._llm.generate(body["prompt"], params).text
        return self._known[key]


def greedy(prompt: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    """A body for /v1/completions."""
    return {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}


def streamed(text: str) -> tuple[str, str]:
    """The text and the end ("[DONE]", or the last event) of a stream of /v1/completions."""
    events = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    parts = [json.loads(event) for event in events if event != "[DONE]"]
    words = "".join(choice["text"] for part in parts for choice in part.get("choices", ()))
    return words, events[-1] if events else ""


__all__ = ["FIXTURES", "Alone", "Process", "greedy", "read_all", "request", "serving", "sized", "status_of"]
