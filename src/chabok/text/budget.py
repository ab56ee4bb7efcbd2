"""How much work a template may make."""

from __future__ import annotations

import time
from collections.abc import ItemsView, KeysView, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from jinja2.utils import Namespace

from chabok.errors import TemplateError

if TYPE_CHECKING:
    from collections.abc import Iterator

SECONDS = 5.0
UNITS = 64 << 20  # about one byte of text each
UNITS_PER_GIVEN = 64  # more for each character that the caller gives
_ELEMENT = 16  # units for an element of a list, or a turn of a loop
_TEXT = (str, bytes)
_CONTAINERS = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)


class Budget:
    """Counts what one rendering makes and stops it when it is too much, by amount or by time."""

    def __init__(self, units: int) -> None:
        """``units``: characters of text, more for elements and turns of loops."""
        self._left = units
        self._deadline = time.monotonic() + SECONDS

    def spend(self, units: int) -> None:
        """Take ``units`` off what is left."""
        self._left -= units
        if self._left < 0:
            raise TemplateError("the chat template makes too much text or too many values; it may be hostile")

    def turn(self, text: int) -> None:
        """Count one turn of a loop or call of a macro, which writes ``text`` fixed characters."""
        self.spend(_ELEMENT + text)
        if time.monotonic() > self._deadline:
            raise TemplateError(f"the chat template has run for {SECONDS:g} s without end; it may be hostile")

    def whole(self, value: object, times: int = 1) -> None:
        """Count all of ``value``, ``times`` over, however deep: what writing it out or comparing it may cost.

        A value that holds another one many times over counts it each time, so no small template can build a
        value whose text is exponentially long.
        """
        pending = [value]
        while pending:
            value = pending.pop()
            if isinstance(value, _TEXT):
                self.spend((_ELEMENT + len(value)) * times)
            elif isinstance(value, Namespace):
                pending.append(getattr(value, "_Namespace__attrs"))  # noqa: B009 - private to Jinja, and needed
            else:
                self.spend(_ELEMENT * times)
                if isinstance(value, dict):
                    pending.extend(value.keys())
                    pending.extend(value.values())
                elif isinstance(value, _CONTAINERS):
                    pending.extend(value)

    def surface(self, value: object) -> None:
        """Count ``value`` without what its elements hold: what reading or copying it costs."""
        if isinstance(value, _TEXT):
            self.spend(len(value))
        elif isinstance(value, (*_CONTAINERS, dict, range)):
            self.spend(_ELEMENT * len(value))


_current: ContextVar[Budget] = ContextVar("template_budget")


def current() -> Budget:
    """The budget of the rendering (or compilation) under way."""
    return _current.get()


@contextmanager
def limited(given: int) -> Iterator[None]:
    """Run the block on a fresh budget; ``given``: characters that the caller gives to the template."""
    token = _current.set(Budget(UNITS + UNITS_PER_GIVEN * given))
    try:
        yield
    finally:
        _current.reset(token)
