"""A running server on tiny models, shared by all tests of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn

from chabok import LLM, AsyncLLM
from chabok.errors import UnknownModelError
from chabok.server.app import build
from chabok.server.facts import read_facts
from chabok.server.roster import ModelEntry
from chabok.server.settings import Settings

FIXTURES = Path(__file__).parents[1] / "fixtures"
FILES = {"tiny": "llama.gguf", "tiny-spm": "gemma3.gguf"}


@dataclass
class Running:
    """A server in a thread of its own. llms: its models, by name."""

    url: str
    llms: dict[str, LLM]
    loop: asyncio.AbstractEventLoop
    server: uvicorn.Server
    app: Any = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def v1(self) -> str:
        return self.url + "/v1"

    @property
    def llm(self) -> LLM:
        """The first model."""
        return next(iter(self.llms.values()))


class FixtureRoster:
    """Models that are loaded already."""

    def __init__(self, llms: dict[str, LLM], sampling: dict[str, Any]) -> None:
        self.served = {
            name: SimpleNamespace(
                name=name,
                llm=AsyncLLM.of(llm),
                created=1.0,
                settings=SimpleNamespace(sampling=sampling, system=None, priority=0),
            )
            for name, llm in llms.items()
        }

    @asynccontextmanager
    async def use(self, name: str, *, keep_alive: float | None = None) -> AsyncIterator[Any]:
        name = name.removesuffix(":latest")
        if name in ("", "default"):
            name = next(iter(self.served))
        if name not in self.served:
            raise UnknownModelError(f"there is no model {name!r}; did you mean {next(iter(self.served))!r}?")
        yield self.served[name]

    async def known(self, name: str) -> ModelEntry:
        async with self.use(name) as served:
            return self.entry(served)

    async def unload(self, name: str) -> bool:
        async with self.use(name):
            return False

    def entry(self, served: Any) -> ModelEntry:
        facts = read_facts(FIXTURES / FILES[served.name])
        return ModelEntry(
            served.name,
            loaded=True,
            modified=1.0,
            size_bytes=facts.size,
            family=facts.family,
            parameters=facts.parameters,
            quantization=facts.quantization,
            context=served.llm.llm.context,
            digest=facts.fingerprint,
            path=facts.path,
        )

    def entries(self) -> list[ModelEntry]:
        return [self.entry(served) for served in self.served.values()]


def start(app: Any) -> tuple[uvicorn.Server, threading.Thread, str, asyncio.AbstractEventLoop]:
    """Run an application on a free port, in a thread."""
    config = uvicorn.Config(app, port=0, log_level="warning", http="httptools", loop="uvloop", lifespan="off")
    server = uvicorn.Server(config)
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve()

    runner = asyncio.Runner(loop_factory=config.get_loop_factory())
    thread = threading.Thread(target=lambda: runner.run(serve()), daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
        assert thread.is_alive(), "the server ended before it began"
    port = server.servers[0].sockets[0].getsockname()[1]
    return server, thread, f"http://127.0.0.1:{port}", loops[0]


@pytest.fixture(scope="session")
def running() -> Iterator[Running]:
    """The server: models "tiny" (byte-level BPE) and "tiny-spm" (SentencePiece), greedy by default."""
    llms = {name: LLM(FIXTURES / file, threads=1, pack=False) for name, file in FILES.items()}
    settings = Settings(max_body=8 * 2**20, write_timeout=5.0)
    roster: Any = FixtureRoster(llms, {"temperature": 0.0})
    app = build(roster, settings)
    server, thread, url, loop = start(app)
    yield Running(url, llms, loop, server, app)
    server.should_exit = True
    thread.join(10)
    for llm in llms.values():
        llm.close()
