"""The models that are served: loaded on demand, kept while used, unloaded when memory or time is up.

Everything here runs on one event loop; what blocks runs in threads. A model in use is never unloaded: ``use``
counts who holds it. Preloaded models stay.
"""

from __future__ import annotations

import asyncio
import difflib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from chabok.checkpoints.storage import format_bytes
from chabok.engine.aio import AsyncLLM
from chabok.errors import BusyError, ChabokError, ResourceError, StoppingError, UnknownModelError
from chabok.server.auth import CALLER
from chabok.server.entries import Installed, ModelEntry, described
from chabok.server.facts import Facts
from chabok.server.loading import DiskLoader, Loader, in_thread
from chabok.server.settings import ModelSettings, Settings, model_name

log = logging.getLogger("chabok.server")

BUDGET_SHARE = 0.8
"""Of the memory that is free at start, for all models where no budget is given."""

ROOM_S = 30.0
"""How long a model that has to be loaded waits for others to be done with."""


@dataclass(eq=False)
class Served:
    """A model that is loaded. created: when its file was, in seconds since the epoch."""

    name: str
    llm: AsyncLLM
    created: int
    settings: ModelSettings


@dataclass(eq=False)
class _Slot:
    """One model's place: what is known of it, and it while it is loaded."""

    settings: ModelSettings
    configured: bool
    facts: Facts | None = None
    served: Served | None = None
    loading: asyncio.Task[Served] | None = None
    leaving: asyncio.Future[None] | None = None
    holds: int = 0
    last_used: float = 0.0
    keep_alive: float = math.inf
    timer: asyncio.TimerHandle | None = None
    size: int = 0
    """Bytes it takes, or will when it is loaded."""
    error: str = ""

    @property
    def pinned(self) -> bool:
        return self.settings.preload

    @property
    def least(self) -> int:
        """Bytes it takes at least, as far as is known."""
        settings = self.settings
        return self.facts.least(settings.context, settings.kv_memory) if self.facts is not None else 0


class Roster:
    """The models of a server. ``async with roster.use(name) as served`` is how a request gets one."""

    def __init__(
        self,
        settings: Settings,
        loader: Loader | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        room_s: float = ROOM_S,
    ) -> None:
        self.settings = settings
        self.stopping = False
        self.loads = 0
        self.load_failures = 0
        self._loader = loader or DiskLoader(settings)
        self._clock = clock
        self._room_s = room_s
        self._budget = settings.memory_budget
        self._slots = {model.name: _Slot(model, configured=True) for model in settings.models}
        self._making_room = asyncio.Lock()
        self._released = asyncio.Event()
        self._waiting_for = {slot.settings.name for slot in self._slots.values() if slot.pinned}
        self._installed = Installed(self._loader, settings.others.context, clock)
        self._closers: set[asyncio.Task[None]] = set()

    # What a request does.

    @asynccontextmanager
    async def use(self, name: str = "", *, keep_alive: float | None = None) -> AsyncIterator[Served]:
        """Hold a model, loading it first if need be.

        name: of the model, an alias, or of an installed model where these are served; "" or "default" for the
        first. keep_alive: seconds it shall stay loaded after this use, instead of what is set for it; no
        effect on preloaded models. Raises UnknownModelError, BusyError where models in use leave no room for
        it now, ResourceError where there is none at all, StoppingError, or whatever the file has wrong.
        """
        if self.stopping:
            raise StoppingError("the server is being stopped and takes no more requests")
        slot = await self._find(name)
        slot.holds += 1
        self._cancel_timer(slot)
        slot.keep_alive = slot.settings.keep_alive if keep_alive is None else keep_alive
        try:
            served = slot.served or await self._load(slot)
            if self.stopping:  # while it was being loaded
                raise StoppingError("the server is being stopped and takes no more requests")
            yield served
        finally:
            slot.holds -= 1
            self._rest(slot)

    async def unload(self, name: str) -> bool:
        """Unload a model now, unless it is in use or preloaded; whether it is gone."""
        slot = await self._find(name)
        if slot.served is not None and not slot.holds and not slot.pinned:
            await self._unload(slot)
        return slot.served is None

    async def known(self, name: str) -> ModelEntry:
        """What there is to say of one model; raises UnknownModelError. Does not load it."""
        slot = await self._find(name)
        if slot.facts is None:
            slot.facts = await in_thread(partial(self._loader.facts, slot.settings))
        return self._entry(slot)

    def entries(self) -> list[ModelEntry]:
        """The models that the caller may name: first those of the settings, in their order."""
        self._renew()
        named = [self._entry(slot) for slot in self._slots.values()]
        here = {entry.digest for entry in named if entry.digest} if self._installed.entries else set()
        names = {name.lower() for entry in named for name in (entry.name, *entry.aliases)}
        named += [
            entry
            for entry in self._installed.entries.values()
            if entry.name.lower() not in names and entry.digest not in here
        ]
        caller = CALLER.get()
        return [entry for entry in named if caller.may_use(entry.name, *entry.aliases)]

    def loaded(self) -> list[Served]:
        """The models that are loaded now."""
        return [slot.served for slot in self._slots.values() if slot.served is not None]

    # What the server does.

    @property
    def unready(self) -> str:
        """Why the server should get no requests now; "" if it should."""
        if self.stopping:
            return "stopping"
        return f"loading {', '.join(sorted(self._waiting_for))}" if self._waiting_for else ""

    @property
    def budget(self) -> int:
        """Bytes for all models together."""
        if self._budget is None:
            self._budget = int(self._loader.available() * BUDGET_SHARE)
        return self._budget

    async def preload(self) -> None:
        """Fetch the models that the settings name and load those to be preloaded; raises what goes wrong.

        A model that is only to be loaded on demand and cannot be fetched is logged and tried again when asked
        for.
        """
        await in_thread(lambda: self.budget)
        for slot in list(self._slots.values()):
            try:
                slot.facts = await in_thread(partial(self._loader.facts, slot.settings))
            except ChabokError as error:
                if slot.pinned:
                    raise
                slot.error = str(error)
                log.warning("%s: %s", slot.settings.name, error)
        for slot in list(self._slots.values()):
            if slot.pinned:
                async with self.use(slot.settings.name):
                    self._waiting_for.discard(slot.settings.name)
        self._renew()

    async def drain(self, timeout_s: float) -> None:
        """Take no more requests; return when the running ones have ended, or were, the time being up."""
        self.stopping = True
        await asyncio.gather(*(in_thread(partial(_drain, served, timeout_s)) for served in self.loaded()))

    async def close(self) -> None:
        """Unload everything; requests that have not ended fail."""
        self.stopping = True
        for slot in self._slots.values():
            self._cancel_timer(slot)
            if slot.loading is not None:
                slot.loading.cancel()
        await asyncio.gather(*(self._unload(slot) for slot in self._slots.values()))
        if self._closers:
            await asyncio.gather(*self._closers, return_exceptions=True)

    # Names.

    async def _find(self, name: str) -> _Slot:
        wanted = name.strip().lower()
        slot = self._named(wanted)
        if slot is None and self.settings.serves_installed:
            found = await in_thread(self._loader.installed)
            model = found.get(wanted) or found.get(f"{wanted}:latest")
            if model is not None:
                public = model_name(model.name)
                slot = self._named(public.lower()) or self._same_file(model.path)
                if slot is None:
                    # By its path: should the file go, it must not be fetched again because of a request.
                    settings = replace(self.settings.others, name=public, source=str(model.path))
                    slot = self._slots[public] = _Slot(settings, configured=False)
        if slot is None:
            raise self._unknown(name)
        CALLER.get().check_model(*slot.settings.names)
        return slot

    def _named(self, wanted: str) -> _Slot | None:
        if wanted in ("", "default"):
            return next(iter(self._slots.values()), None)
        for name in (wanted, wanted.removesuffix(":latest")):
            for slot in self._slots.values():
                if name in (each.lower() for each in slot.settings.names):
                    return slot
        return None

    def _same_file(self, path: object) -> _Slot | None:
        return next((slot for slot in self._slots.values() if slot.facts and slot.facts.path == path), None)

    def _unknown(self, name: str) -> UnknownModelError:
        from chabok.checkpoints import catalog

        known = [each for slot in self._slots.values() for each in slot.settings.names]
        known += list(self._installed.entries)  # none where they are not served
        public = [each for each in dict.fromkeys(known) if "/" not in each[:1]]
        near = difflib.get_close_matches(name, public, 2)
        if near:
            hint = f"did you mean {' or '.join(near)}?"
        elif self.settings.serves_installed and catalog.find(name) is not None:
            hint = f"it is not on this machine; `chabok pull {name}` fetches it"
        else:
            hint = f"there are {', '.join(public[:20])}"
        return UnknownModelError(f"no model is called {name[:100]!r} here; {hint}")

    # Loading.

    async def _load(self, slot: _Slot) -> Served:
        """The loaded model; whoever asks while it is being loaded waits for the same."""
        if slot.loading is None:
            slot.loading = asyncio.create_task(self._do_load(slot))
            slot.loading.add_done_callback(partial(self._loaded, slot))
        try:
            # Shielded: that one client leaves does not end it for the others.
            return await asyncio.shield(slot.loading)
        except asyncio.CancelledError:
            if self.stopping:
                raise StoppingError("the server was stopped while the model was being loaded") from None
            raise

    def _loaded(self, slot: _Slot, task: asyncio.Task[Served]) -> None:
        slot.loading = None
        if task.cancelled() or task.exception() is not None:
            slot.size = 0
            if not task.cancelled():
                slot.error = str(task.exception())
                self.load_failures += 1
                log.warning("%s could not be loaded: %s", slot.settings.name, slot.error)
            self._released.set()
            return
        slot.served, slot.error = task.result(), ""
        self._rest(slot)

    async def _do_load(self, slot: _Slot) -> Served:
        settings, loader = slot.settings, self._loader
        if slot.leaving is not None:
            await asyncio.shield(slot.leaving)
        facts = slot.facts = await in_thread(partial(loader.facts, settings))
        async with self._making_room:
            kv_memory = await self._make_room(slot, facts)
            slot.size = facts.weights + kv_memory
        started = self._clock()
        llm = await in_thread(partial(loader.load, settings, facts, kv_memory))
        self.loads += 1
        log.info(
            "%s is loaded: %s, %d tokens of context, %.2f s",
            settings.name, format_bytes(slot.size), llm.context, self._clock() - started,
        )  # fmt: skip
        return Served(settings.name, AsyncLLM.of(llm), int(facts.modified), settings)

    async def _make_room(self, slot: _Slot, facts: Facts) -> int:
        """Unload what was not used for longest until the model fits; its bytes of key-value cache."""
        settings = slot.settings
        need = slot.least
        pinned = sum(other.size for other in self._others(slot) if other.pinned)
        if need > self.budget - pinned:
            kept = f", of which preloaded models have {format_bytes(pinned)}" if pinned else ""
            raise ResourceError(
                f"{settings.name} needs {format_bytes(need)}, but the memory budget is "
                f"{format_bytes(self.budget)}{kept}; raise memory_budget, or choose a smaller context"
            )
        until = self._clock() + self._room_s
        while True:
            taken = sum(other.size for other in self._others(slot))
            room = min(self.budget - taken, self._loader.available())
            if need <= room:
                # What is still to be preloaded shall find room, too.
                to_come = sum(other.least for other in self._others(slot) if other.pinned and not other.size)
                return facts.kv_memory(settings.context, settings.kv_memory, room - to_come)
            loaded = [other for other in self._others(slot) if other.served and not other.pinned]
            idle = [other for other in loaded if not other.holds]
            if idle:
                oldest = min(idle, key=lambda other: other.last_used)
                log.info("unloading %s to make room for %s", oldest.settings.name, settings.name)
                await self._unload(oldest)
            elif not any(other.holds for other in self._others(slot) if not other.pinned):
                raise ResourceError(
                    f"{settings.name} needs {format_bytes(need)}, but {format_bytes(max(room, 0))} are free; "
                    "close other programs, or choose a smaller context"
                )
            else:
                await self._wait_for_release(slot, until)

    async def _wait_for_release(self, slot: _Slot, until: float) -> None:
        self._released.clear()
        left = until - self._clock()
        try:
            if left <= 0:
                raise TimeoutError
            await asyncio.wait_for(self._released.wait(), left)
        except TimeoutError:
            raise BusyError(
                f"there is no room for {slot.settings.name} while other models are in use; try again later",
                self._room_s,
            ) from None

    def _others(self, slot: _Slot) -> Iterator[_Slot]:
        return (other for other in self._slots.values() if other is not slot)

    # Unloading.

    def _rest(self, slot: _Slot) -> None:
        """Nobody may hold it any more: count down to when it is unloaded."""
        slot.last_used = self._clock()
        self._released.set()
        if slot.holds or slot.served is None or slot.pinned or self.stopping:
            return
        self._cancel_timer(slot)
        if slot.keep_alive < math.inf:
            slot.timer = asyncio.get_running_loop().call_later(slot.keep_alive, self._expire, slot)

    def _expire(self, slot: _Slot) -> None:
        slot.timer = None
        if slot.served is not None and not slot.holds:
            log.info("unloading %s, not used for %.0f s", slot.settings.name, slot.keep_alive)
            task = asyncio.ensure_future(self._unload(slot))
            self._closers.add(task)
            task.add_done_callback(self._closers.discard)

    async def _unload(self, slot: _Slot) -> None:
        """Give a model's memory back; who wants it meanwhile waits, then loads it anew."""
        self._cancel_timer(slot)
        served, slot.served = slot.served, None
        if served is None:
            if slot.leaving is not None:
                await asyncio.shield(slot.leaving)
            return
        leaving = slot.leaving = asyncio.get_running_loop().create_future()
        try:
            await served.llm.close()
        finally:
            slot.size = 0
            slot.leaving = None
            leaving.set_result(None)
            self._released.set()

    def _cancel_timer(self, slot: _Slot) -> None:
        if slot.timer is not None:
            slot.timer.cancel()
            slot.timer = None

    # Listing.

    def _entry(self, slot: _Slot) -> ModelEntry:
        settings, facts, served = slot.settings, slot.facts, slot.served
        entry = ModelEntry(
            settings.name,
            # A path is a name to whoever typed it, but nobody else's business.
            tuple(alias for alias in settings.aliases if not alias.startswith(("/", "~", "."))),
            loaded=served is not None,
            loading=slot.loading is not None,
            in_use=slot.holds,
            preloaded=slot.pinned,
            error=slot.error,
        )
        if facts is not None:
            entry = replace(entry, **described(facts, settings.context))
        if served is not None:
            expires = None
            if not slot.pinned and slot.keep_alive < math.inf:
                idle = 0.0 if slot.holds else self._clock() - slot.last_used
                expires = time.time() + max(slot.keep_alive - idle, 0.0)
            entry = replace(
                entry,
                memory_bytes=slot.size,
                context=served.llm.llm.context,
                expires=expires,
                load_s=served.llm.llm.load_s,
            )
        return entry

    def _renew(self) -> None:
        if self.settings.serves_installed:
            self._installed.renew()


def _drain(served: Served, timeout_s: float) -> None:
    served.llm.llm.engine.drain(timeout_s)
