"""Attention over pages of the key/value cache, with an online softmax.

A page holds 64 tokens of one sequence for every layer and key/value head: keys transposed, f16[head_dim][64],
then values, f16[64][head_dim]. Sixteen keys are scored at once and sixteen dimensions of the output summed at
once, so nothing is ever summed across a vector; all the query heads that share a key/value head, and several
query rows, share each load.

An item of work is a block of consecutive rows of one sequence and a run of spans (128 keys, 2 pages) of its
keys. Each span is reduced by itself to (peak, sum, weighted values) and spans are merged in order, in the
item or, where a sequence's spans were shared out between threads, in ``Merge``: the operations and their
order are the same, and so is every bit.

Reference: Dao et al., "FlashAttention" (2022), and Milakov and Gimelshein, "Online normalizer calculation for
softmax" (2018).
"""

from __future__ import annotations

from dataclasses import dataclass

from chabok.compute.emit import F16, F32, I32, I64, PTR, Function, Module, Value
from chabok.compute.isa import ISA
from chabok.compute.kernels.common import begin, chunks, exp, flagged, in_tiles, over_rows
from chabok.compute.kernels.quantize import quantize_group

PAGE = 64
"""Tokens of a page."""

SPAN_PAGES = 2
"""Pages of a span."""

ITEM_BYTES = 64
"""An item, 64-bit fields: first row, rows, position of the first row, address of the pages' numbers, first
span, end span, slot."""

ROW_BLOCK = 16
"""Most rows of an item."""

NEXT = [("next", PTR)]
"""The argument of functions that ask for what is read next."""

NEVER = -1e30
"""The peak of no scores: finite, so that differences of peaks are never NaN."""


def head_bytes(head_dim: int) -> int:
    """Bytes of a page for one layer and key/value head: keys and values."""
    return 2 * PAGE * head_dim * 2


def partial_floats(head_dim: int) -> int:
    """Floats of one head's unfinished result: peak, sum, padding to 16, then head_dim weighted values."""
    return 16 + head_dim


@dataclass(frozen=True)
class Attention:
    """Scores of a block's queries against their keys, and the values weighted by them, unnormalized.

    group: query heads that share a key/value head. window: whether keys older than ``window`` are hidden.
    cap: whether scores s become cap * tanh(s / cap). Queries come rotated and scaled. Results go to
    ``partials`` float32[slots, heads, 16 + head_dim].
    """

    head_dim: int
    group: int
    window: bool = False
    cap: bool = False

    fields = ("items", "n_items", "qkv", "qkv_stride", "kv_heads", "cache", "page_bytes", "layer", "window",
              "cap", "partials", "scratch", "scratch_stride", "counter")  # fmt: skip

    @property
    def symbol(self) -> str:
        """Name of the function."""
        return flagged(f"attention_{self.head_dim}_{self.group}", window=self.window, cap=self.cap)

    @property
    def queries(self) -> int:
        """Most queries of an item."""
        return ROW_BLOCK * self.group

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch a thread needs: scores, then for each query a span's state and the merged
        state."""
        return self.queries * 4 * (PAGE + 2 * partial_floats(self.head_dim))

    def emit(self, module: Module, isa: ISA) -> None:
        """Write the kernel."""
        # (vectors of 16 side by side, queries that share their loads): as many sums as registers hold.
        vectors, most = (4, 6) if isa.registers >= 32 else (2, 3)
        sizes = [n for n in (6, 4, 3, 2, 1) if n <= most]
        score = {n: self.scores(module, n, vectors) for n in sizes}
        across = max(v for v in range(1, vectors + 1) if self.head_dim // 16 % v == 0)
        weigh = {n: self.weighted(module, n, across) for n in sizes}
        # The first tile of an item asks for what will be read next.
        lead = next(n for n in sizes if n <= self.group)
        score_ahead = self.scores(module, lead, vectors, ahead=True)
        weigh_ahead = self.weighted(module, lead, across, ahead=True)
        soften = self.soften(module)
        merge = merge_function(module, self.symbol, self.head_dim)
        f, ops = begin(module, self.symbol, self.fields)
        dim, group, state = self.head_dim, self.group, 4 * partial_floats(self.head_dim)
        kv_heads = ops.int("kv_heads")
        scratch = ops.ptr("scratch").at(f.args[1] * ops.int("scratch_stride"))
        spans, totals = scratch.at(self.queries * 4 * PAGE), scratch.at(self.queries * (4 * PAGE + state))
        units = ops.ptr("n_items").load(I64) * kv_heads
        with chunks(f, ops.ptr("counter"), units, 1) as (unit, _):
            # Units are taken one at a time: this thread's next is about as many on as there are threads.
            coming = f.minimum(unit + f.args[2], units - 1)
            head = unit % kv_heads
            item = ops.ptr("items").at(unit // kv_heads, ITEM_BYTES)
            first_row, n_rows, position = item.load(I64), item.load(I64, 8), item.load(I64, 16)
            page_list, cache = item.load(PTR, 24, align=8), ops.ptr("cache").load(PTR, align=8)

            def keys_of(page: Value, page_list: Value = page_list, head: Value = head) -> Value:
                """Where a page keeps this layer's and a head's keys."""
                number = page_list.at(page, 4).load(I32).sext(I64)
                start = cache.at(number * ops.int("page_bytes")).at(ops.int("layer"))
                return start.at(head, head_bytes(dim))

            slot = item.load(I64, 48)
            queries = n_rows * group
            q_stride = ops.int("qkv_stride")
            q = ops.ptr("qkv").at(first_row * q_stride).at(head, 4 * group * dim)
            last = position + n_rows - 1
            oldest = f.const(0, I64)
            if self.window:
                oldest = f.maximum(position - ops.int("window") + 1, 0) // PAGE
            with f.loop(0, queries) as i:
                self.reset(f, totals.at(i, state))
            end = f.minimum(item.load(I64, 40) * SPAN_PAGES, last // PAGE + 1)
            next_item, next_head = ops.ptr("items").at(coming // kv_heads, ITEM_BYTES), coming % kv_heads
            next_list, next_page = next_item.load(PTR, 24, align=8), next_item.load(I64, 32) * SPAN_PAGES
            with f.loop(item.load(I64, 32), item.load(I64, 40)) as span:
                with f.loop(0, queries) as i:
                    self.reset(f, spans.at(i, state))
                first_page = f.maximum(span * SPAN_PAGES, oldest)
                end_page = f.minimum((span + 1) * SPAN_PAGES, last // PAGE + 1)
                with f.loop(first_page, end_page) as page:
                    keys = keys_of(page)
                    values = keys.at(PAGE * dim * 2)
                    # Few rows wait for memory: values are on their way while keys are scored, and the next
                    # keys while values are summed, a line at a time, or the core would stand still until
                    # all are asked for.
                    f.invoke(score_ahead, q, q_stride, f.const(0, I64), keys, scratch, values)
                    in_tiles(f, queries - lead, sizes, lambda n, i: f.invoke(
                        score[n], q, q_stride, i + lead, keys, scratch.at(i + lead, 4 * PAGE)))  # fmt: skip
                    with f.loop(0, queries) as i:
                        weights, state_at, row = (
                            scratch.at(i, 4 * PAGE),
                            spans.at(i, state),
                            position + i // group,
                        )
                        window, cap = ops.int("window"), ops.float("cap")
                        f.invoke(soften, weights, state_at, page * PAGE, row, window, cap)
                    # Keys that no row of the block sees have no weight: their values are not even read.
                    seen = f.minimum(last + 1 - page * PAGE, PAGE)
                    following = (page + 1 < end).select(
                        keys_of(f.minimum(page + 1, end - 1)), keys_of(next_page, next_list, next_head)
                    )
                    f.invoke(weigh_ahead, scratch, values, spans, seen, following)
                    in_tiles(f, queries - lead, sizes, lambda n, i: f.invoke(
                        weigh[n], scratch.at(i + lead, 4 * PAGE), values, spans.at(i + lead, state), seen
                    ))  # fmt: skip
                with f.loop(0, queries) as i:
                    f.invoke(merge, totals.at(i, state), spans.at(i, state))
            with f.loop(0, queries) as i:
                to = (
                    ops.ptr("partials")
                    .at((slot + i // group) * kv_heads + head, group * state)
                    .at(i % group, state)
                )
                total = totals.at(i, state)
                to.store(total.load(F32), 0)
                to.store(total.load(F32, 4), 4)
                for v in range(dim // 16):
                    to.store(total.load(F32 * 16, 64 + 64 * v), 64 + 64 * v)

    def reset(self, f: Function, state: Value) -> None:
        """The state before any key."""
        state.store(f.const(NEVER, F32), 0)
        state.store(f.const(0.0, F32), 4)
        for v in range(self.head_dim // 16):
            state.store(f.const(0.0, F32 * 16), 64 + 64 * v)

    def scores(self, module: Module, n: int, vectors: int, *, ahead: bool = False) -> Function:
        """Products of n queries with the 64 keys of a page; ``ahead``: asks for as many bytes at ``next``."""
        args = [("q", PTR), ("q_stride", I64), ("first", I64), ("keys", PTR), ("out", PTR)]
        f = module.function(flagged(f"{self.symbol}_score{n}", ahead=ahead), args + NEXT * ahead)
        q, q_stride, first, keys, out = f.args[:5]
        rows = []
        for i in range(n):
            query = first + i
            rows.append(q.at(query // self.group * q_stride).at(query % self.group, 4 * self.head_dim))
        with f.loop(0, 4 // vectors) as block:
            acc = [[f.variable(f.const(0.0, F32 * 16)) for _ in range(vectors)] for _ in range(n)]
            at = keys.at(block, 32 * vectors)
            with f.loop(0, self.head_dim) as d:
                if ahead:
                    prefetch(f.args[5].at(block, 32 * vectors).at(d, PAGE * 2), 32 * vectors)
                k = [at.at(d, PAGE * 2).load(F16 * 16, 32 * v).to_float() for v in range(vectors)]
                for i in range(n):
                    value = rows[i].at(d, 4).load(F32)
                    for v in range(vectors):
                        acc[i][v].set(f.fma(k[v], value, acc[i][v].get()))
            for i in range(n):
                for v in range(vectors):
                    out.at(block, 64 * vectors).store(acc[i][v].get(), i * 4 * PAGE + 64 * v)
        return f

    def soften(self, module: Module) -> Function:
        """A query's 64 scores become exponentials below its running peak; its state is rescaled to
        that peak."""
        args = [
            ("scores", PTR),
            ("state", PTR),
            ("first_key", I64),
            ("position", I64),
            ("window", I64),
            ("cap", F32),
        ]
        f = module.function(f"{self.symbol}_soften", args)
        scores, state, first_key, position, window, cap = f.args
        s = [scores.load(F32 * 16, 64 * i) for i in range(4)]
        if self.cap:
            # cap * tanh(s / cap), with tanh(y) = 1 - 2 / (e**2y + 1)
            s = [cap.splat(16) * (1.0 - 2.0 / (exp(f, v * (2.0 / cap)) + 1.0)) for v in s]
        hidden = f.const(float("-inf"), F32 * 16)
        newest = (position - first_key).trunc(I32)
        slots = [f.variable(v) for v in s]
        masked = newest < PAGE - 1
        if self.window:
            oldest = (position - window - first_key).trunc(I32)
            masked = masked | (oldest >= 0)
        with f.when(masked):
            for i, slot in enumerate(slots):
                key = f.const_vector(range(16 * i, 16 * i + 16), I32)
                seen = key <= newest
                if self.window:
                    seen = seen & (key > oldest)
                slot.set(seen.select(slot.get(), hidden))
        s = [slot.get() for slot in slots]
        before = state.load(F32)
        peak = f.maximum(before, f.reduce_max(f.maximum(f.maximum(s[0], s[1]), f.maximum(s[2], s[3]))))
        p = [exp(f, v - peak) for v in s]
        for i, v in enumerate(p):
            scores.store(v, 64 * i)
        keep = exp(f, (before - peak).splat(16))
        total = f.reduce_add((p[0] + p[1]) + (p[2] + p[3]))
        state.store(peak, 0)
        state.store(f.fma(state.load(F32, 4), keep.lane(0), total), 4)
        with f.when(before < peak):
            for at in range(64, 64 + 4 * self.head_dim, 64):
                state.store(state.load(F32 * 16, at) * keep, at)
        return f

    def weighted(self, module: Module, n: int, vectors: int, *, ahead: bool = False) -> Function:
        """Add the first ``seen`` values of a page, weighted, to the states of n queries; ``ahead``: asks for
        as many bytes at ``next``."""
        args = [("weights", PTR), ("values", PTR), ("states", PTR), ("seen", I64)]
        f = module.function(flagged(f"{self.symbol}_weigh{n}", ahead=ahead), args + NEXT * ahead)
        weights, values, states, seen = f.args[:4]
        stride = 4 * partial_floats(self.head_dim)
        with f.loop(0, self.head_dim // 16, vectors) as block:
            to = [states.at(i * stride + 64).at(block, 64) for i in range(n)]
            acc = [[f.variable(to[i].load(F32 * 16, 64 * v)) for v in range(vectors)] for i in range(n)]
            at = values.at(block, 32)
            with f.loop(0, seen) as t:
                if ahead:
                    prefetch(f.args[4].at(block, 32).at(t, 2 * self.head_dim), 32 * vectors)
                row = [at.at(t, 2 * self.head_dim).load(F16 * 16, 32 * v).to_float() for v in range(vectors)]
                for i in range(n):
                    weight = weights.at(t, 4).load(F32, i * 4 * PAGE)
                    for v in range(vectors):
                        acc[i][v].set(f.fma(row[v], weight, acc[i][v].get()))
            for i in range(n):
                for v in range(vectors):
                    to[i].store(acc[i][v].get(), 64 * v)
        return f


def prefetch(at: Value, n_bytes: int) -> None:
    """Ask for a run of bytes."""
    for line in range(0, n_bytes, 64):
        at.prefetch(line)


def merge_function(module: Module, owner: str, head_dim: int) -> Function:
    """A function that merges the state at ``new`` into the state at ``total``."""
    f = module.function(f"{owner}_merge", [("total", PTR), ("new", PTR)])
    total, new = f.args
    ours, theirs = total.load(F32), new.load(F32)
    peak = f.maximum(ours, theirs)
    a, b = exp(f, (ours - peak).splat(16)), exp(f, (theirs - peak).splat(16))
    total.store(peak, 0)
    total.store(f.fma(total.load(F32, 4), a.lane(0), new.load(F32, 4) * b.lane(0)), 4)
    for v in range(head_dim // 16):
        at = 64 + 64 * v
        total.store(f.fma(total.load(F32 * 16, at), a, new.load(F32 * 16, at) * b), at)
    return f


@dataclass(frozen=True)
class Merge:
    """Merges a row's partial results in order, normalizes them, and writes them as the next product's input.

    slots: int64[rows, 2], the first slot of a row and how many. Output as lines of 8-bit activations, or
    floats.
    """

    head_dim: int
    to_bytes: bool = True
    private: bool = False

    fields = (
        "rows",
        "slots",
        "partials",
        "heads",
        "out",
        "out_stride",
        "out_private",
        "scratch",
        "scratch_stride",
        "counter",
    )

    @property
    def symbol(self) -> str:
        """Name of the function."""
        return flagged(f"merge_{self.head_dim}", float=not self.to_bytes, private=self.private)

    def emit(self, module: Module, isa: ISA) -> None:
        """Write the kernel."""
        merge = merge_function(module, self.symbol, self.head_dim)
        f, ops = begin(module, self.symbol, self.fields)
        dim, state, heads = self.head_dim, 4 * partial_floats(self.head_dim), ops.int("heads")
        total = ops.ptr("scratch").at(f.args[1] * ops.int("scratch_stride"))
        out = ops.ptr("out").at(f.args[1] * ops.int("out_private"))

        def row(r: Value) -> None:
            first, count = (ops.ptr("slots").at(r, 16).load(I64, 8 * i) for i in range(2))
            to = out.at(r * ops.int("out_stride"))
            with f.loop(0, heads) as head:
                source = ops.ptr("partials").at(first * heads + head, state)
                for v in range(dim // 16 + 1):
                    total.store(source.load(F32 * 16, 64 * v), 64 * v)
                with f.loop(1, count) as i:
                    f.invoke(merge, total, source.at(i * heads, state))
                inverse = f.const(1.0, F32) / total.load(F32, 4)
                for pair in range(dim // 32):
                    a, b = (total.load(F32 * 16, 64 + 128 * pair + 64 * i) * inverse for i in range(2))
                    if self.to_bytes:
                        quantize_group(f, a, b, to.at(head, 2 * dim).at(64 * pair))
                    else:
                        to.at(head, 4 * dim).store(a, 128 * pair)
                        to.at(head, 4 * dim).store(b, 128 * pair + 64)

        over_rows(f, ops.ptr("rows").load(I64), ops.ptr("counter"), self.private, row)
