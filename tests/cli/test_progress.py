"""Bars on a terminal, lines where there is none."""

from __future__ import annotations

import io
import re
import sys

import pytest

from chabok.cli.progress import Bars


class Screen(io.StringIO):
    """A terminal, to whoever asks."""

    def isatty(self) -> bool:
        return True


def stages() -> None:
    with Bars() as bars:
        for what, total in (
            ("Downloading a==0.1.2", 10**8),
            (f"Unpacking {'x' * 40}.gguf", 10**11),
        ):
            bars.begin(what, total)
            bars.advance(total // 2)
            bars.end()


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
def test_a_stage_is_one_line_however_wide_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stderr", Screen())
    stages()
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", sys.stderr.getvalue())  # type: ignore[attr-defined]
    lines = [line for line in drawn.splitlines() if line.strip()]
    assert len(lines) >= 2
    assert all(re.search(r"^(Down|Unp).* [\d.]+/100.0 [MG]B", line) for line in lines)
    assert max(map(len, lines)) <= columns


def test_without_a_terminal_a_stage_is_a_plain_line(capsys: pytest.CaptureFixture[str]) -> None:
    stages()
    assert capsys.readouterr().err.splitlines() == [
        "Downloading a==0.1.2 ...",
        f"Unpacking {'x' * 40}.gguf ...",
    ]
