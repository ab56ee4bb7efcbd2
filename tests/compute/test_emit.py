"""Each operator of the builder does what numpy's does; loops and branches run as they read."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.compute.harness import Machine, place

from chabok.compute import emit
from chabok.compute.emit import (
    BF16,
    F16,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    PTR,
    Function,
    Module,
    Type,
    Value,
    literal,
)
from chabok.compute.isa import AVX2, ISA

NUMPY: dict[str, type[np.generic]] = {
    "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64, "half": np.float16, "float": np.float32,
    "double": np.float64,
}  # fmt: skip


@dataclass(frozen=True)
class Snippet:
    """A function of pointers, written by ``body``; its name tells it apart from others."""

    name: str
    body: Callable[..., None] = field(compare=False, repr=False)
    pointers: int = 2

    @property
    def symbol(self) -> str:
        return f"snippet_{self.name}"

    def emit(self, module: Module, isa: ISA) -> None:
        f = module.function(self.symbol, [(f"p{i}", PTR) for i in range(self.pointers)])
        self.body(f, *f.args)


def run(machine: Machine, name: str, body: Callable[..., None], *arrays: NDArray[Any]) -> None:
    """Compile and run a function that takes the addresses of arrays."""
    spec = Snippet(name, body, len(arrays))
    address = machine.library.load([spec])[spec]
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * len(arrays))(address)
    call(*[a.ctypes.data for a in arrays])


def written() -> Module:
    return Module(AVX2.triple, AVX2.cpu, AVX2.features)


# -- operators ----------------------------------------------------------------------------------------------

INTEGERS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "neg": lambda a, b: -a,
    "rsub": lambda a, b: 7 - a,
    "radd": lambda a, b: 7 + a,
    "constant": lambda a, b: a * 3 - 5,
}
FLOATING: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a, b: -a,
    "rsub": lambda a, b: 1.5 - a,
    "rdiv": lambda a, b: 1.5 / a,
}
COMPARISONS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = {
    "lt": (lambda a, b: a < b, lambda a, b: a < b),
    "le": (lambda a, b: a <= b, lambda a, b: a <= b),
    "gt": (lambda a, b: a > b, lambda a, b: a > b),
    "ge": (lambda a, b: a >= b, lambda a, b: a >= b),
    "eq": (lambda a, b: a.eq(b), lambda a, b: a == b),
    "ne": (lambda a, b: a.ne(b), lambda a, b: (a != b) & ~np.isnan(a) & ~np.isnan(b)),
}


def numbers(element: Type, n: int, seed: int) -> NDArray[Any]:
    """Of every size: random bits for integers and half of the floats."""
    kind, rng = np.dtype(NUMPY[element.element]), np.random.default_rng(seed)
    bits = rng.integers(0, 256, n * kind.itemsize, dtype=np.uint8).view(kind)
    if element.is_float:
        bits[::2] = rng.standard_normal(len(bits[::2])).astype(kind)
    return place(bits)


def apply(
    machine: Machine,
    name: str,
    op: Callable[[Value, Value], Value],
    t: Type,
    a: NDArray[Any],
    b: NDArray[Any],
) -> NDArray[Any]:
    """An operator on vectors of 16, result in the type of its operands (conditions as 0 and 1)."""
    out = place(np.zeros_like(a))

    def body(f: Function, x: Value, y: Value, z: Value) -> None:
        result = op(x.load(t * 16), y.load(t * 16))
        if result.type.element == "i1":
            result = result.select(f.const(1, t * 16), f.const(0, t * 16))
        z.store(result)

    run(machine, f"{name}_{t.element}", body, a, b, out)
    return out


def same(ours: NDArray[Any], wanted: NDArray[Any]) -> bool:
    if ours.dtype.kind == "f":
        return bool(
            (
                ((ours == wanted) & (np.signbit(ours) == np.signbit(wanted)))
                | (np.isnan(ours) & np.isnan(wanted))
            ).all()
        )
    return np.array_equal(ours, wanted)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("t", [I8, I16, I32, I64], ids=str)
@pytest.mark.parametrize("name", list(INTEGERS))
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_integer_operators_are_numpys(name: str, t: Type, best: Machine, seed: int) -> None:
    a, b = numbers(t, 16, seed), numbers(t, 16, seed + 1)
    assert same(apply(best, name, INTEGERS[name], t, a, b), INTEGERS[name](a, b).astype(a.dtype))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("t", [F32, F64], ids=str)
@pytest.mark.parametrize("name", list(FLOATING))
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_floating_operators_are_numpys_to_the_bit(name: str, t: Type, best: Machine, seed: int) -> None:
    a, b = numbers(t, 16, seed), numbers(t, 16, seed + 1)
    assert same(apply(best, f"f{name}", FLOATING[name], t, a, b), FLOATING[name](a, b).astype(a.dtype))


@pytest.mark.parametrize("t", [I8, I32, I64, F32, F64], ids=str)
@pytest.mark.parametrize("name", list(COMPARISONS))
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_comparisons_are_numpys_and_signed(name: str, t: Type, best: Machine, seed: int) -> None:
    a, b = numbers(t, 16, seed), numbers(t, 16, seed + 1)
    b[::3] = a[::3]
    ours, theirs = COMPARISONS[name]
    assert np.array_equal(apply(best, name, ours, t, a, b) != 0, theirs(a, b))


def test_division_of_integers_comes_signed_and_unsigned(best: Machine) -> None:
    a = place(np.array([7, -7, 100, -100] * 4, np.int32))
    b = place(np.array([2, 2, 7, 7] * 4, np.int32))
    unsigned = a.view(np.uint32) // b.view(np.uint32)
    assert apply(best, "sdiv", lambda x, y: x / y, I32, a, b)[:4].tolist() == [3, -3, 14, -14]
    assert np.array_equal(apply(best, "udiv", lambda x, y: x // y, I32, a, b).view(np.uint32), unsigned)
    rest = a.view(np.uint32) % b.view(np.uint32)
    assert np.array_equal(apply(best, "urem", lambda x, y: x % y, I32, a, b).view(np.uint32), rest)


def test_shifts_are_logical(best: Machine) -> None:
    a, b = numbers(I32, 16, 3), place(np.arange(16, dtype=np.int32))
    assert np.array_equal(apply(best, "shl", lambda x, y: x << y, I32, a, b), a << b)
    right = (a.view(np.uint32) >> b.view(np.uint32)).view(np.int32)
    assert np.array_equal(apply(best, "lshr", lambda x, y: x >> y, I32, a, b), right)


def test_scalars_are_spread_over_vectors_on_either_side(best: Machine) -> None:
    a, out = place(np.arange(16, dtype=np.float32)), place(np.zeros(32, np.float32))

    def body(f: Function, x: Value, z: Value) -> None:
        scalar = x.load(F32, 12)
        z.store(x.load(F32 * 16) - scalar)
        z.store(scalar - x.load(F32 * 16), 64)

    run(best, "spread", body, a, out)
    assert out.tolist() == [*(a - 3), *(3 - a)]


# -- conversions, lanes, functions --------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_conversions_are_numpys(best: Machine) -> None:
    bytes8 = place(np.arange(-8, 8, dtype=np.int8) * 16)
    floats = place(np.array([0.5, -0.5, 1.99, -1.99, 1e6, -1e6, 3, -3] * 2, np.float32))
    kinds = {"sext": np.int32, "zext": np.int32, "float": np.float32, "int": np.int32, "half": np.float16,
             "wide": np.float64, "low": np.int8}  # fmt: skip
    out = {name: place(np.zeros(16, kind)) for name, kind in kinds.items()}

    def body(f: Function, b: Value, x: Value, *to: Value) -> None:
        v, w = b.load(I8 * 16), x.load(F32 * 16)
        results = (v.sext(I32), v.zext(I32), v.sext(I32).to_float(), w.to_int(), w.to_float(F16),
                   w.to_float(F64), w.to_int().trunc(I8))  # fmt: skip
        for value, where in zip(results, to):
            where.store(value)

    run(best, "conversions", body, bytes8, floats, *out.values())
    assert np.array_equal(out["sext"], bytes8.astype(np.int32))
    assert np.array_equal(out["zext"], bytes8.view(np.uint8).astype(np.int32))
    assert np.array_equal(out["float"], bytes8.astype(np.float32))
    assert np.array_equal(out["int"], np.trunc(floats).astype(np.int32))
    assert np.array_equal(out["half"], floats.astype(np.float16))
    assert np.array_equal(out["wide"], floats.astype(np.float64))
    assert np.array_equal(out["low"], np.trunc(floats).astype(np.int32).astype(np.int8))


def test_lanes_are_picked_replaced_and_shuffled(best: Machine) -> None:
    a, out = place(np.arange(16, dtype=np.int32)), place(np.zeros(64, np.int32))
    index = place(np.array([11], np.int64))

    def body(f: Function, x: Value, n: Value, z: Value) -> None:
        v, i = x.load(I32 * 16), n.load(I64)
        z.store(v.shuffle(range(15, -1, -1)))
        z.store(v.shuffle([0, 16, 1, 17], v + 100), 64)
        z.store(v.lane(5), 128)
        z.store(v.lane(i), 132)
        z.store(v.with_lane(2, f.const(-1, I32)).with_lane(i, f.const(-2, I32)), 192)

    run(best, "lanes", body, a, index, out)
    assert out[:16].tolist() == list(range(15, -1, -1))
    assert out[16:20].tolist() == [0, 100, 1, 101]
    assert out[32:34].tolist() == [5, 11]
    assert out[48:].tolist() == [0, 1, -1, *range(3, 11), -2, *range(12, 16)]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_functions_without_an_operator_are_numpys(best: Machine, seed: int) -> None:
    a, b, c = (
        place(np.random.default_rng(seed + i).standard_normal(16).astype(np.float32)) for i in range(3)
    )
    out = place(np.zeros((8, 16), np.float32))

    def body(f: Function, x: Value, y: Value, w: Value, z: Value) -> None:
        u, v, t = (p.load(F32 * 16) for p in (x, y, w))
        results = (f.fma(u, v, t), f.maximum(u, v), f.minimum(u, 0.25), f.abs(u), f.sqrt(f.abs(u)),
                   f.round_even(u * 4), f.reduce_add(u).splat(16), f.reduce_max(u).splat(16))  # fmt: skip
        for i, value in enumerate(results):
            z.store(value, 64 * i)

    run(best, "functions", body, a, b, c, out)
    fused = (a.astype(np.float64) * b + c).astype(np.float32)
    assert np.allclose(out[0], fused, rtol=1e-7, atol=0)
    wanted = (
        np.maximum(a, b),
        np.minimum(a, np.float32(0.25)),
        np.abs(a),
        np.sqrt(np.abs(a)),
        np.rint(a * 4),
    )
    for ours, theirs in zip(out[1:6], wanted):
        assert np.array_equal(ours, theirs)
    halves = a
    while len(halves) > 1:
        halves = halves[: len(halves) // 2] + halves[len(halves) // 2 :]
    assert out[6, 0] == halves[0]
    assert out[7, 0] == a.max()


def test_a_product_and_sum_are_fused_only_when_asked(best: Machine) -> None:
    """(1 + e)(1 - e) - 1 is zero in two roundings and -e**2 in one."""
    e = np.float32(2**-13)
    a, b = place(np.full(16, 1 + e, np.float32)), place(np.full(16, 1 - e, np.float32))
    assert not apply(best, "separate", lambda x, y: x * y - 1.0, F32, a, b).any()
    fused = apply(best, "fused", lambda x, y: x.f.fma(x, y, x.f.const(-1.0, F32 * 16)), F32, a, b)
    assert (fused == -(e**2)).all()


def test_integers_have_signed_maximum_and_minimum(best: Machine) -> None:
    a, b = numbers(I32, 16, 1), numbers(I32, 16, 2)
    assert np.array_equal(apply(best, "smax", lambda x, y: x.f.maximum(x, y), I32, a, b), np.maximum(a, b))
    assert np.array_equal(apply(best, "smin", lambda x, y: x.f.minimum(x, y), I32, a, b), np.minimum(a, b))


@pytest.mark.parametrize("t", [F16, F32, F64], ids=str)
@given(value=st.floats(-60000, 60000, width=16))
@settings(max_examples=10, deadline=None)
def test_constants_keep_their_value(t: Type, value: float, best: Machine) -> None:
    out = place(np.zeros(2, NUMPY[t.element]))
    name = f"constant_{t.element}_{np.float64(value).view(np.uint64):x}"
    run(best, name, lambda f, z: z.store(f.const(value, t * 2)), out)
    assert out.tolist() == [value, value]


def test_literals_are_spelled_for_every_type() -> None:
    assert literal(-3, I8) == "-3"
    assert literal(1.0, F32) == "0x3FF0000000000000"
    assert literal(0.1, F32) == f"0x{np.float64(np.float32(0.1)).view(np.uint64):016X}"
    assert literal(1.0, F16) == "0xH3C00"
    assert literal(2, I32 * 16) == "splat (i32 2)"
    assert literal(0.5, F64) == "0x3FE0000000000000"


def test_types_know_their_sizes() -> None:
    assert ((F32 * 16).bytes, (I8 * 64).bytes, PTR.bytes, F16.bytes, BF16.bytes) == (64, 64, 8, 2, 2)
    assert str(F32 * 16) == "<16 x float>"
    assert (I32 * 8).scalar == I32


# -- addresses and atomics ----------------------------------------------------------------------------------


def test_addresses_are_counted_in_bytes_or_strides(best: Machine) -> None:
    a, out = place(np.arange(64, dtype=np.int32)), place(np.zeros(4, np.int32))

    def body(f: Function, x: Value, z: Value) -> None:
        five = f.const(5, I64)
        for i, v in enumerate((x.at(12), x.at(five, 4), x.at(3, 8).at(five, 8), x.at(0))):
            z.store(v.load(I32, 4), 4 * i)

    run(best, "addresses", body, a, out)
    assert out.tolist() == [4, 6, 17, 1]


def test_atomics_read_add_and_write(best: Machine) -> None:
    cell, out = place(np.array([40], np.int64)), place(np.zeros(2, np.int64))

    def body(f: Function, x: Value, z: Value) -> None:
        z.store(x.fetch_add(2))
        z.store(x.load_atomic(), 8)
        x.store_atomic(7)

    run(best, "atomics", body, cell, out)
    assert (out.tolist(), cell.tolist()) == ([40, 42], [7])


# -- control flow -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "stop", "step"), [(0, 10, 1), (3, 10, 4), (5, 5, 1), (9, 2, 1), (-4, 3, 2)]
)
def test_loops_count_as_range_does(start: int, stop: int, step: int, best: Machine) -> None:
    seen = place(np.zeros(33, np.int64))

    def body(f: Function, z: Value) -> None:
        with f.loop(start, stop, step) as i:
            n = z.load(I64)
            z.at(n + 1, 8).store(i)
            z.store(n + 1)

    run(best, f"loop_{start}_{stop}_{step}".replace("-", "m"), body, seen)
    assert seen[1 : 1 + seen[0]].tolist() == list(range(start, stop, step))


def test_endless_loops_are_left_and_variables_keep_their_values(best: Machine) -> None:
    """Collatz: how many steps from 27 to 1."""
    out = place(np.array([27, 0], np.int64))

    def body(f: Function, z: Value) -> None:
        n, steps = f.variable(z.load(I64)), f.variable(f.const(0, I64))
        with f.forever() as loop:
            loop.leave_if(n.get().eq(1))
            with f.either((n.get() & 1).eq(0)) as otherwise:
                n.set(n.get() // 2)
                otherwise()
                n.set(n.get() * 3 + 1)
            steps.set(steps.get() + 1)
        z.store(n.get())
        z.store(steps.get(), 8)

    run(best, "collatz", body, out)
    assert out.tolist() == [1, 111]


@pytest.mark.parametrize("value", [-1, 0, 1])
def test_branches_are_taken_when_their_condition_holds(value: int, best: Machine) -> None:
    x, out = place(np.array([value], np.int32)), place(np.zeros(3, np.int32))

    def body(f: Function, a: Value, z: Value) -> None:
        v = a.load(I32)
        with f.when(v > 0):
            z.store(f.const(1, I32))
        with f.either(v < 0) as otherwise:
            z.store(f.const(2, I32), 4)
            otherwise()
            z.store(f.const(3, I32), 4)
        with f.either(v.eq(0)):
            z.store(f.const(4, I32), 8)

    run(best, "branches", body, x, out)
    assert out.tolist() == [int(value > 0), 2 if value < 0 else 3, 4 * (value == 0)]


def test_functions_of_a_module_call_each_other_and_return(best: Machine) -> None:
    out = place(np.zeros(2, np.int64))

    def body(f: Function, z: Value) -> None:
        other = f.module.function("snippet_calls_other", [("z", PTR), ("n", I64)])
        with other.when(other.args[1] > 5):
            other.args[0].store(other.args[1])
            other.ret()
        other.args[0].store(other.const(-1, I64))
        f.invoke(other, z, f.const(9, I64))
        f.invoke(other, z.at(8), f.const(3, I64))

    run(best, "calls", body, out)
    assert out.tolist() == [9, -1]


# -- mistakes -----------------------------------------------------------------------------------------------


def test_operands_of_different_types_are_a_type_error() -> None:
    f = written().function("f", [("p", PTR)])
    a, b, v = f.args[0].load(I32), f.args[0].load(I64), f.args[0].load(F32 * 16)
    for wrong in (lambda: a + b, lambda: b * a, lambda: v - f.args[0].load(F32 * 8), lambda: v * a):
        with pytest.raises(TypeError, match=r" of .* and "):
            wrong()


def test_a_variable_of_another_type_is_a_type_error() -> None:
    f = written().function("f", [("p", PTR)])
    with pytest.raises(TypeError, match="a variable of i64 cannot hold i32"):
        f.variable(f.const(0, I64)).set(f.const(0, I32))


def test_a_kernel_is_compiled_for_the_width_of_its_instruction_set() -> None:
    text = emit.Module(AVX2.triple, AVX2.cpu, AVX2.features).text()
    assert '"prefer-vector-width"="256"' in text
    assert f'"target-features"="{AVX2.features}"' in text
