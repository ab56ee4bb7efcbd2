"""Which vector instructions kernels are compiled for.

Kernels are written once, over logical vectors of sixteen 32-bit lanes, which LLVM splits to the machine's
width; only the 8-bit dot product and a few conversions differ, and they ask the ``ISA`` they are given.
"""

from __future__ import annotations

import functools
import os
import platform
from dataclasses import dataclass

LANES = 16
"""Lanes of a logical vector: rows in a strip of weights."""


@dataclass(frozen=True)
class ISA:
    """A set of vector instructions.

    name: as CHABOK_ISA spells it. dot: how 8-bit products are summed (``vnni512``, ``vnni256``, ``maddubs``,
    ``neon``).
    """

    name: str
    title: str
    triple: str
    cpu: str
    features: str
    dot: str
    registers: int
    """How many logical 16 x 32-bit vectors the register file holds."""


_AVX2 = "+sse4.2,+popcnt,+cx16,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe,+prfchw"
_AVX512 = _AVX2 + ",+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512cd,+avx512vnni,+evex512"
_NOT_ASKED = {"evex512", "prfchw"}
"""Not looked for on the host: a matter of code generation, and a hint that processors without it ignore."""

_NEON = "+neon,+fp-armv8,+dotprod,+fullfp16,+lse"


def _x86(name: str, title: str, cpu: str, features: str, dot: str, registers: int) -> ISA:
    system = {"Windows": "x86_64-pc-windows-msvc-elf", "Darwin": "x86_64-apple-macosx"}
    return ISA(
        name, title, system.get(platform.system(), "x86_64-unknown-linux-gnu"), cpu, features, dot, registers
    )


AVX512 = _x86("avx512", "AVX-512 VNNI", "x86-64-v4", _AVX512, "vnni512", 32)
AVXVNNI = _x86("avxvnni", "AVX2 with AVX-VNNI", "x86-64-v3", _AVX2 + ",+avxvnni", "vnni256", 8)
AVX2 = _x86("avx2", "AVX2", "x86-64-v3", _AVX2, "maddubs", 8)
NEON = ISA(
    "neon",
    "AArch64 NEON with dot product",
    "arm64-apple-macosx" if platform.system() == "Darwin" else "aarch64-unknown-linux-gnu",
    "generic",
    _NEON,
    "neon",
    8,
)
ALL = (AVX512, AVXVNNI, AVX2, NEON)
"""Best first within a processor family."""


class UnsupportedCPUError(RuntimeError):
    """This processor, or the choice in CHABOK_ISA, has no kernels here."""


@functools.cache
def host_features() -> frozenset[str]:
    """Names of the features LLVM finds on this processor."""
    import llvmlite.binding as llvm

    return frozenset(name for name, present in llvm.get_host_cpu_features().items() if present)


@functools.cache
def available() -> tuple[ISA, ...]:
    """The instruction sets this processor can run, best first."""
    machine = platform.machine().lower()
    if machine in ("arm64", "aarch64"):
        have = host_features()
        # macOS reports Apple processors by name only; every one of them has the dot product.
        return (NEON,) if "dotprod" in have or platform.system() == "Darwin" else ()
    if machine not in ("x86_64", "amd64"):
        return ()
    have = host_features()
    return tuple(
        isa
        for isa in (AVX512, AVXVNNI, AVX2)
        if {f[1:] for f in isa.features.split(",")} - _NOT_ASKED <= have
    )


def choose(name: str | None = None) -> ISA:
    """The instruction set to use: ``name``, else CHABOK_ISA, else the best this processor has.

    Raises UnsupportedCPUError, naming what is possible.
    """
    wanted = name or os.environ.get("CHABOK_ISA") or None
    possible = available()
    if not possible:
        raise UnsupportedCPUError(
            f"this processor ({platform.machine()}) has none of the instruction sets Chabok has kernels for: "
            + ", ".join(i.title for i in ALL)
        )
    if wanted is None:
        return possible[0]
    for isa in possible:
        if isa.name == wanted.lower():
            return isa
    raise UnsupportedCPUError(
        f"CHABOK_ISA={wanted}: this processor can run {', '.join(i.name for i in possible)}"
    )
