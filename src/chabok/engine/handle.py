"""The caller's side of a request: its tokens as they come, and its end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from chabok.engine.request import Completion, Token
from chabok.engine.timings import Timings

if TYPE_CHECKING:
    from chabok.engine.engine import Engine


class Handle:
    """A submitted request. Iterate over it for tokens, or ask for the result; either waits."""

    __slots__ = ("_engine", "completion", "error", "prompt_logits", "timings", "tokens", "wake")

    def __init__(self, engine: Engine, wake: Callable[[], None] | None) -> None:
        self._engine = engine
        self.tokens: deque[Token] = deque()
        """Tokens that nobody has taken yet."""
        self.completion: Completion | None = None
        self.error: BaseException | None = None
        self.prompt_logits: list[NDArray[np.float32]] = []
        self.timings: Callable[[], Timings] = Timings
        """How long its stages took so far; all up to the prompt's end is final with the first token."""
        self.wake = wake
        """Called by the thread that runs the step when there is news; must be quick and must not raise."""

    @property
    def done(self) -> bool:
        """Whether it ended, well or not; tokens may still be there to take."""
        return self.completion is not None or self.error is not None

    def _has_news(self) -> bool:
        return bool(self.tokens) or self.completion is not None or self.error is not None

    def next(self) -> Token | None:
        """Wait for the next token; None after the last. Raises what made the request fail."""
        if not self.tokens:
            self._engine.wait(self._has_news)
            if not self.tokens:
                if self.error is not None:
                    raise self.error
                return None
        return self.tokens.popleft()

    def __iter__(self) -> Iterator[Token]:
        return iter(self.next, None)

    def result(self) -> Completion:
        """Wait for the end. Raises what made the request fail."""
        if not self.done:
            self._engine.wait(lambda: self.done)
        if self.error is not None:
            raise self.error
        assert self.completion is not None
        return self.completion

    def cancel(self) -> None:
        """End it at the next step, with finish_reason "cancelled"; without effect once it has ended."""
        self._engine.cancel(self)
