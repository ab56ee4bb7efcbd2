"""Chabok as a worker, at the same level as its peers: forward passes and arg-max, no sampler, no text."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

import chabok
from chabok import models
from chabok.checkpoints.gguf import GGUF
from chabok.checkpoints.packed import PackedStore
from chabok.checkpoints.paths import kernels_dir
from chabok.compute import isa
from chabok.compute.bandwidth import read_bandwidth
from chabok.compute.library import Library
from chabok.models.batch import Model, Segment
from worker import next_token_losses, serve

N_PAGES = 128


class Chabok:
    """One model and a pool of pages that the sequences share out among them."""

    def __init__(self) -> None:
        self._model: Model | None = None

    def load(self, path: str, threads: int, **settings: Any) -> dict[str, Any]:
        if self._model is not None:
            self._model.close()
        self._model = models.load(GGUF.open(path), threads=threads, pack=PackedStore(), **settings)
        self._model.new_cache(N_PAGES)
        return {"version": chabok.__version__, "isa": isa.choose().name}

    def _sequence(self, index: int, of: int) -> NDArray[np.int32]:
        each = N_PAGES // of
        return np.arange(index * each, (index + 1) * each, dtype=np.int32)

    def _forward(self, batch: list[Segment]) -> Any:
        assert self._model is not None, "no model is loaded"
        return self._model.forward(batch)

    def prefill(self, prompt: list[int]) -> float:
        start = time.perf_counter()
        self._forward([Segment(self._sequence(0, 1), 0, np.array(prompt, dtype=np.int32), 1, 0.0)]).argmax(0)
        return time.perf_counter() - start

    def decode(self, prompts: list[list[int]], n: int) -> float:
        rows = range(len(prompts))
        pages = [self._sequence(i, len(prompts)) for i in rows]
        logits = self._forward(
            [Segment(pages[i], 0, np.array(prompts[i], dtype=np.int32), 1, 0.0) for i in rows]
        )
        best = [logits.argmax(i) for i in rows]
        start = time.perf_counter()
        for step in range(n):
            logits = self._forward(
                [Segment(pages[i], len(prompts[i]) + step, [best[i]], 1, 0.0) for i in rows]
            )
            best = [logits.argmax(i) for i in rows]
        return time.perf_counter() - start

    def score(self, tokens: list[int]) -> dict[str, Any]:
        logits = self._forward(
            [Segment(self._sequence(0, 1), 0, np.array(tokens, dtype=np.int32), len(tokens))]
        )
        best = [logits.argmax(i) for i in range(len(tokens))]
        return {"loss": next_token_losses(logits.values, tokens), "best": best}

    def bandwidth(self, threads: int) -> float:
        """Bytes per second that the threads read together from memory."""
        return read_bandwidth(Library(isa.choose(), kernels_dir()), threads)


if __name__ == "__main__":
    serve(Chabok())
