"""Models on tiny files of each family: the logits of transformers, however the tokens are fed.

Two kinds of agreement are asked. With the expected logits, up to what 16-bit keys and values and (for
quantized weights) 8-bit activations may move them. And to the bit between ways of feeding the same tokens: at
once, in chunks, one by one, alone or beside other sequences, on any pages, with any number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from benchmarks.moe_file import write_moe
from numpy.typing import NDArray
from tests.fixtures import FIXTURES, expected, fixture_path
from tests.oracles.forward import Oracle
from tests.oracles.gguf_files import retype

from chabok import models
from chabok.checkpoints.gguf import GGUF
from chabok.compute import isa
from chabok.models.batch import Model, Segment

Array = NDArray[np.float32]
N_PAGES = 24
FLOAT_ERROR = 3e-3  # relative: keys and values have 16 bits
INT8_ERROR = 4e-2  # relative: quantized weights meet activations of 8 bits

LoadModel = Callable[..., Model]


@pytest.fixture
def load() -> Iterator[LoadModel]:
    """Loads models with a small page pool and closes them in the end."""
    opened: list[Model] = []

    def load_path(path: Path, threads: int = 1) -> Model:
        model = models.load(GGUF.open(path), threads=threads, pack=None, max_rows=128)
        opened.append(model)
        model.new_cache(N_PAGES)
        return model

    yield load_path
    for model in opened:
        model.close()


class Reader:
    """One sequence's pages and how far it has been read."""

    def __init__(self, pages: Sequence[int]) -> None:
        self.pages = np.array(pages, dtype=np.int32)
        self.start = 0

    def take(self, tokens: NDArray[np.int32], outputs: int | None = None) -> Segment:
        segment = Segment(self.pages, self.start, tokens, len(tokens) if outputs is None else outputs)
        self.start += len(tokens)
        return segment


def feed(
    model: Model, tokens: NDArray[np.int32], chunks: Sequence[int], pages: Sequence[int] = (0, 1)
) -> Array:
    """Logits of all positions, the tokens fed in chunks of these sizes (the last one repeated)."""
    sequence, rows, sizes = Reader(pages), [], list(chunks)
    while sequence.start < len(tokens):
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        part = tokens[sequence.start : sequence.start + size]
        rows.append(model.forward([sequence.take(part)]).values.copy())
    return np.concatenate(rows)


def error(ours: Array, wanted: Array) -> float:
    """Root-mean-square difference relative to the spread of the logits."""
    return float(np.sqrt(np.mean((ours - wanted) ** 2)) / wanted.std())


def row_errors(ours: Array, wanted: Array) -> Array:
    """The same per row."""
    return np.sqrt(np.mean((ours - wanted) ** 2, axis=1)) / wanted.std()


def rounding_alone(path: Path, tokens: NDArray[np.int32]) -> float:
    """The typical row error of the oracle when it rounds activations as the kernels do (float weights: 0)."""
    rounded = Oracle(path, round_activations=True).logits(tokens)
    return float(np.median(row_errors(rounded, Oracle(path).logits(tokens))))


def same_bits(a: Array, b: Array) -> bool:
    return a.shape == b.shape and np.array_equal(a.view(np.uint32), b.view(np.uint32))


def tolerance(name: str) -> float:
    return INT8_ERROR if name == "llama-k" else FLOAT_ERROR


@pytest.mark.parametrize("instructions", [one.name for one in isa.available()])
@pytest.mark.parametrize("name", FIXTURES)
def test_a_prompt_read_at_once_gives_the_logits_of_transformers(
    name: str, instructions: str, load: LoadModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHABOK_ISA", instructions)
    tokens, logits = expected(name)
    assert error(feed(load(fixture_path(name)), tokens, [100]), logits) < tolerance(name)


@pytest.mark.parametrize("instructions", [one.name for one in isa.available()])
@pytest.mark.parametrize("name", FIXTURES)
def test_tokens_decoded_one_by_one_give_the_logits_of_transformers(
    name: str, instructions: str, load: LoadModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHABOK_ISA", instructions)
    tokens, logits = expected(name)
    assert error(feed(load(fixture_path(name)), tokens, [1]), logits) < tolerance(name)


@pytest.mark.parametrize("chunks", [[1], [7, 1, 13, 29], [63, 2, 17], [64], [99, 1]], ids=str)
@pytest.mark.parametrize("name", FIXTURES)
def test_the_size_of_chunks_does_not_change_a_bit(name: str, chunks: list[int], load: LoadModel) -> None:
    tokens, _ = expected(name)
    model = load(fixture_path(name))
    assert same_bits(feed(model, tokens, chunks, pages=(3, 2)), feed(model, tokens, [100], pages=(0, 1)))


@pytest.mark.parametrize("name", FIXTURES)
def test_other_sequences_in_the_batch_do_not_change_a_bit(name: str, load: LoadModel) -> None:
    tokens, _ = expected(name)
    model = load(fixture_path(name))
    streams = [tokens, tokens[::-1].copy(), np.roll(tokens, 31)]
    alone = [feed(model, stream, [100]) for stream in streams]
    sequences = [Reader([4, 9]), Reader([8, 5]), Reader([7, 6])]
    rows: list[list[Array]] = [[], [], []]
    rng = np.random.default_rng(0)
    while any(sequence.start < 100 for sequence in sequences):
        batch, who = [], []
        for i in rng.permutation(3):
            size = int(rng.choice([0, 1, 1, 2, 5, 17, 33]))
            part = streams[i][sequences[i].start : sequences[i].start + size]
            if len(part):
                batch.append(sequences[i].take(part))
                who.append((i, len(part)))
        values = model.forward(batch).values if batch else np.empty((0, 0), np.float32)
        for (i, size), end in zip(who, np.cumsum([size for _, size in who])):
            rows[i].append(values[end - size : end].copy())
    for mixed, single in zip(rows, alone):
        assert same_bits(np.concatenate(mixed), single)


@pytest.mark.parametrize("name", ["llama", "llama-k", "qwen3moe", "gemma3"])
def test_the_number_of_threads_does_not_change_a_bit(name: str, load: LoadModel) -> None:
    tokens, _ = expected(name)
    one, two = (feed(load(fixture_path(name), threads=n), tokens, [57, 1]) for n in (1, 2))
    assert same_bits(one, two)


@pytest.mark.parametrize("name", ["llama3-scaled", "gemma3"])
def test_a_page_used_before_leaves_no_trace(name: str, load: LoadModel) -> None:
    tokens, _ = expected(name)
    model = load(fixture_path(name))
    fresh = feed(model, tokens, [100], pages=(10, 11))
    feed(model, tokens[::-1].copy(), [100], pages=(12, 13))
    assert same_bits(feed(model, tokens, [40, 1], pages=(13, 12)), fresh)


def test_only_the_rows_asked_for_come_out(load: LoadModel) -> None:
    tokens, _ = expected("qwen2")
    model = load(fixture_path("qwen2"))
    every = feed(model, tokens, [100])
    a, b, c = Reader([2, 3]), Reader([4, 5]), Reader([6, 7])
    batch = [a.take(tokens[:70], outputs=3), b.take(tokens[:20], outputs=0), c.take(tokens[:5], outputs=1)]
    logits = model.forward(batch)
    assert len(logits) == 4
    assert same_bits(logits.values, np.concatenate([every[67:70], every[4:5]]))


def test_what_the_logits_say_of_themselves_is_what_numpy_finds(load: LoadModel) -> None:
    tokens, _ = expected("llama")
    logits = load(fixture_path("llama")).forward([Reader([0, 1]).take(tokens)])
    values = logits.values.astype(np.float64)
    for row in range(len(tokens)):
        assert logits.argmax(row) == values[row].argmax()
        ids, best = logits.top(row, 10)
        assert list(ids) == list(np.argsort(-values[row], kind="stable")[:10])
        assert same_bits(best, logits.values[row, ids])
        assert logits.log_sum_exp(row) == pytest.approx(float(np.log(np.exp(values[row]).sum())), abs=1e-4)


def test_an_edited_row_is_asked_again(load: LoadModel) -> None:
    tokens, _ = expected("llama")
    logits = load(fixture_path("llama")).forward([Reader([0, 1]).take(tokens[:3])])
    logits.values[1, 200] = 50.0
    logits.changed(1)
    assert logits.argmax(1) == 200
    assert logits.log_sum_exp(1) == pytest.approx(50.0, abs=1e-3)


LEGACY = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
K_TYPES = ["Q4_K", "Q5_K", "Q6_K"]


@pytest.mark.parametrize("instructions", [one.name for one in isa.available()])
@pytest.mark.parametrize(
    ("name", "type_name"),
    [
        *[("llama", one) for one in [*LEGACY, "F16", "BF16"]],
        *[("llama-k", one) for one in [*K_TYPES, *LEGACY]],
        *[(name, one) for name in ("qwen2", "qwen3", "gemma3") for one in ("Q4_0", "Q5_1", "Q8_0", "F32")],
    ],
)
def test_every_weight_type_gives_what_the_oracle_computes_of_it(
    name: str,
    type_name: str,
    instructions: str,
    load: LoadModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CHABOK_ISA", instructions)
    path = tmp_path / "retyped.gguf"
    retype(fixture_path(name), path, lambda tensor: type_name)
    tokens, _ = expected(name)
    ours = feed(load(path), tokens, [90, 1])
    assert error(ours, Oracle(path).logits(tokens)) < FLOAT_ERROR + 1.25 * rounding_alone(path, tokens)


@pytest.mark.parametrize("type_name", ["Q4_0", "Q8_0", "Q4_K", "Q6_K", "BF16"])
def test_experts_of_every_weight_type_give_what_the_oracle_computes(
    type_name: str, load: LoadModel, tmp_path: Path
) -> None:
    path = tmp_path / "moe.gguf"
    write_moe(
        path,
        dim=256,
        n_layers=1,
        n_heads=4,
        n_kv_heads=2,
        head_dim=64,
        expert_ff=256,
        n_experts=8,
        n_used=2,
        vocabulary=300,
        types=(type_name, type_name, type_name),
    )
    tokens = np.random.default_rng(5).integers(0, 256, 100, dtype=np.int32)
    model = load(path)
    ours = feed(model, tokens, [100])
    # Where two experts score almost alike, rounding may choose the other one: a few rows may differ at large.
    # (With more layers those rows would reach all later ones, through their keys.)
    typical = float(np.median(row_errors(ours, Oracle(path).logits(tokens))))
    assert typical < FLOAT_ERROR + 1.25 * rounding_alone(path, tokens)
    assert same_bits(ours, feed(model, tokens, [1, 30, 1], pages=(2, 3)))
