"""Progress on a terminal: a bar per stage on standard error, plain lines where nobody watches."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

FIGURES = 42
"""Columns that the bar at its shortest and the figures beside it take."""


class Bars:
    """Draws the stages of ``chabok.checkpoints.progress.Progress``; a context manager."""

    def __init__(self, *, quiet: bool = False) -> None:
        """``quiet``: draw nothing, but still pass on what to know while waiting."""
        self._quiet = quiet
        self._bars: RichProgress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Bars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def begin(self, what: str, total: int | None, unit: str = "bytes") -> None:
        """Show a bar for the stage ``what``; a moving one where the total is not known."""
        if self._quiet:
            return
        if not sys.stderr.isatty():
            print(f"{what} ...", file=sys.stderr, flush=True)
            return
        if self._bars is None:
            self._bars = _bars()
            self._bars.start()
        room = max(self._bars.console.width - FIGURES, 8)
        what = what if len(what) <= room else what[: room - 1] + "…"
        self._task = self._bars.add_task(what, total=total, unit=unit)

    def advance(self, n: int) -> None:
        """Move the bar of this stage."""
        if self._bars is not None and self._task is not None:
            self._bars.advance(self._task, n)

    def end(self) -> None:
        """Leave the bar as it is; the next stage gets another line."""
        if self._bars is not None and self._task is not None:
            self._bars.stop_task(self._task)
        self._task = None

    def say(self, message: str) -> None:
        """Print a line above the bar."""
        if self._bars is not None:
            self._bars.console.print(message, style="dim", markup=False, highlight=False)
        else:
            print(message, file=sys.stderr, flush=True)


def _bars() -> RichProgress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.table import Column
    from rich.text import Text

    class Done(DownloadColumn):
        """How much is done: bytes as people read them, anything else as it is counted."""

        def render(self, task: Task) -> Text:
            unit = task.fields["unit"]
            if unit == "bytes":
                return super().render(task)
            total = "" if task.total is None else f"/{task.total:.0f}"
            return Text(f"{task.completed:.0f}{total} {unit}", style="progress.download")

    class Speed(TransferSpeedColumn):
        """Bytes per second, for what is counted in bytes."""

        def render(self, task: Task) -> Text:
            return super().render(task) if task.fields["unit"] == "bytes" else Text()

    columns: tuple[ProgressColumn, ...] = (
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
        BarColumn(bar_width=None),  # takes what the others leave: a stage is one line
        Done(table_column=Column(no_wrap=True)),
        Speed(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
    )
    return Progress(*columns, console=Console(stderr=True))
