"""What ``forward`` takes and refuses, and long contexts read in whatever pieces."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fixtures import fixture_path
from tests.models.variants import variant

from chabok import models
from chabok.checkpoints.gguf import GGUF
from chabok.models.batch import PAGE_TOKENS, Segment
from chabok.models.transformer import Transformer

PAGES = np.arange(4, dtype=np.int32)


@pytest.fixture(scope="module")
def model() -> Iterator[Transformer]:
    loaded = models.load(GGUF.open(fixture_path("llama")), threads=1, max_rows=128)
    loaded.new_cache(4)
    yield loaded
    loaded.close()


def pages(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


REFUSED: dict[str, Any] = {
    "no rows": lambda m: [Segment(PAGES, 0, [])],
    "more rows than pages": lambda m: [Segment(pages(0), 60, [1] * 5)],
    "a start beyond the pages": lambda m: [Segment(pages(0), PAGE_TOKENS, [1])],
    "no pages": lambda m: [Segment(pages(), 0, [1])],
    "a page that is not there": lambda m: [Segment(pages(4), 0, [1])],
    "a negative page": lambda m: [Segment(pages(-1), 0, [1])],
    "too many rows": lambda m: [Segment(PAGES, 0, [1] * 129)],
    "too many rows together": lambda m: [Segment(pages(0), 0, [1] * 64), Segment(pages(1, 2), 0, [1] * 65)],
    "more than the context": lambda m: [Segment(np.zeros(10**4, np.int32), m.n_ctx_train, [1])],
}


@pytest.mark.parametrize("what", list(REFUSED))
def test_a_segment_that_cannot_be_is_a_value_error(what: str, model: Transformer) -> None:
    with pytest.raises(ValueError):
        model.forward(REFUSED[what](model))


def test_a_refused_batch_does_no_harm_to_the_next(model: Transformer) -> None:
    good = [Segment(PAGES, 0, [5, 6, 7], 3)]
    before = model.forward(good).values.copy()
    with pytest.raises(ValueError):
        model.forward([Segment(PAGES, 0, [1]), Segment(PAGES, 0, [])])
    assert np.array_equal(model.forward(good).values, before)


UNCHECKED = {
    "token below": "Segment(pages, 0, [-1])",
    "token beyond": "Segment(pages, 0, [1 << 30])",
    "start below": "Segment(pages, -1, [1])",
    "an earlier page that is not there": "Segment(np.array([9, 0], np.int32), 64, [1])",
    "outputs below": "Segment(pages, 0, [1, 2], -1)",
}
TRY = """
import sys
import numpy as np
from chabok import models
from chabok.checkpoints.gguf import GGUF
from chabok.models.batch import Segment
model = models.load(GGUF.open(sys.argv[1]), threads=1, max_rows=128)
model.new_cache(4)
pages = np.arange(4, dtype=np.int32)
try:
    model.forward([{segment}])
except ValueError:
    print("refused")
"""


@pytest.mark.parametrize("what", list(UNCHECKED))
def test_numbers_outside_their_range_are_a_value_error(what: str) -> None:
    code = TRY.format(segment=UNCHECKED[what])
    done = subprocess.run(
        [sys.executable, "-c", code, str(fixture_path("llama"))], capture_output=True, text=True
    )
    assert done.stdout.strip() == "refused"


def test_without_a_cache_nothing_runs() -> None:
    model = models.load(GGUF.open(fixture_path("qwen2")), threads=1, max_rows=8)
    try:
        with pytest.raises(ValueError, match="new_cache"):
            model.forward([Segment(PAGES, 0, [1])])
    finally:
        model.close()


def test_more_outputs_than_rows_are_all_rows(model: Transformer) -> None:
    assert len(model.forward([Segment(PAGES, 0, [1, 2, 3], 99)])) == 3


def test_pages_have_the_size_that_is_stated_and_read_as_zero(model: Transformer) -> None:
    model.new_cache(4)
    assert model.page(3).size == model.page_bytes
    assert not any(model.page(i).any() for i in range(4))
    model.forward([Segment(pages(2), 0, [1])])
    assert model.page(2).any()
    assert not any(model.page(i).any() for i in (0, 1, 3))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("threads", [1, 2])
def test_long_contexts_do_not_depend_to_the_bit_on_how_they_are_read(
    name: str, threads: int, tmp_path: Path
) -> None:
    """Decoding shares a long sequence's keys out between threads; a chunk of a prompt does not."""
    gguf = variant(tmp_path, name, {"*.context_length": 2048})
    model = models.load(gguf, threads=threads, max_rows=256)
    try:
        model.new_cache(48)
        n = 1100
        tokens = np.random.default_rng(0).integers(0, 256, n, dtype=np.int32)
        one, two = np.arange(24, dtype=np.int32), np.arange(47, 23, -1, dtype=np.int32)

        def read(where: np.ndarray, start: int, stop: int, step: int, outputs: int) -> list[np.ndarray]:
            rows = []
            for at in range(start, stop, step):
                part = tokens[at : min(at + step, stop)]
                rows.append(model.forward([Segment(where, at, part, min(outputs, len(part)))]).values.copy())
            return rows

        read(one, 0, 1000, 250, 0)
        chunked = np.concatenate(read(one, 1000, n, 33, 33))
        read(two, 0, 1000, 128, 0)
        single = np.concatenate(read(two, 1000, n, 1, 1))
        assert chunked.tobytes() == single.tobytes()
        crowd = [Segment(two, n - 1, tokens[n - 1 :], 1)] + [
            Segment(one, at, tokens[at : at + 1], 1) for at in (600, 700, 1050, 1090)
        ]
        assert model.forward(crowd).values[0].tobytes() == single[-1].tobytes()
    finally:
        model.close()
