"""Rotary embedding: orders, frequencies and tables, against the oracle's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fixtures import FIXTURES, fixture_path
from tests.oracles.forward import Oracle

from chabok.checkpoints.gguf import GGUF
from chabok.models import gemma, llama, qwen
from chabok.models.config import Config, Rope
from chabok.models.rope import RopeTable, frequencies, order

FAMILIES = {arch: family for family in (llama, qwen, gemma) for arch in family.ARCHITECTURES}
shapes = st.integers(1, 8).flatmap(
    lambda n: st.tuples(st.just(32 * n), st.integers(1, 16 * n).map(lambda pairs: 2 * pairs), st.booleans())
)


def config(name: str) -> Config:
    gguf = GGUF.open(fixture_path(name))
    return FAMILIES[gguf.architecture].read(gguf)


@given(shapes)
def test_an_order_names_every_dimension_once(shape: tuple[int, int, bool]) -> None:
    head_dim, n_rot, interleaved = shape
    assert sorted(order(Rope(1e4, interleaved=interleaved, n_rot=n_rot), head_dim)) == list(range(head_dim))


@given(shapes, st.integers(0, 5000))
def test_turning_in_the_kernels_order_is_turning_in_the_files(shape: tuple[int, int, bool], at: int) -> None:
    """The kernel turns i with i + half by the table's rows; the file's pairs must turn as they should."""
    head_dim, n_rot, interleaved = shape
    rope = Rope(1e4, interleaved=interleaved, n_rot=n_rot)
    table = RopeTable(rope, head_dim, at + 1)
    table.ensure(at + 1)
    half = head_dim // 2
    cos, sin = table.values[at, :half], table.values[at, half:]
    x = np.random.default_rng(0).standard_normal(head_dim)
    stored = x[order(rope, head_dim)]
    a, b = stored[:half], stored[half:]
    turned = np.concatenate([a * cos - b * sin, b * cos + a * sin])
    back = np.empty(head_dim)
    back[order(rope, head_dim)] = turned
    wanted = x.copy()
    step = np.arange(n_rot // 2)
    first, second = (2 * step, 2 * step + 1) if interleaved else (step, step + n_rot // 2)
    angle = at * 1e4 ** (-2 * step / n_rot)
    wanted[first] = x[first] * np.cos(angle) - x[second] * np.sin(angle)
    wanted[second] = x[second] * np.cos(angle) + x[first] * np.sin(angle)
    assert np.allclose(back, wanted, atol=1e-6)


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("name", FIXTURES)
def test_tables_are_the_oracles_rotation(name: str, local: bool) -> None:
    c, oracle = config(name), Oracle(fixture_path(name))
    if local and not c.local_rope:
        pytest.skip("all layers turn alike")
    rope = c.local_rope if local and c.local_rope else c.rope
    factors = None
    if "rope_freqs.weight" in oracle.tensors and not local:
        factors = oracle.weight("rope_freqs.weight")
    table = RopeTable(rope, c.head_dim, c.n_ctx, factors)
    table.ensure(c.n_ctx)
    positions = np.array([0, 1, 7, c.n_ctx // 2, c.n_ctx - 1])
    cos, sin = oracle.rotation(positions, local=local)
    half, pairs = c.head_dim // 2, rope.n_rot // 2
    assert np.allclose(table.values[positions, :pairs], cos[:, 0], atol=1e-6)
    assert np.allclose(table.values[positions, half : half + pairs], sin[:, 0], atol=1e-6)
    assert (table.values[:, pairs:half] == 1).all()
    assert (table.values[:, half + pairs :] == 0).all()


def test_a_table_filled_in_pieces_is_one_filled_at_once() -> None:
    rope = Rope(1e6, n_rot=64)
    pieces, whole = RopeTable(rope, 64, 5000), RopeTable(rope, 64, 5000)
    whole.ensure(5000)
    for n in (1, 1, 100, 1025, 1024, 4000, 5000, 3):
        pieces.ensure(n)
        assert np.array_equal(pieces.values[:n], whole.values[:n])
    assert np.array_equal(pieces.values, whole.values)


def test_linear_scaling_divides_all_frequencies() -> None:
    plain, _ = frequencies(Rope(1e4, n_rot=64))
    scaled, magnitude = frequencies(Rope(1e4, "linear", 4.0, n_rot=64))
    assert np.allclose(scaled, plain / 4)
    assert magnitude == 1.0


def test_yarn_keeps_fast_pairs_and_interpolates_slow_ones() -> None:
    plain, _ = frequencies(Rope(1e6, n_rot=128))
    scaled, magnitude = frequencies(Rope(1e6, "yarn", 4.0, n_ctx=32768, n_rot=128))
    assert scaled[0] == plain[0]
    assert scaled[-1] == pytest.approx(plain[-1] / 4)
    assert (np.diff(scaled / plain) <= 1e-12).all()
    assert magnitude == pytest.approx(1 + 0.1 * np.log(4.0))
