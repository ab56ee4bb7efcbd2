"""Packing moves bits and changes none."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.compute.harness import FLOATS, QUANTIZED, Bytes, dequantized, packed, raw_bytes, same_bits

from chabok.compute.blocks import FORMATS, pack, unpack

ALL = list(FORMATS)
EXTREME_HALVES = np.array(
    [0.0, -0.0, 6e-8, -6e-8, 6.1e-5, 65504, -65504, 1, -1, np.inf, -np.inf, np.nan], np.float16
)
HALF_AT = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2],
    "Q6_K": [208],
}  # fmt: skip
"""Where a block's f16 scales lie."""


def random_blocks(name: str, rows: int, k: int, rng: np.random.Generator, halves: str = "ordinary") -> Bytes:
    """Blocks of random bits; scales ordinary, extreme, or random bits too."""
    fmt = FORMATS[name]
    blocks = rng.integers(0, 256, (rows * k // fmt.block, fmt.block_bytes), dtype=np.uint8)
    for at in HALF_AT.get(name, []):
        if halves == "ordinary":
            scales = rng.uniform(-2, 2, len(blocks)).astype(np.float16)
        else:
            scales = rng.choice(EXTREME_HALVES, len(blocks))
        if halves != "random":
            blocks[:, at : at + 2] = scales.astype(np.float16)[:, None].view(np.uint8)
    return blocks.reshape(-1)


def equal(a: NDArray[np.float32], b: NDArray[np.float32]) -> bool:
    """To the bit, but for the payload of NaNs, which no two libraries agree on."""
    bits = (a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))
    return a.shape == b.shape and bool(bits.all())


@pytest.mark.filterwarnings("ignore:invalid value|overflow:RuntimeWarning")
@pytest.mark.parametrize("name", ALL)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_unpacking_what_was_packed_is_dequantizing_to_the_bit(name: str, data: st.DataObject) -> None:
    fmt = FORMATS[name]
    rows = data.draw(st.integers(1, 70), "rows")
    k = fmt.block * data.draw(st.integers(1, 40 if fmt.block == 1 else 5), "blocks")
    halves = data.draw(st.sampled_from(["ordinary", "extreme", "random"]), "scales")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), "seed"))
    raw = random_blocks(name, rows, k, rng, halves)
    out = np.full(fmt.packed_bytes(rows, k), 0xAA, np.uint8)
    pack(fmt, raw, rows, k, out)
    assert equal(unpack(fmt, out, rows, k), dequantized(raw, name, k))


@pytest.mark.parametrize("name", ALL)
def test_a_large_matrix_is_packed_piece_by_piece_into_the_same(name: str) -> None:
    rows, k = 4129, 512
    raw = random_blocks(name, rows, k, np.random.default_rng(1))
    assert equal(unpack(FORMATS[name], packed(raw, name, k), rows, k), dequantized(raw, name, k))


@pytest.mark.parametrize("name", ALL)
def test_zeros_of_both_signs_survive(name: str) -> None:
    weight = np.zeros((3, 256), np.float32)
    weight[1, ::2] = -0.0
    raw = raw_bytes(weight, name)
    unpacked = unpack(FORMATS[name], packed(raw, name, 256), 3, 256)
    assert same_bits(unpacked, dequantized(raw, name, 256))
    assert not unpacked.any()


@pytest.mark.parametrize("name", ALL)
def test_padding_rows_are_zeros_whatever_lay_in_memory(name: str) -> None:
    fmt = FORMATS[name]
    raw = random_blocks(name, 33, 256, np.random.default_rng(2))
    out = np.full(fmt.packed_bytes(33, 256), 0x55, np.uint8)
    pack(fmt, raw, 33, 256, out)
    assert not unpack(fmt, out, 64, 256)[33:].any()
    assert same_bits(out, packed(raw, name, 256))


@pytest.mark.parametrize("name", QUANTIZED)
def test_packed_weights_take_no_more_than_three_percent_extra(name: str) -> None:
    fmt = FORMATS[name]
    assert fmt.packed_bytes(4096, 1024) <= 1.03 * 4096 * fmt.row_bytes(1024)


@pytest.mark.parametrize("name", FLOATS)
def test_packed_floats_take_nothing_extra(name: str) -> None:
    assert FORMATS[name].packed_bytes(64, 100) == 64 * 100 * FORMATS[name].block_bytes


@pytest.mark.parametrize("name", ALL)
def test_formats_agree_with_the_gguf_package_on_sizes(name: str) -> None:
    assert (FORMATS[name].block, FORMATS[name].block_bytes) == gguf.GGML_QUANT_SIZES[
        gguf.GGMLQuantizationType[name]
    ]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("more_raw", "more_out"), [(1, 0), (-1, 0), (0, 1), (0, -1), (2, 64)])
def test_arrays_of_a_wrong_size_are_refused(name: str, more_raw: int, more_out: int) -> None:
    fmt = FORMATS[name]
    raw = np.zeros(4 * fmt.row_bytes(256) + more_raw, np.uint8)
    out = np.zeros(fmt.packed_bytes(4, 256) + more_out, np.uint8)
    with pytest.raises(ValueError, match=name):
        pack(fmt, raw, 4, 256, out)


@pytest.mark.parametrize("name", QUANTIZED)
def test_rows_that_do_not_fill_whole_blocks_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} .* blocks of {FORMATS[name].block}, not"):
        FORMATS[name].row_bytes(FORMATS[name].block + 16)
