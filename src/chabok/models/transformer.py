"""A loaded model: programs over packed weights, and the pages its keys and values live in."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chabok.compute import pool
from chabok.compute.kernels.attention import ITEM_BYTES, ROW_BLOCK, SPAN_PAGES
from chabok.compute.library import Library
from chabok.compute.memory import anonymous
from chabok.compute.pool import usable_cores
from chabok.compute.program import Program
from chabok.errors import ResourceError
from chabok.models.batch import PAGE_TOKENS, Batch, Logits, Segment
from chabok.models.config import Config
from chabok.models.layers import Graph
from chabok.models.rope import RopeTable
from chabok.models.weights import Weights
from chabok.models.workspace import FEW_ROWS, Workspace

LEAST_BLOCK = 2
"""Fewest rows that attention takes together where there are more: they share what is read of the cache."""

_SPAN = SPAN_PAGES * PAGE_TOKENS


class Transformer:
    """Implements ``chabok.models.batch.Model`` for every family: ``build`` lays out its program."""

    def __init__(
        self,
        config: Config,
        weights: Weights,
        build: Callable[[Graph], None],
        library: Library,
        *,
        fingerprint: str,
        threads: int | None = None,
        max_rows: int = 512,
    ) -> None:
        self.config, self.weights, self.library, self.max_rows = config, weights, library, max_rows
        self.name, self.fingerprint = config.name, fingerprint
        self.vocab_size, self.n_ctx_train = config.vocab, config.n_ctx
        self.page_bytes = config.page_bytes
        self.threads = threads or usable_cores()
        self.work = Workspace(config, max_rows, self.threads)
        factors = weights.vectors["rope_freqs"][: config.rope.n_rot // 2] if "rope_freqs" in weights else None
        table = RopeTable(config.rope, config.head_dim, config.n_ctx, factors)
        local = RopeTable(config.local_rope, config.head_dim, config.n_ctx) if config.local_rope else table
        self._tables = (table, local)
        graphs = [Graph(config, weights, self.work, self._tables, few=few) for few in (True, False)]
        for graph in graphs:
            build(graph)
        library.load([*pool.KERNELS, *(kernel for graph in graphs for kernel in graph.program.kernels)])
        for graph in graphs:
            graph.program.seal(library)
        self.pool = pool.Pool(library, self.threads)
        self._few, self._many = (graph.program for graph in graphs)
        # Memory views: writing one number through them costs a fraction of what numpy asks.
        w = self.work
        self._tokens, self._positions = _view(w.tokens), _view(w.positions)
        self._row_pages, self._out_rows = _view(w.pages), _view(w.out_rows)
        self._slots, self._items = _view(w.slots), _view(w.items)
        self._scales: Any = _view(w.scales)
        self._turned = self._n_out = self._spare = 0
        self._cache: mmap.mmap | None = None
        self._base = 0
        self.n_pages = 0
        self._page_lists: list[NDArray[np.int32]] = []

    def new_cache(self, n_pages: int) -> None:
        """Allocate the page pool; pages read as zero until written, and take memory only then."""
        self._cache = anonymous(n_pages * self.page_bytes)
        self._pages = np.frombuffer(self._cache, np.uint8)
        self._base, self.n_pages = int(self._pages.ctypes.data), n_pages
        self.work.cache_base[0] = self._base

    @cached_property
    def page_layout(self) -> str:
        """What else than the model file decides about each bit of a page: this code, and what it runs on."""
        import llvmlite

        digest = sha256()
        package = Path(__file__).parents[1]
        for folder in ("compute", "models"):
            for path in sorted((package / folder).rglob("*.py")):
                digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes() + b"\0")
        parts = (self.library.isa.name, np.__version__, llvmlite.__version__, digest.hexdigest())
        return " ".join(parts)

    def page(self, index: int) -> NDArray[np.uint8]:
        """The bytes of a page: uint8[page_bytes], a view."""
        return self._pages[index * self.page_bytes : (index + 1) * self.page_bytes]

    def forward(self, batch: Batch) -> Logits:
        """Run one step over rows of any sequences.

        Raises ValueError if there are more than max_rows rows or a segment has too few pages, ResourceError
        if the system gives no threads.
        """
        try:
            self.pool.run(self.program_for(batch))
        except pool.ThreadsError as error:
            raise ResourceError(f"{error}; ask for fewer, or raise the limit (ulimit -u)") from None
        w, n = self.work, self._n_out
        return Logits(w.logits[:n, : self.vocab_size], w.maxima[:n], w.sums[:n], w.scales[:n], w.best[:n])

    def program_for(self, batch: Batch) -> Program:
        """Describe a batch to the kernels; the program that will run it."""
        if self._cache is None:
            raise ValueError("new_cache() was not called")
        rows = out = items = 0
        self._spare = self.max_rows
        scarce = len(batch) * self.config.n_kv_heads < 8 * self.threads
        kept = []
        for segment in batch:
            n, start, pages = len(segment.tokens), segment.start, segment.pages
            if rows + n > self.max_rows:
                raise ValueError(f"a batch holds at most {self.max_rows} rows")
            if n == 0 or start < 0 or start + n > self.config.n_ctx or len(pages) * PAGE_TOKENS < start + n:
                raise ValueError(f"a segment of {n} rows from {start} has {len(pages)} pages")
            numbers = pages[: (start + n - 1) // PAGE_TOKENS + 1].tolist()
            if min(numbers) < 0 or max(numbers) >= self.n_pages:
                raise ValueError(f"a segment names pages outside 0..{self.n_pages - 1}")
            if segment.outputs < 0:
                raise ValueError(f"a segment wants {segment.outputs} outputs")
            if pages.dtype != np.int32 or not pages.flags.c_contiguous:
                pages = np.ascontiguousarray(pages, np.int32)
            kept.append(pages)
            if start + n > self._turned:
                for table in self._tables:
                    self._turned = table.ensure(start + n)
            if n == 1:
                items = self._row(segment, pages, rows, items, scarce)
            else:
                items = self._rows(segment, pages, rows, items)
            rows += n
            for row in range(rows - min(segment.outputs, n), rows):
                self._out_rows[out] = row
                self._scales[out] = segment.scale
                out += 1
        w = self.work
        w.n_rows[0], w.n_out[0], w.n_items[0] = rows, out, items
        self._n_out, self._page_lists = out, kept
        return self._few if rows <= FEW_ROWS else self._many

    def _row(self, segment: Segment, pages: NDArray[np.int32], row: int, items: int, scarce: bool) -> int:
        """Describe a segment of one row; the number of items so far.

        scarce: whether there is too little to do for all threads, so that a sequence's spans are shared out.
        """
        position = segment.start
        page, token = int(pages[position // PAGE_TOKENS]), int(segment.tokens[0])
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"token {token} is not among the {self.vocab_size} of the vocabulary")
        self._tokens[row] = token
        self._positions[row] = position
        self._row_pages[row] = self._base + page * self.page_bytes
        where = pages.__array_interface__["data"][0]
        spans = position // _SPAN + 1
        if scarce and spans > 1 and self._spare + spans <= len(self.work.partials):
            for span in range(spans):
                self._item(items + span, row, 1, position, where, span, span + 1, self._spare + span)
            self._slots[2 * row], self._slots[2 * row + 1] = self._spare, spans
            self._spare += spans
            return items + spans
        self._item(items, row, 1, position, where, 0, spans, row)
        self._slots[2 * row], self._slots[2 * row + 1] = row, 1
        return items + 1

    def _rows(self, segment: Segment, pages: NDArray[np.int32], row: int, items: int) -> int:
        """Describe a segment of several rows; the number of items so far."""
        w, n, start = self.work, len(segment.tokens), segment.start
        positions = np.arange(start, start + n)
        tokens = np.asarray(segment.tokens)
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            raise ValueError(f"tokens are not all among the {self.vocab_size} of the vocabulary")
        w.tokens[row : row + n] = tokens
        w.positions[row : row + n] = positions
        w.pages[row : row + n] = (
            self._base + pages[positions // PAGE_TOKENS].astype(np.int64) * self.page_bytes
        )
        w.slots[row : row + n, 0] = np.arange(row, row + n)
        w.slots[row : row + n, 1] = 1
        where = pages.__array_interface__["data"][0]
        # Few rows in small blocks: enough of them that no thread waits long for another's last.
        block = ROW_BLOCK
        while block > LEAST_BLOCK and -(-n // block) * self.config.n_kv_heads < 4 * self.threads:
            block //= 2
        # The last rows see most keys: they come first, so that no thread is left with them in the end.
        for first in reversed(range(0, n, block)):
            size = min(block, n - first)
            spans = (start + first + size - 1) // _SPAN + 1
            self._item(items, row + first, size, start + first, where, 0, spans, row + first)
            items += 1
        return items

    def _item(self, item: int, *fields: int) -> None:
        at = item * (ITEM_BYTES // 8)
        for i, field in enumerate(fields, at):
            self._items[i] = field

    def close(self) -> None:
        """Stop the threads."""
        self.pool.close()


def _view(array: NDArray[Any]) -> memoryview:
    """An array's numbers in order, to be written one at a time."""
    flat: Any = array.reshape(-1)
    return memoryview(flat)
