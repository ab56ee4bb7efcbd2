"""Things that are closed at the end of a ``with`` block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """Closes itself where its ``with`` block is left."""

    @abstractmethod
    def close(self) -> None:
        """End it and release what it holds; without effect the second time."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
