"""Measures one contestant in a process of its own: its memory is its own, and if it dies the rest goes on.

``python -m chabok.choose.worker FOLDER NUMBER`` reads the options of an endpoint as JSON from standard input
(keys are never on disk), and writes a line of JSON for each step to standard output.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

from chabok.choose.contest import Contestant, Place, Plan, State, encode
from chabok.choose.quality import Asker, Questions
from chabok.errors import ChabokError
from chabok.measure.connection import Patience
from chabok.measure.endpoint import Endpoint, Target, detect
from chabok.measure.failures import MeasureError
from chabok.measure.load import Stopwatch
from chabok.measure.prompts import Prompt
from chabok.measure.run import About, RunFile
from chabok.measure.schedule import Concurrent
from chabok.measure.timeline import Timeline

Tell = Callable[[str, int, int], None]
"""Hears of a step: what is being done, how much of it is done, of how much (0: not known)."""
GIVE_UP = 5
"""Questions that fail in a row before the rest of a contestant's is left for resuming."""


WARM_UP = Prompt("Say hello.", None, 8)
"""The first request, which does not count."""


class Work:
    """One contestant at work."""

    def __init__(self, plan: Plan, place: Place, options: dict[str, Any], tell: Tell) -> None:
        self.plan = plan
        self.place = place
        self.state = place.state()
        self._options = options
        self._tell = tell
        self._stack = ExitStack()

    async def run(self) -> State:
        """Do what is not done yet; failures are in the state."""
        state = self.state
        state.failure, state.notes = "", []
        try:
            with self._stack:
                target = await self._open(self.place.contestant)
                if not state.speed_done:
                    await self._speed(target)
                state.quality_done = await self._quality(target)
                if not isinstance(target, Endpoint):
                    state.memory_bytes = resident()
        except (ChabokError, OSError, MemoryError) as error:
            state.failure = str(error) or type(error).__name__
        finally:
            self.place.keep(state)
        return state

    async def _open(self, contestant: Contestant) -> Target:
        state = self.state
        if contestant.kind == "endpoint":
            self._tell("asking what answers there", 0, 0)
            options = dict(self._options)
            options["patience"] = Patience(total_s=(t := options.pop("timeout", 900.0)), headers_s=t)
            endpoint = await detect(contestant.target, model=contestant.model, **options)
            state.model, state.server = endpoint.model, endpoint.server
            state.notes += endpoint.notes
            return endpoint
        from chabok.choose.local import LocalModel

        self._tell("loading", 0, 0)
        began = perf_counter()
        model = self._stack.enter_context(LocalModel.open(contestant.target))
        state.load_s, state.model, state.server = perf_counter() - began, contestant.target, "chabok"
        return model

    async def _speed(self, target: Target) -> None:
        """Every prompt once, one after the other; answers end where the model ends them."""
        plan, path = self.plan, self.place.speed
        done = 0

        def watch(_: Timeline) -> None:
            nonlocal done
            done += 1
            self._tell("speed", done - 1, len(plan.prompts))

        about = About(target.url, target.model, started_at=datetime.now(UTC).isoformat(timespec="seconds"))
        about.seed, about.prompt_tokens = plan.seed, f"{len(plan.prompts)} prompts"
        about.output_tokens = f"{plan.output_tokens} at most"
        self._tell("speed", 0, len(plan.prompts))
        path.parent.mkdir(parents=True, exist_ok=True)
        with RunFile(path, about) as log:
            async with Stopwatch(target, plan.prompt, exact=False, sink=log, watch=watch) as stopwatch:
                first = await stopwatch.one(WARM_UP, "warm-up")
                if first.failure is not None:
                    raise MeasureError(first.failure.message)
                outcome = await stopwatch.run(Concurrent(1, requests=len(plan.prompts)))
            log.load(outcome)
            log.known(complete=True)
        if outcome.failed == outcome.requests:
            raise MeasureError("no request of the speed part succeeded")
        self.state.speed_done = True
        self.place.keep(self.state)

    async def _quality(self, target: Target) -> bool:
        """Ask what was not answered yet; whether all is."""
        sets = self.plan.sets()
        if not sets:
            return True
        answered = {(each.set, each.question) for each in self.place.answers() if not each.error}
        total = sum(map(len, sets))
        done, failed, errors = len(answered), 0, 0
        async with target.client() as client:
            asker = Asker(target, client, self.plan.method)
            self.place.quality.parent.mkdir(parents=True, exist_ok=True)
            _end_line(self.place.quality)
            with open(self.place.quality, "ab", buffering=0) as file:
                for name, question in _each(sets):
                    if (name, question.id) in answered:
                        continue
                    self._tell("quality", done, total)
                    found = await asker(question, name)
                    file.write(encode(found))
                    done += 1
                    failed = failed + 1 if found.error else 0
                    errors += bool(found.error)
                    if failed >= GIVE_UP:
                        raise MeasureError(
                            f"{failed} questions in a row failed, the last with: {found.error}"
                        )
        if asker.note:
            self.state.notes.append(f"choices are read from the text of the answer: {asker.note}")
        return not errors


def _each(sets: list[Questions]) -> Any:
    return ((each.name, question) for each in sets for question in each)


def _end_line(path: Path) -> None:
    """A line that was cut short by a crash must not swallow the next one."""
    with suppress(FileNotFoundError), open(path, "rb+") as file:
        if file.seek(0, 2) and (file.seek(-1, 2), file.read(1))[1] != b"\n":
            file.write(b"\n")


def resident() -> int | None:
    """Most bytes that this process has had in memory; None: the system does not tell."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(most) * (1 if sys.platform == "darwin" else 1024)


def main(arguments: list[str]) -> int:
    """Measure; the exit code: 0 done, 1 failed (the state says why), 130 interrupted."""
    folder, number = Path(arguments[0]), int(arguments[1])
    options = json.loads(sys.stdin.readline() or "{}")
    plan = Plan.read(folder)
    place = Place(folder, number, plan.contestants[number])

    def tell(step: str, done: int, of: int) -> None:
        sys.stdout.buffer.write(encode([step, done, of]))
        sys.stdout.buffer.flush()

    async def go() -> State:
        task = asyncio.get_running_loop().create_task(Work(plan, place, options, tell).run())
        signal.signal(signal.SIGINT, lambda *_: loop.call_soon_threadsafe(task.cancel))
        loop = asyncio.get_running_loop()
        return await task

    try:
        state = asyncio.run(go())
    except (asyncio.CancelledError, KeyboardInterrupt):
        return 130
    return 1 if state.failure else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
