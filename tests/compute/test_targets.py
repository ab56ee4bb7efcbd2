"""Every kernel of the models compiles for every instruction set, and keeps to its registers."""

from __future__ import annotations

import re

import pytest

from chabok.compute import isa, pool
from chabok.compute.blocks import FORMATS
from chabok.compute.isa import ISA
from chabok.compute.kernels.attention import Attention, Merge
from chabok.compute.kernels.experts import Choose, Combine, Sort, Spread
from chabok.compute.kernels.matmul import EPILOGUES, MatMul
from chabok.compute.kernels.quantize import Quantize
from chabok.compute.kernels.rope import RopeStore
from chabok.compute.kernels.rows import AddNorm, Embed, Gate, Gather, Pick, Summarize
from chabok.compute.library import Spec, assembly_text, compile_object

FLAGS = (False, True)
SMALL: list[Spec] = [
    pool._Run(), pool._Wait(), pool._Publish(),
    RopeStore(64), RopeStore(128, norms=True),
    Attention(64, 3), Attention(128, 7), Attention(256, 4, window=True), Attention(64, 1, cap=True),
    *(Merge(64, to_bytes, private) for to_bytes in FLAGS for private in FLAGS),
    Choose(8), Choose(8, private=True), Sort(8), Sort(8, private=True), Combine(8),
    Spread(), Spread(private=True),
    *(Quantize(norm, to_bytes, private) for norm in FLAGS for to_bytes in FLAGS for private in FLAGS),
    *(AddNorm(private) for private in FLAGS),
    *(Gate(act, to_bytes) for act in ("silu", "gelu") for to_bytes in FLAGS),
    Gather(), Summarize(), Summarize(cap=True), Pick(),
]  # fmt: skip
EMBEDS: list[Spec] = [Embed(name) for name in FORMATS]
PRODUCTS: list[Spec] = [MatMul("Q4_0"), MatMul("Q8_0"), MatMul("F16", "add", bias=True), MatMul("BF16")]
ALL_PRODUCTS: list[Spec] = [
    MatMul(name, epilogue, bias, experts)
    for name in FORMATS
    for epilogue in EPILOGUES
    for bias, experts in ((False, False), (True, False), (False, True))
    if not (bias and epilogue in ("silu", "gelu"))
]

X86 = [isa.AVX512, isa.AVXVNNI, isa.AVX2]
E_MACHINE = {"x86": 0x3E, "neon": 0xB7}


def kind(one: ISA) -> str:
    return "neon" if one.dot == "neon" else "x86"


def check_object(spec: Spec, one: ISA) -> None:
    obj = compile_object(spec, one)
    if obj[:4] == b"\x7fELF":
        assert int.from_bytes(obj[18:20], "little") == E_MACHINE[kind(one)]
    assert spec.symbol.encode() in obj


@pytest.mark.parametrize("spec", SMALL + EMBEDS + PRODUCTS, ids=lambda spec: spec.symbol)
def test_kernels_compile_to_arm_objects(spec: Spec) -> None:
    check_object(spec, isa.NEON)


@pytest.mark.wide
@pytest.mark.parametrize("one", isa.ALL, ids=lambda one: one.name)
@pytest.mark.parametrize("spec", ALL_PRODUCTS, ids=lambda spec: spec.symbol)
def test_every_product_compiles_for_every_instruction_set(spec: Spec, one: ISA) -> None:
    check_object(spec, one)


@pytest.mark.wide
@pytest.mark.parametrize("one", X86, ids=lambda one: one.name)
@pytest.mark.parametrize("spec", SMALL + EMBEDS, ids=lambda spec: spec.symbol)
def test_every_other_kernel_compiles_for_every_instruction_set(spec: Spec, one: ISA) -> None:
    check_object(spec, one)


DOT = {
    "avx512": r"\bvpdpbusd\b.*%zmm", "avxvnni": r"\bvpdpbusd\b.*%ymm", "avx2": r"\bvpmaddubsw\b.*%ymm",
    "neon": r"\bsdot\b",
}  # fmt: skip


@pytest.mark.parametrize("one", isa.ALL, ids=lambda one: one.name)
@pytest.mark.parametrize("name", ["Q4_1", "Q8_0"])
def test_products_use_the_dot_product_of_their_instruction_set(name: str, one: ISA) -> None:
    assembly = assembly_text(MatMul(name), one)
    assert re.search(DOT[one.name], assembly)
    if one.name == "avx2":
        assert "vpdpbusd" not in assembly


def evex(assembly: str) -> list[str]:
    """What only AVX-512 has: its registers and masks."""
    return re.findall(r"%zmm\d+|%[xy]mm(?:1[6-9]|2\d|3[01])|\{%k\d\}|%k[0-7]\b", assembly)


@pytest.mark.parametrize("one", [isa.AVXVNNI, isa.AVX2], ids=lambda one: one.name)
@pytest.mark.parametrize(
    "spec",
    [MatMul("Q4_1"), MatMul("Q8_0"), MatMul("F32"), Attention(64, 3, window=True), RopeStore(64), Merge(64),
     Quantize(True), Embed("Q6_K"), Choose(4), Summarize(cap=True), Gate("gelu")],
    ids=lambda spec: spec.symbol,
)  # fmt: skip
def test_kernels_below_avx512_use_none_of_its_registers(spec: Spec, one: ISA) -> None:
    assert evex(assembly_text(spec, one)) == []


@pytest.mark.parametrize("spec", [MatMul("Q4_1"), Attention(64, 3), Quantize(True)], ids=lambda s: s.symbol)
def test_kernels_for_avx512_use_the_whole_width(spec: Spec) -> None:
    assert "%zmm" in assembly_text(spec, isa.AVX512)


@pytest.mark.parametrize("one", isa.ALL, ids=lambda one: one.name)
def test_kernels_call_nothing_outside_themselves(one: ISA) -> None:
    """No vector math library, no memcpy: what runs is what was written."""
    for spec in (MatMul("Q4_1", "silu"), Attention(64, 3, cap=True), Quantize(True), Summarize(cap=True)):
        called = re.findall(r"^\s*(?:callq?|bl)\s+([\w@.]+)", assembly_text(spec, one), re.M)
        assert all(name.split("@")[0].startswith(spec.symbol) for name in called), called
