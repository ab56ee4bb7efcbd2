"""Models without weights for the roster, and servers that run them: in a thread, or as a process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.engine.mock import ByteTokenizer, MockModel, PlainTemplate

from chabok.engine.llm import LLM
from chabok.engine.load import Loaded, Options
from chabok.engine.timings import Timings
from chabok.errors import CheckpointError
from chabok.server.app import build
from chabok.server.facts import Facts
from chabok.server.listening import address_of, listen
from chabok.server.record import Record
from chabok.server.roster import Roster
from chabok.server.running import Server
from chabok.server.settings import ModelSettings, Settings

MB = 10**6


class FakeLoader:
    """Loads mocks: every model takes 100 MB, and 1 MB for each 64 tokens of context.

    row_s: seconds a row takes. loads: names in order. failing: names that cannot be loaded. go: while it is
    not set, loading waits. here: what is installed, by name.
    """

    def __init__(self, row_s: float = 0.0, available: int = 10**12) -> None:
        self.row_s = row_s
        self.free = available
        self.loads: list[str] = []
        self.failing: set[str] = set()
        self.go = threading.Event()
        self.go.set()
        self.models: dict[str, MockModel] = {}
        self.here: dict[str, Any] = {}
        self.lock = threading.Lock()
        self.at_a_time = self.most_at_a_time = 0

    def facts(self, model: ModelSettings) -> Facts:
        return Facts(
            path=Path(model.source or model.name),
            size=90 * MB,
            modified=1.0,
            title=model.name,
            family="mock",
            parameters=1000,
            quantization="Q4_K_M",
            context=4096,
            fingerprint=f"mock-{model.name}",
            weights=100 * MB,
            page=MB,
        )

    def load(self, model: ModelSettings, facts: Facts, kv_memory: int) -> LLM:
        with self.lock:
            self.loads.append(model.name)
            self.at_a_time += 1
            self.most_at_a_time = max(self.most_at_a_time, self.at_a_time)
        try:
            assert self.go.wait(10)
            if model.name in self.failing:
                raise CheckpointError(f"{model.name}.gguf: tensor 'x' is damaged")
            mock = self.models[model.name] = MockModel(row_s=self.row_s)
            options = Options(context=model.context or 1024, max_queue=model.max_queue)
            return LLM.of(Loaded(mock, ByteTokenizer(), PlainTemplate, options), 0.5)
        finally:
            with self.lock:
                self.at_a_time -= 1

    def installed(self) -> dict[str, Any]:
        return self.here

    def available(self) -> int:
        return self.free


@contextmanager
def serving(
    settings: Settings, loader: FakeLoader | None = None, *, ready: bool = True
) -> Iterator[tuple[str, Server]]:
    """A server of fake models in a thread: its address, and it."""
    roster = Roster(settings, loader or FakeLoader())
    sockets = listen(settings)
    is_listening, is_ready = threading.Event(), threading.Event()
    server = Server(
        build(roster, settings),
        roster,
        settings,
        sockets,
        listening=is_listening.set,
        ready=is_ready.set,
    )
    thread = threading.Thread(target=server.run_to_end, daemon=True)
    thread.start()
    try:
        assert is_listening.wait(10)
        if ready:
            assert is_ready.wait(10)
        yield address_of(settings, sockets), server
    finally:
        server.stop()
        thread.join(20)
        assert not thread.is_alive()


def settings(*names: str, **values: Any) -> Settings:
    """Settings of a server at a free port; the first model is preloaded."""
    models = tuple(
        ModelSettings(name, source=name, preload=not i) for i, name in enumerate(names or ("one",))
    )
    return Settings(**{"models": models, "port": 0, "log_requests": False, **values})


def record() -> Record:
    """A request that was answered."""
    found = Record("POST", "/v1/chat/completions", "1.2.3.4", [])
    found.request_id, found.key, found.status, found.duration_s = "req-1", "alice", 200, 1.25
    found.begin("one", 10)
    timings = Timings(
        queue_s=0.1, prefill_s=0.2, decode_s=0.9, first_token_s=0.3, total_s=1.2, output_tokens=5
    )
    found.took(timings, "stop")
    return found


def _process(row_s: float) -> None:
    """``chabok serve`` with fake models; each row takes so many seconds."""
    from chabok.server import roster

    make: Callable[[Settings], FakeLoader] = lambda settings: FakeLoader(row_s)  # noqa: E731
    roster.DiskLoader = make  # type: ignore[assignment,misc]


if __name__ == "__main__":
    from chabok.cli.main import main

    _process(float(sys.argv[1]))
    sys.exit(main(["serve", *sys.argv[2:]]))
