"""Programs: what they take, what they refuse, and that threads do not change what they compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.compute.harness import NOTHING, Machine, count, place, same_bits

from chabok.compute.kernels.quantize import Quantize
from chabok.compute.kernels.rows import AddNorm, Gather
from chabok.compute.program import Program


def gather(**changes: Any) -> dict[str, Any]:
    x, out = place(np.ones((4, 16), np.float32)), place(np.zeros((4, 16), np.float32))
    operands = {"rows": count(4), "index": place(np.arange(4)), "x": x, "x_stride": 64, "k": 16, "out": out,
                "out_stride": 64}  # fmt: skip
    return {name: value for name, value in {**operands, **changes}.items() if value is not None}


@pytest.mark.parametrize("changes", [{"x": None}, {"extra": 1}, {"x": None, "y": 1}, {"counter": 0}], ids=str)
def test_operands_that_do_not_fit_are_a_type_error_naming_the_kernel(changes: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="gather takes"):
        Program().step(Gather(), **gather(**changes))


def test_a_program_without_steps_is_refused(best: Machine) -> None:
    with pytest.raises(ValueError, match="needs a step"):
        Program().seal(best.library)


def test_operands_are_kept_alive_by_the_program(best: Machine) -> None:
    program = Program()
    operands = gather()
    out = operands["out"]
    program.step(Gather(), **operands)
    del operands
    program.seal(best.library)
    junk = [np.full((4, 16), -1.0, np.float32) for _ in range(1000)]
    best.pool(1).run(program)
    assert (out == 1).all()
    assert len(junk) == 1000


def test_views_stand_for_their_own_address(best: Machine) -> None:
    x, out = np.arange(96, dtype=np.float32).reshape(2, 48), np.zeros((2, 16), np.float32)
    program = Program()
    program.step(
        Gather(), rows=count(2), index=place(np.array([1, 0])), x=x[:, 16:], x_stride=x.strides[0], k=16,
        out=out, out_stride=64,
    )  # fmt: skip
    program.seal(best.library)
    best.pool(1).run(program)
    assert np.array_equal(out, x[::-1, 16:32])


def chain(machine: Machine, threads: int, rows: int) -> Any:
    """Norms, sums and roundings, one after another, with and without a barrier between them."""
    rng = np.random.default_rng(0)
    x, y = (place(rng.standard_normal((rows, 64), dtype=np.float32)) for _ in range(2))
    norm, n = place(rng.standard_normal(64, dtype=np.float32)), count(rows)
    lines, floats = place(np.zeros((rows, 128), np.uint8)), place(np.zeros((rows, 64), np.float32))
    program = Program()
    for _ in range(5):
        program.step(
            AddNorm(),
            rows=n,
            x=x,
            x_stride=256,
            x_private=0,
            y=y,
            y_stride=256,
            k=64,
            norm=norm,
            eps=1e-5,
        )
        program.step(
            Quantize(True), barrier=False, rows=n, x=x, x_stride=256, x_private=0, k=64, norm=norm, eps=1e-5,
            out=lines, out_stride=128, out_private=0, line_stride=0,
        )  # fmt: skip
        program.step(
            Quantize(False, to_bytes=False), rows=n, x=x, x_stride=256, x_private=0, k=64, norm=NOTHING,
            eps=0.0, out=floats, out_stride=256, out_private=0, line_stride=0,
        )  # fmt: skip
        program.step(
            AddNorm(), rows=n, x=y, x_stride=256, x_private=0, y=floats, y_stride=256, k=64,
            norm=norm, eps=0.0,
        )  # fmt: skip
    program.seal(machine.library)
    machine.pool(threads).run(program)
    return x.copy(), y.copy(), lines.copy()


@pytest.mark.parametrize("rows", [1, 3, 50])
def test_the_number_of_threads_does_not_change_a_bit(rows: int, best: Machine) -> None:
    wanted = chain(best, 1, rows)
    for threads in (2, 3, 4):
        assert all(same_bits(a, b) for a, b in zip(chain(best, threads, rows), wanted))


def test_the_number_of_rows_is_read_at_every_run(best: Machine) -> None:
    operands = gather()
    program = Program()
    program.step(Gather(), **operands)
    program.seal(best.library)
    for rows in (1, 3, 0, 4):
        operands["rows"][0] = rows
        operands["out"][:] = 0
        best.pool(2).run(program)
        assert operands["out"][:, 0].tolist() == [1.0] * rows + [0.0] * (4 - rows)


def test_each_step_with_a_counter_has_its_own(best: Machine) -> None:
    first, second = gather(), gather()
    program = Program()
    program.step(Gather(), barrier=False, **first)
    program.step(Gather(), **second)
    program.seal(best.library)
    best.pool(3).run(program)
    assert (first["out"] == 1).all()
    assert (second["out"] == 1).all()


def test_numbers_of_numpy_are_numbers(best: Machine) -> None:
    x = place(np.ones((1, 32), np.float32))
    out = place(np.zeros((1, 32), np.float32))
    norm = place(np.ones(32, np.float32))
    best.run(
        Quantize(True, to_bytes=False), rows=count(1), x=x, x_stride=np.int64(128), x_private=0,
        k=np.int32(32), norm=norm, eps=np.float32(3.0), out=out, out_stride=128, out_private=0,
        line_stride=0,
    )  # fmt: skip
    assert np.allclose(out, 0.5)
