"""A running server on tiny models, shared by all tests of it."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from chabok import LLM
from chabok.server.app import build
from chabok.server.auth import Keys
from chabok.server.roster import Roster
from chabok.server.running import Server
from chabok.server.settings import ModelSettings, Settings

FIXTURES = Path(__file__).parents[1] / "fixtures"

T = TypeVar("T")


@dataclass
class Running:
    """A server in a thread of its own, with its event loop."""

    url: str
    server: Server
    roster: Roster
    loop: asyncio.AbstractEventLoop

    @property
    def v1(self) -> str:
        return self.url + "/v1"

    @property
    def llm(self) -> LLM:
        """The first model, as the Python API has it."""
        return self.llms[next(iter(self.llms))]

    @property
    def llms(self) -> dict[str, LLM]:
        """The models that are loaded, by name."""
        return {served.name: served.llm.llm for served in self.roster.loaded()}

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run something on the server's event loop, and wait for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)


@contextmanager
def serving(
    settings: Settings, keys: Keys | None = None, wrap: Callable[[Any], Any] = lambda app: app
) -> Any:
    """A server with these settings, on a free port, ready."""
    roster = Roster(settings)
    keys = keys or Keys(None, {})
    app = wrap(build(roster, settings, keys))
    listener = socket.create_server(("127.0.0.1", 0))
    ready = threading.Event()
    server = Server(app, roster, settings, [listener], ready=ready.set)
    thread = threading.Thread(target=server.run_to_end, daemon=True)
    thread.start()
    while not ready.wait(0.01):
        assert thread.is_alive(), "the server ended before it began"
    loop = server._loop
    assert loop is not None
    try:
        yield Running(f"http://127.0.0.1:{listener.getsockname()[1]}", server, roster, loop)
    finally:
        server.stop()
        thread.join(30)
        assert not thread.is_alive()


def tiny(name: str, file: str | Path, **settings: Any) -> ModelSettings:
    """A fixture as a model that is served: one thread, greedy by default."""
    settings = {"preload": True, "threads": 1, "pack": False, "sampling": {"temperature": 0.0}, **settings}
    return ModelSettings(name, str(FIXTURES / file), **settings)


def roomy(file: str, directory: Path, context: int = 4096) -> Path:
    """A fixture, whose contexts are short, as a file that says it was made for longer ones."""
    data = (FIXTURES / file).read_bytes()
    at = data.index(b".context_length") + len(b".context_length") + 4  # past the type, a uint32
    path = directory / file
    path.write_bytes(data[:at] + struct.pack("<I", context) + data[at + 4 :])
    return path


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The server: models "tiny" (byte-level BPE) and "tiny-spm" (SentencePiece), greedy by default."""
    directory = tmp_path_factory.mktemp("models")
    models = (
        tiny("tiny", roomy("llama.gguf", directory), aliases=("nimble",), kv_memory=64 << 20),
        tiny("tiny-spm", "gemma3.gguf"),
    )
    settings = Settings(
        models=models, installed=False, prefix_disk=False, max_body=8 * 2**20, write_timeout=5.0
    )
    with serving(settings) as one:
        yield one
