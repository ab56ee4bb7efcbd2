"""Mixture of experts: which experts a row goes to, rows sorted by expert, and their results summed.

Sorted, each expert's rows lie together and are one tile product; a token alone gives one list of its experts'
strips.
"""

from __future__ import annotations

from dataclasses import dataclass

from chabok.compute.emit import F32, I32, I64, Module, Value
from chabok.compute.isa import ISA
from chabok.compute.kernels.common import begin, chunks, exp, flagged, over_rows
from chabok.compute.kernels.matmul import ACTIVE_BYTES


@dataclass(frozen=True)
class Choose:
    """The top ``used`` experts of each row: softmax of logits float32[rows, experts], the largest first.

    normalize: their weights are made to sum to one. Ids int32[rows, used], weights float32[rows, used]. A row
    of logits has room for a multiple of 16. private: every thread does all rows into its own copy.
    """

    used: int
    normalize: bool = True
    private: bool = False

    fields = ("rows", "logits", "logits_stride", "experts", "ids", "weights", "private", "counter")

    @property
    def symbol(self) -> str:
        """Name of the function."""
        return flagged(f"choose_{self.used}", normalize=self.normalize, private=self.private)

    def emit(self, module: Module, isa: ISA) -> None:
        """Write the kernel."""
        f, ops = begin(module, self.symbol, self.fields)
        experts = ops.int("experts")
        copy = f.args[1] * ops.int("private")
        ids, weights = ops.ptr("ids").at(copy), ops.ptr("weights").at(copy)
        lanes = f.const_vector(range(16), I32)
        taken = f.scratch(4 * self.used, type_=f"[{self.used} x i32]")

        def row(r: Value) -> None:
            logits = ops.ptr("logits").at(r * ops.int("logits_stride"))
            peak = f.variable(f.const(float("-inf"), F32 * 16))

            def vector(i: Value) -> Value:
                """Sixteen logits; beyond the last expert, nothing."""
                return (lanes < (experts - i).trunc(I32)).select(
                    logits.at(i, 4).load(F32 * 16), float("-inf")
                )

            with f.loop(0, experts, 16) as i:
                peak.set(f.maximum(peak.get(), vector(i)))
            top = f.reduce_max(peak.get())
            total = f.variable(f.const(0.0, F32 * 16))
            with f.loop(0, experts, 16) as i:
                total.set(total.get() + exp(f, vector(i) - top))
            whole = f.variable(f.reduce_add(total.get()))
            chosen = []
            for j in range(self.used):
                best = f.variable(f.const(float("-inf"), F32 * 16))
                where = f.variable(f.const(0, I32 * 16))
                with f.loop(0, experts, 16) as i:
                    v, at = vector(i), lanes + i.trunc(I32)
                    # Rows share logits across threads in private mode, so what was taken is remembered, not
                    # erased.
                    for k in range(j):
                        v = at.ne(taken.load(I32, 4 * k)).select(v, float("-inf"))
                    better = v > best.get()
                    where.set(better.select(at, where.get()))
                    best.set(better.select(v, best.get()))
                value = f.reduce_max(best.get())
                # The lowest id among equals.
                far = best.get().eq(value).select(where.get(), 1 << 30)
                winner = f.variable(far.lane(0))
                for lane in range(1, 16):
                    winner.set(f.minimum(winner.get(), far.lane(lane)))
                taken.store(winner.get(), 4 * j)
                ids.at(r, 4 * self.used).store(winner.get(), 4 * j)
                chosen.append(exp(f, (value - top).splat(16)).lane(0))
            if self.normalize:
                kept = chosen[0]
                for c in chosen[1:]:
                    kept = kept + c
                whole.set(kept)
            for j, c in enumerate(chosen):
                weights.at(r, 4 * self.used).store(c / whole.get(), 4 * j)

        over_rows(f, ops.ptr("rows").load(I64), ops.ptr("counter"), self.private, row)


@dataclass(frozen=True)
class Sort:
    """Counting sort of rows by expert.

    ids int32[rows, used] -> source int64[rows * used], the row each sorted place comes from; place
    int32[rows, used], where each choice went; active: an entry for each expert that has rows; n_active,
    n_sorted int64. starts: int64[experts] to work in.
    """

    used: int
    private: bool = False

    fields = (
        "rows",
        "ids",
        "experts",
        "starts",
        "source",
        "place",
        "active",
        "n_active",
        "n_sorted",
        "private",
    )

    @property
    def symbol(self) -> str:
        """Name of the function."""
        return flagged(f"sort_{self.used}", private=self.private)

    def emit(self, module: Module, isa: ISA) -> None:
        """Write the kernel: done by one thread, or by each for itself."""
        f, ops = begin(module, self.symbol, self.fields)
        with f.when(f.args[1].eq(0) if not self.private else f.const(1, I64).eq(1)):
            copy = f.args[1] * ops.int("private")
            ids, starts, source, place, active, n_active, n_sorted = (
                ops.ptr(n).at(copy)
                for n in ("ids", "starts", "source", "place", "active", "n_active", "n_sorted")
            )
            experts, total = ops.int("experts"), ops.ptr("rows").load(I64) * self.used
            n_sorted.store(total)
            with f.loop(0, experts) as e:
                starts.at(e, 8).store(f.const(0, I64))
            with f.loop(0, total) as i:
                count = starts.at(ids.at(i, 4).load(I32).sext(I64), 8)
                count.store(count.load(I64) + 1)
            at, n = f.variable(f.const(0, I64)), f.variable(f.const(0, I64))
            with f.loop(0, experts) as e:
                count = starts.at(e, 8).load(I64)
                starts.at(e, 8).store(at.get())
                with f.when(count > 0):
                    entry = active.at(n.get(), ACTIVE_BYTES)
                    for field, value in enumerate((e, at.get(), count)):
                        entry.store(value, 8 * field)
                    n.set(n.get() + 1)
                at.set(at.get() + count)
            n_active.store(n.get())
            with f.loop(0, total) as i:
                start = starts.at(ids.at(i, 4).load(I32).sext(I64), 8)
                to = start.load(I64)
                start.store(to + 1)
                source.at(to, 8).store(i // self.used)
                place.at(i, 4).store(to.trunc(I32))


@dataclass(frozen=True)
class Spread:
    """Copies rows to their sorted places: out[i] = x[source[i]], ``bytes`` bytes each, a multiple of 64."""

    private: bool = False

    fields = (
        "rows",
        "source",
        "x",
        "x_stride",
        "x_private",
        "bytes",
        "out_stride",
        "out",
        "out_private",
        "private",
        "counter",
    )

    @property
    def symbol(self) -> str:
        """Name of the function."""
        return flagged("spread", private=self.private)

    def emit(self, module: Module, isa: ISA) -> None:
        """Write the kernel."""
        f, ops = begin(module, self.symbol, self.fields)
        copy = f.args[1] * ops.int("private")
        source, x = ops.ptr("source").at(copy), ops.ptr("x").at(f.args[1] * ops.int("x_private"))
        out = ops.ptr("out").at(f.args[1] * ops.int("out_private"))

        def row(r: Value) -> None:
            line, to = (
                x.at(source.at(r, 8).load(I64) * ops.int("x_stride")),
                out.at(r * ops.int("out_stride")),
            )
            with f.loop(0, ops.int("bytes"), 64) as i:
                to.at(i).store(line.at(i).load(I32 * 16))

        over_rows(f, ops.ptr("rows").at(copy).load(I64), ops.ptr("counter"), self.private, row)


@dataclass(frozen=True)
class Combine:
    """x[row] += sum over the row's experts of weight * y[place], in the order they were chosen."""

    used: int

    fields = ("rows", "x", "x_stride", "y", "y_stride", "weights", "place", "k", "counter")

    @property
    def symbol(self) -> str:
        """Name of the function."""
        return f"combine_{self.used}"

    def emit(self, module: Module, isa: ISA) -> None:
        """Write the kernel: shared out by runs of 256 columns of a row, so that one row keeps all threads
        busy."""
        f, ops = begin(module, self.symbol, self.fields)
        k = ops.int("k")
        runs = (k + 255) // 256
        with chunks(f, ops.ptr("counter"), ops.ptr("rows").load(I64) * runs, 1) as (item, _):
            r, first = item // runs, item % runs * 256
            x = ops.ptr("x").at(r * ops.int("x_stride"))
            weights = [ops.ptr("weights").at(r, 4 * self.used).load(F32, 4 * j) for j in range(self.used)]
            rows = [
                ops.ptr("y").at(
                    ops.ptr("place").at(r, 4 * self.used).load(I32, 4 * j).sext(I64) * ops.int("y_stride")
                )
                for j in range(self.used)
            ]
            with f.loop(first, f.minimum(first + 256, k), 16) as i:
                total = f.const(0.0, F32 * 16)
                for weight, y in zip(weights, rows):
                    total = f.fma(y.at(i, 4).load(F32 * 16), weight, total)
                x.at(i, 4).store(x.at(i, 4).load(F32 * 16) + total)
