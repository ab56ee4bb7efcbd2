"""A model without weights whose next token depends on every key it should see, and a byte tokenizer.

What a row writes into the cache is a mark of its token and position; a row's logits come from the marks that
it reads back through its page table. A wrong page, a stale page, or a position off by one changes the text.
"""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from chabok.engine.engine import Engine
from chabok.engine.pagefiles import PageFiles
from chabok.models.batch import PAGE_TOKENS, Batch, Logits

EOS = 256
VOCAB = 320  # 256 bytes, the end, and some that mean nothing

WEIGHTS = np.random.default_rng(7).integers(1, 2**62, VOCAB, dtype=np.uint64) | np.uint64(1)


class MockModel:
    name = "mock"
    fingerprint = "mock-1"
    vocab_size = VOCAB
    n_ctx_train = 4096
    page_bytes = PAGE_TOKENS * 8
    page_layout = "marks"

    def __init__(self, *, max_rows: int = 128, row_s: float = 0.0, eos_every: int = 0) -> None:
        self.max_rows = max_rows
        self.row_s = row_s
        self.eos_every = eos_every
        self.steps: list[list[tuple[int, int, int]]] = []  # (start, rows, outputs) of each segment
        self.before: Callable[[Batch], None] = lambda batch: None
        self.closed = False

    def new_cache(self, n_pages: int) -> None:
        self._cache = np.zeros((n_pages, PAGE_TOKENS), np.uint64)

    def page(self, index: int) -> NDArray[np.uint8]:
        return self._cache[index].view(np.uint8)

    def forward(self, batch: Batch) -> Logits:
        assert batch
        assert sum(len(segment.tokens) for segment in batch) <= self.max_rows
        self.steps.append([(s.start, len(s.tokens), s.outputs) for s in batch])
        self.before(batch)
        if self.row_s:
            time.sleep(self.row_s * sum(len(segment.tokens) for segment in batch))
        rows: list[NDArray[np.float32]] = []
        for segment in batch:
            n = len(segment.tokens)
            for i, token in enumerate(segment.tokens):
                position = segment.start + i
                page, slot = segment.pages[position // PAGE_TOKENS], position % PAGE_TOKENS
                self._cache[page, slot] = mark(int(token), position)
                if i >= n - segment.outputs:
                    rows.append(self._logits(segment.pages, position))
        return Logits(np.array(rows, np.float32).reshape(-1, VOCAB))

    def _logits(self, pages: NDArray[np.int32], position: int) -> NDArray[np.float32]:
        n = position + 1
        used = pages[: -(-n // PAGE_TOKENS)]
        marks = self._cache[used].reshape(-1)[:n]
        return logits_of(marks, self.eos_every)

    def close(self) -> None:
        self.closed = True


def mark(token: int, position: int) -> int:
    return ((token + 1) * 0x9E3779B97F4A7C15 + (position + 1) * 0xBF58476D1CE4E5B9) % 2**64 | 1


def logits_of(marks: NDArray[np.uint64], eos_every: int = 0) -> NDArray[np.float32]:
    state = np.uint64(1469598103934665603)
    order = np.arange(1, len(marks) + 1, dtype=np.uint64) * np.uint64(0x94D049BB133111EB)
    with np.errstate(over="ignore"):
        state = state + ((marks ^ order) * np.uint64(0xD6E8FEB86659FD93)).sum(dtype=np.uint64)
        mixed = (WEIGHTS ^ state) * np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(29)
    values = (mixed >> np.uint64(40)).astype(np.float32) * np.float32(8 / 2**24)
    values[EOS] = 100 if eos_every and len(marks) % eos_every == 0 else -100
    values[128:EOS] -= 4  # mostly ASCII
    values[EOS + 1 :] = -50
    return values


def continuation(prompt: list[int], n: int) -> list[int]:
    """The n best tokens after a prompt, without any cache."""
    tokens = list(prompt)
    for _ in range(n):
        marks = np.array([mark(token, position) for position, token in enumerate(tokens)], np.uint64)
        tokens.append(int(logits_of(marks).argmax()))
    return tokens[len(prompt) :]


class ByteTokenizer:
    """One token per byte of UTF-8."""

    vocab_size = VOCAB
    bos_id = None
    eos_ids = frozenset({EOS})
    add_bos = False

    def encode(
        self, text: str, *, special: bool = False, add_bos: bool | None = None, limit: int | None = None
    ) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""

    def stream(self) -> ByteDetokenizer:
        return ByteDetokenizer()


class ByteDetokenizer:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(bytes([token])) if token < 256 else ""

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class PlainTemplate:
    """Role and text on a line each."""

    def encode(self, messages, *, tools=None, add_generation_prompt=True, **variables) -> list[int]:  # type: ignore[no-untyped-def]
        lines = [f"<{message['role']}>{message['content']}\n" for message in messages]
        return list("".join(lines).encode()) + (list(b"<assistant>") if add_generation_prompt else [])


def mock_engine(
    *,
    context: int = 1024,
    n_pages: int = 64,
    max_batch: int = 16,
    budget_s: float = 0.03,
    prefixes: Path | None = None,
    **model: float,
) -> Engine:
    """prefixes: folder of the prefix cache on disk."""
    mock = MockModel(**model)  # type: ignore[arg-type]
    files = None
    if prefixes is not None:
        files = PageFiles(mock.fingerprint, mock.page_layout, mock.page_bytes, root=prefixes)
    return Engine(
        mock,
        ByteTokenizer(),
        context=context,
        n_pages=n_pages,
        max_batch=max_batch,
        budget_s=budget_s,
        prefix_files=files,
    )
