"""What a machine can reach: shapes, ceilings, what-ifs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chabok.checkpoints import catalog
from chabok.choose.roofline import Machine, WhatIf, above, predict, survey, what_if
from chabok.choose.shapes import Shape, of_catalogue, of_file, published
from chabok.cli.roofline import main
from chabok.errors import RequestError

FIXTURES = Path(__file__).parents[1] / "fixtures"
MACHINE = Machine(70e9, 1.03e12, 2, "avx512")
RATES = st.floats(1e9, 1e12)


def shape(name: str) -> Shape:
    found = of_catalogue(name)
    assert found is not None
    return found


@pytest.mark.parametrize("name", published())
def test_published_shapes_add_up_to_the_size_of_the_catalogues_file(name: str) -> None:
    entry = catalog.find(name)
    assert entry is not None
    assert shape(name).file_bytes == pytest.approx(entry.bytes, rel=0.03)


def test_every_model_of_the_catalogue_has_a_shape() -> None:
    assert {entry.name for entry in catalog.entries()} == set(published())


@pytest.mark.parametrize("fixture", ["llama", "qwen3moe", "gemma3", "qwen2"])
def test_the_shape_of_a_file_is_that_of_its_tensors(fixture: str) -> None:
    from chabok.checkpoints.gguf import GGUF

    path = FIXTURES / f"{fixture}.gguf"
    found = of_file(path)
    matrices = [t for t in GGUF.open(path).tensors.values() if len(t.shape) > 1]
    assert found.file_bytes == sum(t.n_bytes for t in matrices)
    assert not found.derived


@given(RATES, RATES, st.sampled_from(published()), st.integers(1, 32), st.integers(1, 8192))
def test_what_is_attainable_is_below_the_ceiling(
    bandwidth: float, peak: float, name: str, batch: int, context: int
) -> None:
    found = predict(shape(name), Machine(bandwidth, peak), context=context, batch=batch, prompt=context)
    for phase in (found.generation, found.prefill):
        assert 0 < phase.attainable < phase.ceiling


@given(st.floats(1, 10), st.floats(1, 10), st.sampled_from(published()))
def test_a_faster_machine_is_never_slower(bandwidth: float, compute: float, name: str) -> None:
    before, after = predict(shape(name), MACHINE), predict(shape(name), MACHINE.with_(bandwidth, compute))
    assert after.generation.attainable >= before.generation.attainable * (1 - 1e-9)
    assert after.first_token_s <= before.first_token_s * (1 + 1e-9)
    assert after.generation.ceiling <= before.generation.ceiling * max(bandwidth, compute) * (1 + 1e-9)


def test_twice_the_bandwidth_is_twice_the_ceiling_of_generation() -> None:
    base = predict(shape("llama3.1:8b"), MACHINE)
    doubled = what_if(shape("llama3.1:8b"), MACHINE, WhatIf.of("bandwidth=2x"))
    assert doubled.generation.ceiling == pytest.approx(2 * base.generation.ceiling)
    assert doubled.prefill.ceiling == base.prefill.ceiling
    assert "bandwidth=2x" in doubled._repr_html_()


def test_a_mixture_of_experts_outruns_a_dense_model_of_its_size() -> None:
    mixed = shape("qwen3:30b-a3b")
    base, dense = predict(mixed, MACHINE), what_if(mixed, MACHINE, WhatIf.of("dense"))
    assert base.generation.attainable > 5 * dense.generation.attainable
    assert dense.memory == pytest.approx(base.memory, rel=0.01)
    # In a large batch nearly all experts are read in any case.
    many = predict(mixed, MACHINE, batch=64)
    assert many.generation.n_bytes * 64 > 0.9 * mixed.file_bytes * 0.97


def test_other_quantizations_read_other_bytes() -> None:
    model = shape("llama3.2:1b")
    four, eight = (predict(model.quantized(kind), MACHINE) for kind in ("q4_k_m", "q8_0"))
    assert four.generation.n_bytes == pytest.approx(predict(model, MACHINE).generation.n_bytes, rel=1e-6)
    assert 1.5 < eight.generation.n_bytes / four.generation.n_bytes < 2
    assert eight.generation.ceiling < four.generation.ceiling


def test_a_window_bounds_what_a_token_looks_at() -> None:
    model = shape("gemma3:1b")
    assert model.seen(100) == 26 * 100
    assert model.seen(10_000) == 4 * 10_000 + 22 * 512


@pytest.mark.parametrize(
    "text", ["bandwith=2x", "q9_9", "compute=-1", "batch=", "context=nan", "compute=infx"]
)
def test_a_what_if_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(RequestError):
        WhatIf.of(text)


def test_a_catalogue_is_surveyed_by_speed_and_first_token() -> None:
    found = survey(Machine(70e9, 1.03e12, 2, "avx512", memory=16 << 30))
    speeds = [each.generation.attainable for each in found]
    assert speeds == sorted(speeds, reverse=True)
    fast = [each.model for each in above(found, 100, 0.5)]
    assert "smollm2" in fast
    assert "llama3.1:8b" not in fast
    assert not next(each for each in found if each.model == "llama3.3:70b").fits


def test_the_command_tells_of_another_machine_without_measuring(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["qwen3:8b", "--bandwidth", "70", "--compute", "1000", "--what-if", "q8_0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["label"] for each in found["predictions"]] == ["", "q8_0"]
    assert main(["--bandwidth", "70", "--compute", "1000"]) == 0
    assert "above 100 tok/s" in capsys.readouterr().out
    assert main([str(FIXTURES / "llama.gguf"), "--bandwidth", "70", "--compute", "1000"]) == 0
    assert "ceiling" in capsys.readouterr().out


def test_a_model_here_is_measured_within_its_context(capsys: pytest.CaptureFixture[str]) -> None:
    model = str(FIXTURES / "llama.gguf")
    with pytest.raises(RequestError, match="context is 512"):
        main([model])
    assert main([model, "--context", "64", "--prompt", "64", "--threads", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["reached"]["tokens_per_s"] == found["predictions"][0]["generation"]["reached"] > 0
    assert found["machine"]["bandwidth"] > 1e6


@pytest.mark.wide
def test_predictions_are_within_15_percent_of_what_was_recorded() -> None:
    from tests.models import model_path

    rows = json.loads((Path(__file__).parents[2] / "benchmarks" / "peers.json").read_text())
    reads = {
        (row["model"], row["isa"]): row["read_gb_per_s"] * 1e9 for row in rows if row.get("read_gb_per_s")
    }
    peaks = {"avx512": 1.03e12, "avx2": 0.273e12}  # of that machine
    checked = 0
    for row in rows:
        if row["model"] == "moe":
            continue
        machine = Machine(reads[row["model"], row["isa"]], peaks[row["isa"]], 2, row["isa"])
        batch = 32 if row["phase"] == "batch32" else 1
        found = predict(of_file(model_path(row["model"])), machine, context=80, batch=batch, prompt=512)
        phase = found.prefill if row["phase"] == "prefill" else found.generation
        assert phase.attainable == pytest.approx(row["ours"], rel=0.15), row["model"]
        checked += 1
    assert checked >= 8
