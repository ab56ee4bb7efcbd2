"""A small typed builder of LLVM IR, so that a kernel reads like the mathematics it computes.

Values carry their type and take Python operators; loops and branches are ``with`` blocks; variables are stack
slots that the optimizer turns into registers. Nothing is fused, reordered or approximated behind the kernel's
back: floating-point operations carry no fast-math flags, so a kernel's result is a function of its text
alone.

Addresses are formed by ``getelementptr`` only (integer arithmetic on pointers is miscompiled by LLVM 22).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

_INT_BITS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64}
_FLOAT_BITS = {"half": 16, "bfloat": 16, "float": 32, "double": 64}


@dataclass(frozen=True)
class Type:
    """A scalar or vector type: element name as LLVM spells it, and the number of lanes (0 for a scalar)."""

    element: str
    lanes: int = 0

    def __str__(self) -> str:
        return f"<{self.lanes} x {self.element}>" if self.lanes else self.element

    def __mul__(self, lanes: int) -> Type:
        """``F32 * 16`` is a vector of sixteen floats."""
        return Type(self.element, lanes)

    @property
    def scalar(self) -> Type:
        """The type of one element."""
        return Type(self.element)

    @property
    def is_float(self) -> bool:
        """Whether elements are floating point."""
        return self.element in _FLOAT_BITS

    @property
    def bits(self) -> int:
        """Bits of one element."""
        if self.element == "ptr":
            return 64
        return _INT_BITS.get(self.element) or _FLOAT_BITS[self.element]

    @property
    def bytes(self) -> int:
        """Bytes of the whole value in memory."""
        return max(self.lanes, 1) * self.bits // 8


I1, I8, I16, I32, I64 = (Type(n) for n in ("i1", "i8", "i16", "i32", "i64"))
F16, BF16, F32, F64 = (Type(n) for n in ("half", "bfloat", "float", "double"))
PTR, VOID = Type("ptr"), Type("void")

Number = int | float


def literal(value: Number, type_: Type) -> str:
    """The constant as LLVM spells it, splatted over the lanes of a vector type."""
    if type_.is_float:
        v = float(value)
        if type_.element == "float":
            v = struct.unpack("f", struct.pack("f", v))[0]
        elif type_.element == "half":
            v = struct.unpack("e", struct.pack("e", v))[0]
        text = f"0x{struct.unpack('Q', struct.pack('d', v))[0]:016X}"
        if type_.element == "half":
            text = f"0xH{struct.unpack('H', struct.pack('e', v))[0]:04X}"
    else:
        text = str(int(value))
    return f"splat ({type_.scalar} {text})" if type_.lanes else text


class Value:
    """An SSA value of a function under construction."""

    __slots__ = ("f", "ref", "type")

    def __init__(self, f: Function, ref: str, type_: Type) -> None:
        self.f, self.ref, self.type = f, ref, type_

    def _peer(self, other: Value | Number) -> Value:
        """The other operand as a value of this type: numbers become constants, scalars are splatted."""
        if isinstance(other, Value):
            if self.type.lanes and not other.type.lanes:
                return other.splat(self.type.lanes)
            return other
        return Value(self.f, literal(other, self.type), self.type)

    def _op(self, integer: str, floating: str, other: Value | Number, *, swap: bool = False) -> Value:
        left, right = self, self._peer(other)
        if right.type.lanes and not left.type.lanes:
            left = left.splat(right.type.lanes)
        if swap:
            left, right = right, left
        if left.type != right.type or (left.type.is_float and floating == "?"):
            raise TypeError(f"{integer} of {left.type} and {right.type}")
        return self.f.emit(
            f"{floating if left.type.is_float else integer} {left.type} {left.ref}, {right.ref}", left.type
        )

    def __add__(self, other: Value | Number) -> Value:
        return self._op("add", "fadd", other)

    def __radd__(self, other: Number) -> Value:
        return self._op("add", "fadd", other)

    def __sub__(self, other: Value | Number) -> Value:
        return self._op("sub", "fsub", other)

    def __rsub__(self, other: Number) -> Value:
        return self._op("sub", "fsub", other, swap=True)

    def __mul__(self, other: Value | Number) -> Value:
        return self._op("mul", "fmul", other)

    def __rmul__(self, other: Number) -> Value:
        return self._op("mul", "fmul", other)

    def __truediv__(self, other: Value | Number) -> Value:
        return self._op("sdiv", "fdiv", other)

    def __rtruediv__(self, other: Number) -> Value:
        return self._op("sdiv", "fdiv", other, swap=True)

    def __floordiv__(self, other: Value | Number) -> Value:
        """Unsigned quotient."""
        return self._op("udiv", "fdiv", other)

    def __mod__(self, other: Value | Number) -> Value:
        """Unsigned remainder."""
        return self._op("urem", "frem", other)

    def __and__(self, other: Value | Number) -> Value:
        return self._op("and", "?", other)

    def __or__(self, other: Value | Number) -> Value:
        return self._op("or", "?", other)

    def __xor__(self, other: Value | Number) -> Value:
        return self._op("xor", "?", other)

    def __lshift__(self, other: Value | Number) -> Value:
        return self._op("shl", "?", other)

    def __rshift__(self, other: Value | Number) -> Value:
        """Logical shift right."""
        return self._op("lshr", "?", other)

    def __neg__(self) -> Value:
        if self.type.is_float:
            return self.f.emit(f"fneg {self.type} {self.ref}", self.type)
        return 0 - self

    def _compare(self, integer: str, floating: str, other: Value | Number) -> Value:
        right = self._peer(other)
        if right.type != self.type:
            raise TypeError(f"comparison of {self.type} and {right.type}")
        op = f"fcmp {floating}" if self.type.is_float else f"icmp {integer}"
        return self.f.emit(f"{op} {self.type} {self.ref}, {right.ref}", Type("i1", self.type.lanes))

    def __lt__(self, other: Value | Number) -> Value:
        return self._compare("slt", "olt", other)

    def __le__(self, other: Value | Number) -> Value:
        return self._compare("sle", "ole", other)

    def __gt__(self, other: Value | Number) -> Value:
        return self._compare("sgt", "ogt", other)

    def __ge__(self, other: Value | Number) -> Value:
        return self._compare("sge", "oge", other)

    def eq(self, other: Value | Number) -> Value:
        """Equality, element by element."""
        return self._compare("eq", "oeq", other)

    def ne(self, other: Value | Number) -> Value:
        """Inequality, element by element."""
        return self._compare("ne", "one", other)

    def select(self, yes: Value, no: Value | Number) -> Value:
        """``yes`` where this condition holds, else ``no``."""
        other = yes._peer(no)
        if yes.type != other.type or self.type.element != "i1" or self.type.lanes not in (0, yes.type.lanes):
            raise TypeError(f"{self.type} cannot choose between {yes.type} and {other.type}")
        choice = f"{yes.type} {yes.ref}, {other.type} {other.ref}"
        return self.f.emit(f"select {self.type} {self.ref}, {choice}", yes.type)

    def _cast(self, op: str, element: Type) -> Value:
        target = Type(element.element, self.type.lanes)
        return (
            self if target == self.type else self.f.emit(f"{op} {self.type} {self.ref} to {target}", target)
        )

    def zext(self, element: Type) -> Value:
        """Widen an unsigned integer."""
        return self._cast("zext", element)

    def sext(self, element: Type) -> Value:
        """Widen a signed integer."""
        return self._cast("sext", element)

    def trunc(self, element: Type) -> Value:
        """Keep the low bits of an integer."""
        return self._cast("trunc", element)

    def to_float(self, element: Type = F32) -> Value:
        """A signed integer, or a narrower or wider float, as floating point."""
        if not self.type.is_float:
            return self._cast("sitofp", element)
        return self._cast("fpext" if element.bits > self.type.bits else "fptrunc", element)

    def to_int(self, element: Type = I32) -> Value:
        """A float truncated toward zero to a signed integer."""
        return self._cast("fptosi", element)

    def bitcast(self, target: Type) -> Value:
        """The same bits as another type of the same size."""
        if target == self.type:
            return self
        return self.f.emit(f"bitcast {self.type} {self.ref} to {target}", target)

    def splat(self, lanes: int) -> Value:
        """A scalar repeated over the lanes of a vector."""
        t = self.type * lanes
        if not self.ref.startswith("%"):
            return Value(self.f, f"splat ({self.type} {self.ref})", t)
        one = self.f.emit(f"insertelement {t} poison, {self.type} {self.ref}, i64 0", t)
        return self.f.emit(f"shufflevector {t} {one.ref}, {t} poison, <{lanes} x i32> zeroinitializer", t)

    def shuffle(self, lanes: Sequence[int], other: Value | None = None) -> Value:
        """The named lanes of this vector (and of ``other``, numbered after it) in the given order."""
        mask = ", ".join(f"i32 {i}" for i in lanes)
        right = other.ref if other is not None else "poison"
        t = self.type.scalar * len(lanes)
        operands = f"{self.type} {self.ref}, {self.type} {right}"
        return self.f.emit(f"shufflevector {operands}, <{len(lanes)} x i32> <{mask}>", t)

    def lane(self, index: int | Value) -> Value:
        """One element of a vector."""
        at = f"i64 {index}" if isinstance(index, int) else f"{index.type} {index.ref}"
        return self.f.emit(f"extractelement {self.type} {self.ref}, {at}", self.type.scalar)

    def with_lane(self, index: int | Value, value: Value) -> Value:
        """This vector with one element replaced."""
        at = f"i64 {index}" if isinstance(index, int) else f"{index.type} {index.ref}"
        return self.f.emit(f"insertelement {self.type} {self.ref}, {value.type} {value.ref}, {at}", self.type)

    # -- pointers
    # ---------------------------------------------------------------------------------------------

    def at(self, offset: Value | int, stride: int = 1) -> Value:
        """The address ``offset * stride`` bytes further on."""
        if isinstance(offset, int):
            distance = offset * stride
            if distance == 0:
                return self
            return self.f.emit(f"getelementptr i8, ptr {self.ref}, i64 {distance}", PTR)
        if stride != 1:
            offset = offset * stride
        return self.f.emit(f"getelementptr i8, ptr {self.ref}, i64 {offset.ref}", PTR)

    def load(
        self, type_: Type, offset: int = 0, align: int | None = None, *, invariant: bool = False
    ) -> Value:
        """The value stored ``offset`` bytes further on; ``align`` defaults to one element."""
        where = self.at(offset)
        align = align or max(type_.scalar.bytes, 1)
        note = ", !invariant.load !0" if invariant else ""
        return self.f.emit(f"load {type_}, ptr {where.ref}, align {align}{note}", type_)

    def store(self, value: Value, offset: int = 0, align: int | None = None) -> None:
        """Store a value ``offset`` bytes further on."""
        where = self.at(offset)
        align = align or max(value.type.scalar.bytes, 1)
        self.f.line(f"store {value.type} {value.ref}, ptr {where.ref}, align {align}")

    def fetch_add(self, amount: int) -> Value:
        """Atomically add to the 64-bit integer here; the value before."""
        return self.f.emit(f"atomicrmw add ptr {self.ref}, i64 {amount} acq_rel", I64)

    def load_atomic(self, type_: Type = I64) -> Value:
        """Atomic load, acquire."""
        return self.f.emit(f"load atomic {type_}, ptr {self.ref} acquire, align 8", type_)

    def store_atomic(self, value: Value | int) -> None:
        """Atomic store of a 64-bit integer, release."""
        ref = value.ref if isinstance(value, Value) else str(value)
        self.f.line(f"store atomic i64 {ref}, ptr {self.ref} release, align 8")

    def prefetch(self, offset: int = 0, locality: int = 3, *, write: bool = False) -> None:
        """Ask for the cache line here; locality 3 is the nearest cache, 0 a passing use; or ask to own it."""
        hints = (self.f.const(n, I32) for n in (int(write), locality, 1))
        self.f.call("llvm.prefetch.p0", VOID, self.at(offset), *hints)


class Variable:
    """A mutable value; a stack slot that the optimizer promotes to a register."""

    __slots__ = ("slot", "type")

    def __init__(self, slot: Value, type_: Type) -> None:
        self.slot, self.type = slot, type_

    def get(self) -> Value:
        """The present value."""
        return self.slot.load(self.type)

    def set(self, value: Value | Number) -> None:
        """Replace the value."""
        if not isinstance(value, Value):
            value = self.slot.f.const(value, self.type)
        if value.type != self.type:
            raise TypeError(f"a variable of {self.type} cannot hold {value.type}")
        self.slot.store(value)


class Function:
    """A function under construction; its arguments are ``args``."""

    def __init__(
        self, module: Module, name: str, args: Sequence[tuple[str, Type]], returns: Type = VOID
    ) -> None:
        self.module, self.name, self.returns = module, name, returns
        self._signature = ", ".join(f"{t}{' noalias' if t == PTR else ''} %{n}" for n, t in args)
        self._count = 0
        self._slots: list[str] = []
        self._lines: list[str] = []
        self.args = tuple(Value(self, f"%{n}", t) for n, t in args)

    def line(self, text: str) -> None:
        """Append an instruction without a result."""
        self._lines.append("  " + text)

    def emit(self, text: str, type_: Type) -> Value:
        """Append an instruction and name its result."""
        self._count += 1
        ref = f"%v{self._count}"
        self._lines.append(f"  {ref} = {text}")
        return Value(self, ref, type_)

    def const(self, value: Number, type_: Type) -> Value:
        """A constant, splatted over a vector type."""
        return Value(self, literal(value, type_), type_)

    def const_vector(self, values: Sequence[int] | range, element: Type) -> Value:
        """A constant vector of integers."""
        inner = ", ".join(f"{element} {v}" for v in values)
        return Value(self, f"<{inner}>", element * len(values))

    def address(self, address: Value) -> Value:
        """A 64-bit integer operand as a pointer (only ever as it stands, never after arithmetic)."""
        return self.emit(f"inttoptr i64 {address.ref} to ptr", PTR)

    def variable(self, initial: Value) -> Variable:
        """A mutable value."""
        slot = self.scratch(
            initial.type.bytes, align=max(initial.type.scalar.bytes, 1), type_=str(initial.type)
        )
        variable = Variable(slot, initial.type)
        variable.set(initial)
        return variable

    def scratch(self, n_bytes: int, align: int = 64, type_: str | None = None) -> Value:
        """Uninitialised memory on the stack."""
        self._count += 1
        ref = f"%s{self._count}"
        self._slots.append(f"  {ref} = alloca {type_ or f'[{n_bytes} x i8]'}, align {align}")
        return Value(self, ref, PTR)

    def call(self, callee: str, returns: Type, *args: Value) -> Value:
        """Call an intrinsic or external function by name, declaring it."""
        self.module.declare(callee, returns, tuple(a.type for a in args))
        actual = ", ".join(f"{a.type} {a.ref}" for a in args)
        text = f"call {returns} @{callee}({actual})"
        if returns == VOID:
            self.line(text)
            return Value(self, "void", VOID)
        return self.emit(text, returns)

    def call_pointer(self, callee: Value, *args: Value) -> None:
        """Call a function without result through its address."""
        self.line(f"call void {callee.ref}({', '.join(f'{a.type} {a.ref}' for a in args)})")

    def invoke(self, other: Function, *args: Value) -> None:
        """Call another function of this module."""
        self.line(f"call {other.returns} @{other.name}({', '.join(f'{a.type} {a.ref}' for a in args)})")

    def ret(self, value: Value | None = None) -> None:
        """Return from the function."""
        self.line("ret void" if value is None else f"ret {value.type} {value.ref}")
        self._begin(self._label("dead"))

    # -- arithmetic that has no operator --------------------------------------------------------------------

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """``a * b + c``, rounded once."""
        lanes = max(a.type.lanes, b.type.lanes, c.type.lanes)
        a, b, c = (v.splat(lanes) if lanes and not v.type.lanes else v for v in (a, b, c))
        if not a.type == b.type == c.type or not a.type.is_float:
            raise TypeError(f"fma of {a.type}, {b.type} and {c.type}")
        return self.call(_intrinsic("llvm.fma", a.type), a.type, a, b, c)

    def _binary(self, name: str, a: Value, b: Value | Number) -> Value:
        return self.call(_intrinsic(name, a.type), a.type, a, a._peer(b))

    def maximum(self, a: Value, b: Value | Number) -> Value:
        """The larger of two floats or signed integers."""
        if a.type.is_float:
            b = a._peer(b)
            return (a > b).select(a, b)
        return self._binary("llvm.smax", a, b)

    def minimum(self, a: Value, b: Value | Number) -> Value:
        """The smaller of two floats or signed integers."""
        if a.type.is_float:
            b = a._peer(b)
            return (a < b).select(a, b)
        return self._binary("llvm.smin", a, b)

    def abs(self, a: Value) -> Value:
        """Absolute value of a float."""
        return self.call(_intrinsic("llvm.fabs", a.type), a.type, a)

    def sqrt(self, a: Value) -> Value:
        """Square root."""
        return self.call(_intrinsic("llvm.sqrt", a.type), a.type, a)

    def round_even(self, a: Value) -> Value:
        """The nearest integer as a float, halves to even."""
        return self.call(_intrinsic("llvm.rint", a.type), a.type, a)

    def reduce_add(self, v: Value) -> Value:
        """The sum of a vector's lanes, by halves: the order is fixed."""
        while v.type.lanes > 1:
            half = v.type.lanes // 2
            v = v.shuffle(range(half)) + v.shuffle(range(half, 2 * half))
        return v.lane(0)

    def reduce_max(self, v: Value) -> Value:
        """The largest of a vector's lanes."""
        while v.type.lanes > 1:
            half = v.type.lanes // 2
            v = self.maximum(v.shuffle(range(half)), v.shuffle(range(half, 2 * half)))
        return v.lane(0)

    def pause(self) -> None:
        """Tell the core that this is a waiting loop."""
        if self.module.triple.startswith("x86"):
            self.call("llvm.x86.sse2.pause", VOID)
        else:
            self.call("llvm.aarch64.hint", VOID, self.const(1, I32))

    # -- control flow ----------------------------------------------------------------------------------------

    def _label(self, stem: str) -> str:
        self._count += 1
        return f"{stem}{self._count}"

    def _begin(self, label: str) -> None:
        self._lines.append(f"{label}:")

    def _branch(self, condition: Value, yes: str, no: str) -> None:
        self.line(f"br i1 {condition.ref}, label %{yes}, label %{no}")

    def _jump(self, label: str) -> None:
        self.line(f"br label %{label}")

    @contextmanager
    def loop(self, start: Value | int, stop: Value | int, step: Value | int = 1) -> Iterator[Value]:
        """Count from start up to, not including, stop (64-bit, signed)."""
        first = self.const(start, I64) if isinstance(start, int) else start
        counter = self.variable(first)
        head, body, done = self._label("head"), self._label("body"), self._label("done")
        self._jump(head)
        self._begin(head)
        index = counter.get()
        self._branch(index < stop, body, done)
        self._begin(body)
        yield index
        counter.set(index + step)
        self._jump(head)
        self._begin(done)

    @contextmanager
    def forever(self) -> Iterator[Loop]:
        """Repeat until ``leave_if``."""
        body, done = self._label("body"), self._label("done")
        self._jump(body)
        self._begin(body)
        yield Loop(self, done)
        self._jump(body)
        self._begin(done)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """Run the block if the condition holds."""
        body, done = self._label("then"), self._label("done")
        self._branch(condition, body, done)
        self._begin(body)
        yield
        self._jump(done)
        self._begin(done)

    @contextmanager
    def either(self, condition: Value) -> Iterator[Otherwise]:
        """Run the block if the condition holds, what follows ``otherwise()`` if not."""
        body, other, done = self._label("then"), self._label("else"), self._label("done")
        self._branch(condition, body, other)
        self._begin(body)
        branch = Otherwise(self, other, done)
        yield branch
        if not branch.used:
            branch()
        self._jump(done)
        self._begin(done)

    def text(self) -> str:
        """The function's definition as IR."""
        end = "  ret void" if self.returns == VOID else "  unreachable"
        body = "\n".join([*self._slots, *self._lines, end])
        return f"define {self.returns} @{self.name}({self._signature}) #0 {{\nentry:\n{body}\n}}\n"


class Loop:
    """The handle of an endless loop."""

    def __init__(self, f: Function, done: str) -> None:
        self._f, self._done = f, done

    def leave_if(self, condition: Value) -> None:
        """Leave the loop if the condition holds."""
        onward = self._f._label("on")
        self._f._branch(condition, self._done, onward)
        self._f._begin(onward)


class Otherwise:
    """Switches an ``either`` block to its other branch."""

    def __init__(self, f: Function, other: str, done: str) -> None:
        self._f, self._other, self._done, self.used = f, other, done, False

    def __call__(self) -> None:
        """What follows is the other branch."""
        self.used = True
        self._f._jump(self._done)
        self._f._begin(self._other)


class Module:
    """Functions that are compiled together for one target."""

    def __init__(self, triple: str, cpu: str, features: str) -> None:
        self.triple, self.cpu, self.features = triple, cpu, features
        self.functions: list[Function] = []
        self._declared: dict[str, str] = {}

    def function(self, name: str, args: Sequence[tuple[str, Type]], returns: Type = VOID) -> Function:
        """Begin a function."""
        f = Function(self, name, args, returns)
        self.functions.append(f)
        return f

    def declare(self, name: str, returns: Type, args: tuple[Type, ...]) -> None:
        """Declare what is called but not defined here."""
        immediates = {"llvm.prefetch.p0": {1, 2, 3}, "llvm.aarch64.hint": {0}, "llvm.abs.v32i8": {1}}.get(
            name, set()
        )
        formal = ", ".join(f"{t}{' immarg' if i in immediates else ''}" for i, t in enumerate(args))
        self._declared[name] = f"declare {returns} @{name}({formal})"

    def text(self) -> str:
        """The module as IR."""
        parts = [f'target triple = "{self.triple}"', *(f.text() for f in self.functions)]
        parts += self._declared.values()
        width = "512" if "+avx512f" in self.features else "256"
        parts.append(
            f'attributes #0 = {{ nounwind "target-cpu"="{self.cpu}" "target-features"="{self.features}" '
            f'"prefer-vector-width"="{width}" "min-legal-vector-width"="{width}" "no-trapping-math"="true" }}'
        )
        parts.append("!0 = !{}")
        return "\n".join(parts)


def _intrinsic(stem: str, type_: Type) -> str:
    short = {"half": "f16", "bfloat": "bf16", "float": "f32", "double": "f64"}.get(
        type_.element, type_.element
    )
    return f"{stem}.{f'v{type_.lanes}' if type_.lanes else ''}{short}"
