"""llama.cpp as a worker, through llama-cpp-python's low-level functions: no sampler and no text."""

from __future__ import annotations

import ctypes
import sys
import time
from typing import Any

import llama_cpp as ll
import numpy as np
from numpy.typing import NDArray

from worker import next_token_losses, serve

N_BATCH = 512


class LlamaCpp:
    """One model and one context; settings name fields of ``llama_context_params``."""

    def __init__(self) -> None:
        self._model: Any = None
        self._context: Any = None
        ll.llama_backend_init()
        self._log = ll.llama_log_callback(
            lambda level, text, data: level >= 4 and sys.stderr.write(text.decode())
        )
        ll.llama_log_set(self._log, ctypes.c_void_p(0))

    def load(self, path: str, threads: int, **settings: Any) -> dict[str, Any]:
        self._free()
        self._model = ll.llama_model_load_from_file(path.encode(), ll.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {path}")
        self._vocab = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(self._model))
        self._threads = threads
        self.configure(**settings)
        return {"version": ll.__version__, "system": ll.llama_print_system_info().decode()}

    def configure(self, n_ctx: int = 1024, n_seq_max: int = 1, flash_attn: bool = False, **more: Any) -> None:
        """A new context on the loaded model."""
        if self._context:
            ll.llama_free(self._context)
            ll.llama_batch_free(self._batch)
        params = ll.llama_context_default_params()
        params.n_ctx, params.n_seq_max = n_ctx, n_seq_max
        params.n_batch = params.n_ubatch = N_BATCH
        params.n_threads = params.n_threads_batch = self._threads
        params.flash_attn_type = int(flash_attn)
        params.swa_full = False
        params.no_perf = True
        for name, value in more.items():
            if not hasattr(params, name):
                raise ValueError(f"llama_context_params has no {name!r}")
            setattr(params, name, value)
        self._context = ll.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context with {more}")
        self._memory = ll.llama_get_memory(self._context)
        self._batch = ll.llama_batch_init(N_BATCH, 0, 1)
        fields = ("token", "pos", "n_seq_id", "logits")
        self._token, self._pos, n_seq_id, self._wanted = (
            np.ctypeslib.as_array(getattr(self._batch, field), (N_BATCH,)) for field in fields
        )
        n_seq_id[:] = 1

    def _free(self) -> None:
        if self._context:
            ll.llama_free(self._context)
            ll.llama_batch_free(self._batch)
        if self._model:
            ll.llama_model_free(self._model)
        self._model = self._context = None

    def _fill(self, tokens: list[int], sequence: int, *, every: bool) -> None:
        """Append the rows of one sequence that starts at position 0."""
        start, n = self._batch.n_tokens, len(tokens)
        self._token[start : start + n] = tokens
        self._pos[start : start + n] = np.arange(n)
        self._wanted[start : start + n] = every
        self._wanted[start + n - 1] = 1
        for i in range(start, start + n):
            self._batch.seq_id[i][0] = sequence
        self._batch.n_tokens = start + n

    def _run(self) -> None:
        status = ll.llama_decode(self._context, self._batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")

    def _logits(self, n: int) -> NDArray[np.float32]:
        return np.ctypeslib.as_array(ll.llama_get_logits(self._context), (n, self._vocab))

    def _reset(self) -> None:
        ll.llama_memory_clear(self._memory, True)
        self._batch.n_tokens = 0

    def tokenize(self, text: str) -> list[int]:
        """Ids of a text, with what the file says comes first; nothing in it is special."""
        raw = text.encode()
        ids = (ll.llama_token * (len(raw) + 8))()
        vocabulary = ll.llama_model_get_vocab(self._model)
        return list(ids[: ll.llama_tokenize(vocabulary, raw, len(raw), ids, len(ids), True, False)])

    def prefill(self, prompt: list[int]) -> float:
        self._reset()
        start = time.perf_counter()
        self._fill(prompt, 0, every=False)
        self._run()
        self._logits(1).argmax()
        return time.perf_counter() - start

    def decode(self, prompts: list[list[int]], n: int) -> float:
        self._reset()
        for sequence, prompt in enumerate(prompts):
            self._fill(prompt, sequence, every=False)
        self._run()
        rows = len(prompts)
        best = self._logits(rows).argmax(axis=1)
        for sequence in range(rows):
            self._batch.seq_id[sequence][0] = sequence
        self._pos[:rows] = [len(prompt) for prompt in prompts]
        self._wanted[:rows] = 1
        self._batch.n_tokens = rows
        start = time.perf_counter()
        for _ in range(n):
            self._token[:rows] = best
            self._run()
            best = self._logits(rows).argmax(axis=1)
            self._pos[:rows] += 1
        return time.perf_counter() - start

    def score(self, tokens: list[int]) -> dict[str, Any]:
        self._reset()
        self._fill(tokens, 0, every=True)
        self._run()
        logits = self._logits(len(tokens))
        return {"loss": next_token_losses(logits, tokens), "best": logits.argmax(axis=1).tolist()}


if __name__ == "__main__":
    serve(LlamaCpp())
