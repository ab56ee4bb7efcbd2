"""From a model's settings to a model that runs; from a name to an installed model. All of it blocks."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Protocol, TypeVar

from chabok.server.settings import ModelSettings, Settings

if TYPE_CHECKING:
    from chabok.checkpoints.installed import InstalledModel
    from chabok.checkpoints.progress import Progress
    from chabok.engine.llm import LLM
    from chabok.server.facts import Facts

log = logging.getLogger("chabok.server")

T = TypeVar("T")


class Loader(Protocol):
    """Where the roster gets its models from."""

    def facts(self, model: ModelSettings) -> Facts:
        """What the model's file says, fetched first if it is not here."""

    def load(self, model: ModelSettings, facts: Facts, kv_memory: int) -> LLM:
        """Load it, with so many bytes of key-value cache."""

    def installed(self) -> dict[str, InstalledModel]:
        """The models on this machine by the names they may be called, in lower case."""

    def available(self) -> int:
        """Bytes of memory that this process can still take."""


class Logged:
    """Progress as lines of the log, one for each stage."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._stage = ""
        self._started = 0.0

    def begin(self, what: str, total: int | None, unit: str = "bytes") -> None:
        """Log that a stage begins."""
        from chabok.checkpoints.storage import format_bytes

        size = "" if total is None else f" ({format_bytes(total) if unit == 'bytes' else f'{total} {unit}'})"
        self._stage, self._started = what, perf_counter()
        log.info("%s: %s%s ...", self._name, what, size)

    def advance(self, n: int) -> None:
        """Say nothing: a log is not a bar."""

    def end(self) -> None:
        """Log how long the stage took."""
        log.info("%s: %s took %.1f s", self._name, self._stage, perf_counter() - self._started)

    def say(self, message: str) -> None:
        """Log it."""
        log.info("%s: %s", self._name, message)


class DiskLoader:
    """Loads models from files, fetching those that the operator named and that are not here."""

    def __init__(self, settings: Settings, progress: Callable[[str], Progress] = Logged) -> None:
        """``progress`` makes what is told of the stages of one model's loading."""
        self._settings = settings
        self._progress = progress

    def facts(self, model: ModelSettings) -> Facts:
        """What the model's file says, fetched first if it is not here."""
        from chabok.checkpoints.sources import resolve
        from chabok.server.facts import read_facts

        return read_facts(resolve(model.source, self._progress(model.name)))

    def load(self, model: ModelSettings, facts: Facts, kv_memory: int) -> LLM:
        """Load it, with so many bytes of key-value cache."""
        from chabok.engine.llm import LLM
        from chabok.engine.load import Options, load

        started = perf_counter()
        options = Options(
            threads=model.threads,
            context=model.context,
            max_batch=model.max_batch,
            kv_memory=kv_memory,
            pack=model.pack,
            budget_s=model.itl_budget_ms / 1000,
            max_queue=model.max_queue,
            prefix_disk=self._settings.prefix_disk,
            prefix_disk_bytes=self._settings.prefix_disk_size,
        )
        loaded = load(facts.path, options, self._progress(model.name))
        return LLM.of(loaded, perf_counter() - started)

    def installed(self) -> dict[str, InstalledModel]:
        """The models on this machine by the names they may be called, in lower case.

        Names only, never paths: who asks over the network must not learn which files there are.
        """
        from chabok.checkpoints import catalog, sources

        found: dict[str, InstalledModel] = {}
        for model in sources.installed():
            prefix, _, short = model.name.partition(":")
            names = [model.name, short]
            if prefix in ("hf", "lmstudio"):
                names += [short.removesuffix(".gguf"), short.rsplit("/", 1)[-1].removesuffix(".gguf")]
            entry = catalog.by_source(model.name)
            if entry is not None:
                names = [entry.name, *entry.aliases, *names]
            for name in names:
                found.setdefault(name.lower(), model)
        return found

    def available(self) -> int:
        """Bytes of memory that this process can still take."""
        from chabok.checkpoints.memory import available_memory

        return available_memory()


def in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Run blocking work in a thread of its own that does not keep the process from ending.

    Preparing weights may take a minute; the pool that asyncio offers would be waited for at exit.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # it is a T where there is no error

    def run() -> None:
        result: T | None = None
        failed: BaseException | None = None
        try:
            result = work()
        except BaseException as error:
            failed = error if not isinstance(error, StopIteration) else RuntimeError(repr(error))
        try:
            loop.call_soon_threadsafe(settle, result, failed)
        except RuntimeError:  # the loop ended meanwhile
            log.debug("what was loading is not wanted any more")

    threading.Thread(target=run, name="chabok-load", daemon=True).start()
    return future
