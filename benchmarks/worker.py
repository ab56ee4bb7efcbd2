"""One engine in its own process, driven by JSON lines: so that two can take turns in one run.

A worker program calls ``serve`` with its engine; a benchmark holds a ``Worker``. While one works, the other
waits for its next line and uses no CPU. Imports nothing but the standard library and numpy: a peer's
interpreter has no more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Engine(Protocol):
    """What a worker program implements. Times are seconds of wall clock."""

    def load(self, path: str, threads: int, **settings: Any) -> dict[str, Any]:
        """Load a model, replacing the one before; answers facts worth reporting (version, settings)."""

    def prefill(self, prompt: list[int]) -> float:
        """Read a prompt from an empty cache and find the next token."""

    def decode(self, prompts: list[list[int]], n: int) -> float:
        """Read prompts (not timed), then n steps (timed), each giving every sequence its best next token."""

    def score(self, tokens: list[int]) -> dict[str, Any]:
        """Read one sequence: ``loss``, -log p of tokens[1:], and ``best``, the arg-max of each row."""


def serve(engine: Engine) -> None:
    """Answer requests ``{"do": name, ...}`` on standard input until it ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not end up among the answers
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"ok": getattr(engine, request.pop("do"))(**request)}
        except Exception:  # the benchmark shows it and decides
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=out, flush=True)


class Worker:
    """A worker process as a benchmark sees it: ``worker.ask("prefill", prompt=[...])``."""

    def __init__(self, python: str, program: str, environment: dict[str, str] | None = None) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [python, str(Path(__file__).with_name(program))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **(environment or {})},
        )

    def ask(self, do: str, **arguments: Any) -> Any:
        """Send one request and wait for its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps({"do": do, **arguments}), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(f"the worker ended during {do!r}:\n{self._tail()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{do} failed:\n{answer['error']}")
        return answer["ok"]

    def _tail(self) -> str:
        self._log.seek(0)
        return self._log.read()[-3000:]

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()


def next_token_losses(logits: NDArray[np.float32], tokens: list[int]) -> list[float]:
    """-log p of tokens[1:] from the logits float32[n, vocab] of all positions."""
    losses = []
    for row, token in zip(logits, tokens[1:]):
        wide = row.astype(np.float64)
        peak = wide.max()
        losses.append(float(peak + np.log(np.exp(wide - peak).sum()) - wide[token]))
    return losses
