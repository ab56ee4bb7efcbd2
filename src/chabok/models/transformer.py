"""A loaded model: programs over packed weights, and the pages its keys and values live in."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from chabok.compute.kernels.attention import ROW_BLOCK, SPAN_PAGES, head_bytes
from chabok.compute.library import Library
from chabok.compute.pool import Pool
from chabok.compute.program import Program
from chabok.models.batch import PAGE_TOKENS, Batch, Logits, Segment
from chabok.models.config import Config
from chabok.models.layers import Graph
from chabok.models.rope import RopeTable
from chabok.models.weights import Weights
from chabok.models.workspace import FEW_ROWS, Workspace

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
        self.page_bytes = config.n_layers * config.n_kv_heads * head_bytes(config.head_dim)
        self.pool = Pool(library, threads)
        self.threads = self.pool.threads
        self.work = Workspace(config, max_rows, self.threads)
        factors = weights.vectors["rope_freqs"][: config.rope.n_rot // 2] if "rope_freqs" in weights else None
        table = RopeTable(config.rope, config.head_dim, config.n_ctx, factors)
        local = RopeTable(config.local_rope, config.head_dim, config.n_ctx) if config.local_rope else table
        self._tables = (table, local)
        graphs = [Graph(config, weights, self.work, self._tables, few=few) for few in (True, False)]
        for graph in graphs:
            build(graph)
            graph.program.seal(library)
        self._few, self._many = (graph.program for graph in graphs)
        self._cache: mmap.mmap | None = None
        self._base = 0
        self.n_pages = 0
        self._page_lists: list[NDArray[np.int64]] = []

    def new_cache(self, n_pages: int) -> None:
        """Allocate the page pool; pages read as zero until written, and take memory only then."""
        self._cache = mmap.mmap(-1, max(n_pages * self.page_bytes, mmap.PAGESIZE))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without transparent huge pages
                self._cache.madvise(mmap.MADV_HUGEPAGE)
        self._pages = np.frombuffer(self._cache, np.uint8)
        self._base, self.n_pages = int(self._pages.ctypes.data), n_pages

    def page(self, index: int) -> NDArray[np.uint8]:
        """The bytes of a page: uint8[page_bytes], a view."""
        return self._pages[index * self.page_bytes : (index + 1) * self.page_bytes]

    def forward(self, batch: Batch) -> Logits:
        """Run one step over rows of any sequences.

        Raises ValueError if there are more than max_rows rows or a segment has too few pages.
        """
        self.pool.run(self.program_for(batch))
        w, n_out = self.work, int(self.work.n_out[0])
        return Logits(w.logits[:n_out, : self.vocab_size], w.maxima[:n_out], w.sums[:n_out])

    def program_for(self, batch: Batch) -> Program:
        """Describe a batch to the kernels; the program that will run it."""
        return self._few if self._describe(batch) <= FEW_ROWS else self._many

    def _describe(self, batch: Batch) -> int:
        """Write the batch where the kernels read it; the number of rows."""
        w = self.work
        rows = out = items = 0
        scarce = len(batch) * self.config.n_kv_heads < 8 * self.threads
        spare, end_spare = self.max_rows, len(w.partials)
        self._page_lists = []
        for segment in batch:
            n, start = len(segment.tokens), segment.start
            if rows + n > self.max_rows:
                raise ValueError(f"a batch holds at most {self.max_rows} rows")
            if n == 0 or start + n > self.config.n_ctx or len(segment.pages) * PAGE_TOKENS < start + n:
                raise ValueError(f"a segment of {n} rows from {start} has {len(segment.pages)} pages")
            addresses = self._addresses(segment)
            w.tokens[rows : rows + n] = segment.tokens
            for table in self._tables:
                table.ensure(start + n)
            if n == 1:
                w.positions[rows] = start
                w.pages[rows] = addresses[start // PAGE_TOKENS]
                spans = start // _SPAN + 1
                if scarce and spans > 1 and spare + spans <= end_spare and items + spans < len(w.items):
                    # Long sequences: their spans are shared out, and put together afterwards.
                    w.slots[rows] = spare, spans
                    for span in range(spans):
                        w.items[items, :7] = rows, 1, start, addresses.ctypes.data, span, span + 1, spare
                        items, spare = items + 1, spare + 1
                else:
                    w.slots[rows] = rows, 1
                    w.items[items, :7] = rows, 1, start, addresses.ctypes.data, 0, spans, rows
                    items += 1
            else:
                positions = np.arange(start, start + n)
                w.positions[rows : rows + n] = positions
                w.pages[rows : rows + n] = addresses[positions // PAGE_TOKENS]
                w.slots[rows : rows + n, 0] = np.arange(rows, rows + n)
                w.slots[rows : rows + n, 1] = 1
                # The last rows see most keys: they come first, so that no thread is left with them in the
                # end.
                for first in reversed(range(0, n, ROW_BLOCK)):
                    size = min(ROW_BLOCK, n - first)
                    spans = (start + first + size - 1) // _SPAN + 1
                    at = rows + first
                    w.items[items, :7] = at, size, start + first, addresses.ctypes.data, 0, spans, at
                    items += 1
            rows += n
            wanted = min(segment.outputs, n)
            if wanted:
                w.out_rows[out : out + wanted] = range(rows - wanted, rows)
                out += wanted
        w.n_rows[0], w.n_out[0], w.n_items[0] = rows, out, items
        return rows

    def _addresses(self, segment: Segment) -> NDArray[np.int64]:
        """Addresses of a segment's pages, kept alive until the next batch."""
        if self._cache is None:
            raise ValueError("new_cache() was not called")
        pages = np.asarray(segment.pages)
        if pages.min() < 0 or pages.max() >= self.n_pages:
            raise ValueError(f"a segment names pages outside 0..{self.n_pages - 1}")
        addresses = pages.astype(np.int64) * self.page_bytes + self._base
        self._page_lists.append(addresses)
        return addresses

    def close(self) -> None:
        """Stop the threads."""
        self.pool.close()
