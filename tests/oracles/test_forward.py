"""The oracle is itself held against transformers, whose logits the fixtures carry."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from tests.fixtures import FIXTURES, expected, fixture_path
from tests.oracles import gguf_files
from tests.oracles.forward import Cache, Oracle, losses, round_to_int8, top_two
from tests.oracles.quantize import decode, encode

ROUNDING = {"Q4_0": 0.09, "Q4_1": 0.08, "Q5_0": 0.045, "Q5_1": 0.04, "Q8_0": 0.006} | {
    "Q4_K": 0.08,
    "Q5_K": 0.04,
    "Q6_K": 0.02,
}


@pytest.mark.parametrize("name", FIXTURES)
def test_the_oracle_computes_the_logits_of_transformers(name: str) -> None:
    tokens, logits = expected(name)
    ours = Oracle(fixture_path(name)).logits(tokens)
    assert np.abs(ours - logits).max() < 2e-5 * max(1.0, float(logits.std()))


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3moe"])
def test_stepping_several_sequences_equals_reading_each_at_once(name: str) -> None:
    tokens, logits = expected(name)
    oracle = Oracle(fixture_path(name), keep_weights=False)
    first, second = Cache(), Cache()
    oracle.forward([(first, tokens[:40])])
    rows = [
        oracle.forward([(first, tokens[40 + i : 41 + i]), (second, tokens[i : i + 1])]) for i in range(30)
    ]
    np.testing.assert_allclose(np.concatenate([a for a, _ in rows]), logits[40:70], atol=1e-4)
    np.testing.assert_allclose(np.concatenate([b for _, b in rows]), logits[:30], atol=1e-4)


@pytest.mark.parametrize("type_name", ROUNDING)
def test_the_encoders_write_blocks_that_mean_nearly_what_they_were_given(type_name: str) -> None:
    x = np.random.default_rng(0).standard_normal((6, 512), dtype=np.float32)
    back = decode(encode(x, type_name), gguf.GGMLQuantizationType[type_name])
    assert np.sqrt(np.mean((back - x) ** 2)) < ROUNDING[type_name]


def test_a_retyped_copy_keeps_metadata_and_falls_back_where_rows_are_short(tmp_path: Path) -> None:
    target = tmp_path / "copy.gguf"
    gguf_files.retype(fixture_path("llama"), target, lambda name: "Q4_K")
    oracle = Oracle(target)
    assert oracle.config == Oracle(fixture_path("llama")).config
    assert oracle.tensors["blk.0.attn_q.weight"].tensor_type.name == "Q8_0"  # 64 is no multiple of 256


def test_the_greedy_run_reports_runner_up_and_gap() -> None:
    tokens, logits = expected("qwen2")
    run = Oracle(fixture_path("qwen2")).greedy([tokens[:50]], 1)[0]
    first, second = top_two(logits[49])
    assert (run.tokens, run.seconds) == ([first], [second])
    assert run.gaps[0] == pytest.approx(float(logits[49, first] - logits[49, second]), abs=1e-3)


def test_losses_are_negative_log_probabilities_of_the_next_tokens() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8], [1, 1, 1]]))
    np.testing.assert_allclose(losses(logits, [0, 1, 2]), -np.log([0.25, 0.8]))


def test_rounding_to_int8_moves_a_value_by_at_most_half_a_step() -> None:
    x = np.random.default_rng(1).standard_normal((4, 64), dtype=np.float32)
    step = np.abs(x.reshape(4, 2, 32)).max(axis=2, keepdims=True) / 127
    moved = np.abs(round_to_int8(x) - x).reshape(4, 2, 32)
    assert np.all(moved <= step * 0.501)
    assert not round_to_int8(np.zeros((1, 32), np.float32)).any()
