"""Compiled kernels on disk: found again, checked, replaced when damaged, and never in the way."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from chabok.compute import isa
from chabok.compute.emit import I64, PTR, Module
from chabok.compute.isa import ISA
from chabok.compute.library import Library, compile_object, object_key


@dataclass(frozen=True)
class Answer:
    """Writes a number."""

    number: int

    @property
    def symbol(self) -> str:
        return f"answer_{self.number}"

    def emit(self, module: Module, isa: ISA) -> None:
        emitted.append(self)
        f = module.function(self.symbol, [("to", PTR)])
        f.args[0].store(f.const(self.number, I64))


emitted: list[Answer] = []
BEST = isa.available()[0]


@pytest.fixture(autouse=True)
def forget_emitted() -> None:
    emitted.clear()


def ask(address: int) -> int:
    out = np.zeros(1, np.int64)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(out.ctypes.data)
    return int(out[0])


def load(folder: Path | None, number: int = 42) -> int:
    library = Library(BEST, folder)
    return ask(library.load([Answer(number)])[Answer(number)])


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_a_compiled_kernel_is_found_without_emitting_it_again(tmp_path: Path) -> None:
    assert load(tmp_path) == 42
    assert emitted == [Answer(42)]
    assert load(tmp_path) == 42
    assert emitted == [Answer(42)]


def test_a_library_compiles_a_kernel_once_whatever_is_asked(tmp_path: Path) -> None:
    library = Library(BEST, tmp_path)
    first = library.load([Answer(1), Answer(2), Answer(1)])
    second = library.load([Answer(2), Answer(3)])
    assert second[Answer(2)] == first[Answer(2)]
    assert [ask(a) for a in (*first.values(), second[Answer(3)])] == [1, 2, 3]
    assert sorted(s.number for s in emitted) == [1, 2, 3]


def test_without_a_folder_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load(None) == load(None) == 42
    assert len(emitted) == 2
    assert not list(tmp_path.iterdir())


def flip(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize(
    "damage", ["emptied", "cut short", "first", "checksum", "middle", "last", "longer", "zeros"]
)
def test_a_damaged_object_is_compiled_anew_and_replaced(damage: str, tmp_path: Path) -> None:
    load(tmp_path)
    path = only_file(tmp_path)
    good = path.read_bytes()
    damaged = {
        "emptied": b"", "cut short": good[:-7], "first": flip(good, 0), "checksum": flip(good, 31),
        "middle": flip(good, len(good) // 2), "last": flip(good, len(good) - 1), "longer": good + b"\0",
        "zeros": bytes(len(good)),
    }[damage]  # fmt: skip
    path.write_bytes(damaged)
    emitted.clear()
    assert load(tmp_path) == 42
    assert emitted == [Answer(42)]
    assert only_file(tmp_path).read_bytes() == good


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    load(tmp_path)
    path = only_file(tmp_path)
    good = path.read_bytes()
    library = Library(BEST, tmp_path)
    for at in np.random.default_rng(0).integers(0, len(good), 200):
        path.write_bytes(flip(good, int(at)))
        assert library._read(Answer(42)) is None


def test_nothing_but_finished_objects_is_left_in_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "er"
    Library(BEST, folder).load([Answer(n) for n in range(8)])
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        f"{object_key(Answer(n), BEST)}.o" for n in range(8)
    )


def test_a_folder_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert load(tmp_path / "file" / "kernels") == 42


def test_a_full_disk_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert load(tmp_path) == 42
    assert not list(tmp_path.iterdir())


def test_a_folder_in_place_of_an_object_is_done_without(tmp_path: Path) -> None:
    (tmp_path / f"{object_key(Answer(42), BEST)}.o").mkdir()
    assert load(tmp_path) == 42


def test_keys_tell_instruction_sets_and_parameters_apart() -> None:
    keys = {object_key(Answer(n), one) for one in isa.ALL for n in (1, 2)}
    assert len(keys) == 2 * len(isa.ALL)
    assert object_key(Answer(1), BEST) == object_key(Answer(1), BEST)


def test_keys_tell_versions_of_the_compiler_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    import llvmlite

    before = object_key(Answer(1), BEST)
    monkeypatch.setattr(llvmlite, "__version__", "99.0")
    assert object_key(Answer(1), BEST) != before


def test_compiling_twice_gives_the_same_bytes() -> None:
    assert compile_object(Answer(5), BEST) == compile_object(Answer(5), BEST)


def test_threads_that_share_a_library_get_the_same_addresses(tmp_path: Path) -> None:
    library, specs = Library(BEST, tmp_path), [Answer(n) for n in range(6)]
    found: list[dict[Answer, int]] = [{} for _ in range(6)]

    def work(i: int) -> None:
        found[i] = library.load(specs[i:] + specs[:i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(one == found[0] for one in found)
    assert len(emitted) == 6


def test_libraries_in_many_threads_may_fill_one_folder(tmp_path: Path) -> None:
    answers: list[int] = []
    threads = [threading.Thread(target=lambda: answers.append(load(tmp_path, 7))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [7] * 6
    assert only_file(tmp_path)


LOAD_IN_A_PROCESS = """
import sys
from pathlib import Path
from chabok.compute import isa
from chabok.compute.kernels.rows import Gather
from chabok.compute.kernels.quantize import Quantize
from chabok.compute.library import Library
print(len(Library(isa.available()[0], Path(sys.argv[1])).load([Gather(), Quantize(True), Quantize(False)])))
"""


def test_processes_may_fill_one_folder_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOAD_IN_A_PROCESS, str(tmp_path)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate()[0].strip() for process in started] == ["3"] * 3
    assert len(list(tmp_path.iterdir())) == 3


class Told:
    """Notes what progress was told."""

    def __init__(self) -> None:
        self.log: list[object] = []

    def begin(self, what: str, total_bytes: int | None, unit: str = "bytes") -> None:
        self.log.append(total_bytes)

    def advance(self, n_bytes: int) -> None:
        self.log.append("+")

    def end(self) -> None:
        self.log.append("end")


def test_progress_is_told_of_each_kernel_compiled_and_of_none_found(tmp_path: Path) -> None:
    told = Told()
    Library(BEST, tmp_path, told).load([Answer(1), Answer(2)])
    assert told.log == [2, "+", "+", "end"]
    told.log.clear()
    Library(BEST, tmp_path, told).load([Answer(1), Answer(2)])
    assert told.log == []


@dataclass(frozen=True)
class Broken:
    """Writes IR that means nothing."""

    symbol = "broken"

    def emit(self, module: Module, isa: ISA) -> None:
        module.function(self.symbol, []).line("nonsense")


def test_a_kernel_that_does_not_compile_is_an_error_and_ends_the_progress(tmp_path: Path) -> None:
    told = Told()
    library = Library(BEST, tmp_path, told)
    with pytest.raises(RuntimeError, match="nonsense"):
        library.load([Broken()])
    assert told.log[-1] == "end"
    assert ask(library.load([Answer(3)])[Answer(3)]) == 3
