"""What every kernel shares: its signature, its operands, chunks of work, and elementary functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from chabok.compute.emit import F16, F32, I16, I32, I64, PTR, Function, Module, Type, Value

SIGNATURE = (("operands", PTR), ("thread", I64), ("threads", I64))
"""Every kernel: the address of its operands, the calling thread's number, how many threads take part."""


def flagged(stem: str, **flags: bool) -> str:
    """A kernel's name: the stem and the names of the flags that are set."""
    return "_".join([stem, *(name for name, is_set in flags.items() if is_set)])


class Operands:
    """Reads a kernel's operands: 64-bit fields in the order the spec names them."""

    def __init__(self, f: Function, fields: Sequence[str]) -> None:
        self._f, self._at = f, {name: 8 * i for i, name in enumerate(fields)}

    def int(self, name: str) -> Value:
        """A 64-bit integer."""
        return self._f.args[0].load(I64, self._at[name], invariant=True)

    def ptr(self, name: str) -> Value:
        """An address."""
        return self._f.args[0].load(PTR, self._at[name], align=8, invariant=True)

    def float(self, name: str) -> Value:
        """A 32-bit float in the low half of its field."""
        return self._f.args[0].load(F32, self._at[name], invariant=True)


def begin(module: Module, symbol: str, fields: Sequence[str]) -> tuple[Function, Operands]:
    """Begin a kernel with the given operand fields."""
    f = module.function(symbol, SIGNATURE)
    return f, Operands(f, fields)


def numbers(format: str, at: Value, lanes: int = 1) -> Value:
    """Unquantized weights that lie one after the other, as floats: F32, F16 or BF16."""

    def of(kind: Type) -> Type:
        return kind if lanes == 1 else kind * lanes

    if format == "F32":
        return at.load(of(F32))
    if format == "F16":
        return at.load(of(F16)).to_float()
    return (at.load(of(I16)).zext(I32) << 16).bitcast(of(F32))


@contextmanager
def chunks(
    f: Function, counter: Value, total: Value, size: Value | int, share: Value | None = None
) -> Iterator[tuple[Value, Value]]:
    """Take ranges [start, stop) of at most ``size`` items from a counter that all threads share, until none
    is left. A slow or busy core takes fewer: it never holds the others up for more than one chunk.

    share: items that each thread takes first, by its number, before it asks the counter; at most total /
    threads. What a thread begins with is then known before it begins, and a long run is read in one go.
    """
    if share is None:
        with f.forever() as taking:
            start = counter.fetch_add(1) * size
            taking.leave_if(start >= total)
            yield start, f.minimum(start + size, total)
        return
    thread, threads = f.args[1], f.args[2]
    next_start, next_stop = f.variable(thread * share), f.variable((thread + 1) * share)
    taken = threads * share
    with f.forever() as taking:
        start = next_start.get()
        taking.leave_if(start >= total)
        yield start, f.minimum(next_stop.get(), total)
        start = taken + counter.fetch_add(1) * size
        next_start.set(start)
        next_stop.set(start + size)


def over_rows(f: Function, rows: Value, counter: Value, private: bool, row: Callable[[Value], None]) -> None:
    """Do each row: all of them in every thread, or shared out four at a time."""
    if private:
        with f.loop(0, rows) as r:
            row(r)
    else:
        with chunks(f, counter, rows, 4) as (start, stop), f.loop(start, stop) as r:
            row(r)


def in_tiles(f: Function, total: Value, sizes: Sequence[int], run: Callable[[int, Value], None]) -> None:
    """Cover ``total`` items with tiles, the largest first: run(size, first) emits one."""
    done = f.variable(f.const(0, I64))
    for n in sizes:
        with f.forever() as loop:
            at = done.get()
            loop.leave_if(total - at < n)
            run(n, at)
            done.set(at + n)


# Polynomial for 2**t on [-1/2, 1/2]: the Taylor coefficients ln(2)**n / n! up to degree 7, whose remainder
# there is below 3e-9, less than half a unit in the last place of a float.
_EXP2 = [math.log(2) ** n / math.factorial(n) for n in range(8)]


def exp(f: Function, x: Value) -> Value:
    """e**x for float vectors, relative error below 2e-7; 0 below -87.3, clamped to about 2e38 above 88.3."""
    log2e, lanes = 1 / math.log(2), x.type.lanes
    clamped = f.maximum(f.minimum(x, 88.3), -87.3)
    n = f.round_even(clamped * log2e)
    # ln 2 in two parts, so that n * ln 2 is exact enough to be taken away.
    r = f.fma(n, f.const(-0.693359375, x.type), clamped)
    r = f.fma(n, f.const(2.12194440e-4, x.type), r)
    t = r * log2e
    p = f.const(_EXP2[-1], x.type)
    for c in reversed(_EXP2[:-1]):
        p = f.fma(p, t, f.const(c, x.type))
    scale = ((n.to_int(I32) + 127) << 23).bitcast(Type("float", lanes))
    return (x < -87.3).select(f.const(0.0, x.type), p * scale)


def silu(f: Function, x: Value) -> Value:
    """x / (1 + e**-x); 0 below -88, where it is smaller than 1e-36."""
    return (x < -88.0).select(f.const(0.0, x.type), x / (exp(f, -x) + 1.0))


def gelu_tanh(f: Function, x: Value) -> Value:
    """Gaussian error linear unit by its tanh formula (Hendrycks and Gimpel 2016): x * sigmoid(2 * inner)."""
    inner = f.fma(x * x * x, f.const(0.044715, x.type), x) * (2 * math.sqrt(2 / math.pi))
    return x / (exp(f, -inner) + 1.0)
