"""Fetching a model for a client: in a process of its own, so that it can be ended at any moment.

The process prints a line of JSON for each news of the project's own progress hook. What it has downloaded
when it is ended is kept, and continued the next time.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, ClassVar

from chabok.errors import BusyError, RequestError

LINES_PER_S = 10
"""Most news of one stage."""

GRACE_S = 5.0
"""How long the process may take to end by itself."""


def source_of(name: str) -> str:
    """The source that a client's name means: of the catalogue, ``hf:...`` or ``pypi:...``.

    Ollama's own form for the hub, hf.co/owner/repo:Q4_K_M, means the same as hf:owner/repo:Q4_K_M. Anything
    else, a path above all, is a RequestError.
    """
    from chabok.checkpoints import catalog

    for host in ("hf.co/", "huggingface.co/"):
        if name.startswith(host):
            name = f"hf:{name.removeprefix(host)}"
    plain = name.removesuffix(":latest")
    entry = catalog.find(name) or catalog.find(plain)
    if entry is not None:
        return entry.name
    if name.startswith(("hf:", "pypi:")) and name.isprintable():
        return name
    near = catalog.suggestions(plain)
    hint = f"did you mean {' or '.join(near)}?" if near else "hf:owner/repo names one of the Hugging Face hub"
    raise RequestError(f"model: {name[:100]!r} is not in the catalogue; {hint}", "model")


class Fetch:
    """One running download; ``start`` refuses a second one at the same time.

    The process is Python's own kind rather than the event loop's: that one forks, which in a process with
    threads that compute may never return.
    """

    _running: ClassVar[Fetch | None] = None

    def __init__(self, name: str) -> None:
        """Use ``start``."""
        command = [sys.executable, "-m", "chabok.server.fetching", name]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)

    @classmethod
    def start(cls, name: str) -> Fetch:
        """Begin to fetch a model. Raises BusyError while another is being fetched."""
        if cls._running is not None:
            raise BusyError("another model is being fetched; try again when it is done", 30.0)
        cls._running = cls(name)
        return cls._running

    async def lines(self) -> AsyncIterator[dict[str, Any]]:
        """What there is to tell; the last has status "success", or error."""
        assert self._process.stdout is not None
        ended = False
        while line := await asyncio.to_thread(self._process.stdout.readline):
            with suppress(ValueError):
                found = json.loads(line)
                ended = "error" in found or found.get("status") == "success"
                yield found
        if not ended:
            yield {"error": "fetching the model was ended before it was done; what is there is kept"}

    async def close(self) -> None:
        """End it, done or not."""
        try:
            if self._process.poll() is None:
                self._process.terminate()
            await asyncio.to_thread(self._reap)
        finally:
            if Fetch._running is self:
                Fetch._running = None

    def _reap(self) -> None:
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Lines:
    """Prints progress as Ollama tells it: {"status", "digest", "total", "completed"}."""

    def __init__(self) -> None:
        self._what = ""
        self._total: int | None = None
        self._done = 0
        self._said = 0.0

    def begin(self, what: str, total: int | None, unit: str = "bytes") -> None:
        """Tell that a stage begins."""
        self._what, self._total, self._done = what, total, 0
        self._tell()

    def advance(self, n: int) -> None:
        """Tell how far it is, but not too often."""
        self._done += n
        if time.monotonic() - self._said >= 1 / LINES_PER_S:
            self._tell()

    def end(self) -> None:
        """Tell how far it came."""
        self._tell()

    def say(self, message: str) -> None:
        """Tell something to know while waiting."""
        _print({"status": message})

    def _tell(self) -> None:
        self._said = time.monotonic()
        line: dict[str, Any] = {"status": self._what}
        if self._total is not None:
            # Clients keep one bar per digest; a stage is what they are to have a bar for.
            line |= {"digest": self._what, "total": self._total, "completed": min(self._done, self._total)}
        _print(line)


def _print(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def main(name: str) -> None:
    """Fetch a model and print how it goes."""
    from chabok.checkpoints import sources
    from chabok.errors import ChabokError

    try:
        _print({"status": f"looking for {name}"})
        sources.resolve(name, Lines())
    except ChabokError as error:
        _print({"error": str(error)})
    except BrokenPipeError:
        pass
    else:
        _print({"status": "success"})


if __name__ == "__main__":
    main(sys.argv[1])
