"""Damaged and hostile files: wholly readable, or refused by file and field; quickly, in little memory."""

from __future__ import annotations

import resource
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.checkpoints.writing import small_model

from chabok.checkpoints.gguf import GGUF, StringArray, Value
from chabok.errors import CheckpointError

HOSTILE = [
    0,
    1,
    2,
    7,
    0xFF,
    1 << 16,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 40,
    1 << 62,
    1 << 63,
    (1 << 64) - 1,
]


def mutations(content: bytes, n: int, seed: int) -> Iterator[bytes]:
    rng = np.random.default_rng(seed)
    for i in range(n):
        changed = bytearray(content)
        kind = i % 6
        at = int(rng.integers(4, len(content)))
        if kind == 0:
            del changed[at:]
        elif kind == 1:
            for _ in range(int(rng.integers(1, 5))):
                changed[int(rng.integers(0, len(changed)))] ^= 1 << int(rng.integers(0, 8))
        elif kind == 2:  # any aligned or unaligned field as a 64-bit number
            changed[at : at + 8] = struct.pack("<Q", HOSTILE[int(rng.integers(len(HOSTILE)))])
        elif kind == 3:
            changed[at : at + 4] = struct.pack("<I", HOSTILE[int(rng.integers(len(HOSTILE)))] & 0xFFFFFFFF)
        elif kind == 4:  # one piece of the file over another
            length = int(rng.integers(1, 64))
            source = int(rng.integers(0, len(content)))
            changed[at : at + length] = content[source : source + length]
        else:  # bytes lost or added: everything after moves
            if rng.integers(2):
                del changed[at : at + int(rng.integers(1, 16))]
            else:
                changed[at:at] = rng.integers(0, 256, int(rng.integers(1, 16)), np.uint8).tobytes()
        yield bytes(changed)


def read_value(value: Value) -> None:
    if isinstance(value, StringArray):
        value.tolist()
    elif isinstance(value, np.ndarray):
        value.sum()
    elif isinstance(value, list):
        for item in value:
            read_value(item)


def read_everything(model: GGUF) -> None:
    for value in model.metadata.values():
        try:
            read_value(value)
        except CheckpointError as error:
            check_message(str(error), model.path)
    for tensor in model.tensors.values():
        try:
            int(tensor.data.sum())
        except CheckpointError as error:
            check_message(str(error), model.path)
    assert len(model.fingerprint) == 32
    model.type_histogram()


def check_message(message: str, path: Path) -> None:
    file, _, rest = message.partition(".gguf: ")
    assert file + ".gguf" == str(path)
    assert rest.startswith(
        ("field '", "tensor '", "name of tensor ", "metadata ", "tensor count", "version", "magic")
    )


def fuzz(folder: Path, n: int, seed: int) -> tuple[int, int]:
    opened = refused = 0
    path = folder / "fuzzed.gguf"
    slowest = 0.0
    for content in mutations(small_model(seed), n, seed):
        path.unlink(missing_ok=True)  # a new file: the old one may still be mapped
        path.write_bytes(content)
        start = time.process_time()  # not by the clock: other programs may be busy
        try:
            read_everything(GGUF.open(path))
            opened += 1
        except CheckpointError as error:
            check_message(str(error), path)
            refused += 1
        slowest = max(slowest, time.process_time() - start)
    assert slowest < 2, f"{slowest:.1f} s for one file"
    return opened, refused


def test_damaged_files_are_read_or_refused(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    opened, refused = fuzz(tmp_path, 600, seed=1)
    assert opened > 50
    assert refused > 200
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB


def test_every_truncation_is_read_or_refused(tmp_path: Path) -> None:
    content = small_model()
    path = tmp_path / "cut.gguf"
    for end in range(0, len(content), 7):
        path.unlink(missing_ok=True)
        path.write_bytes(content[:end])
        with pytest.raises(CheckpointError) as caught:
            GGUF.open(path)
        check_message(str(caught.value), path)


@pytest.mark.wide
@pytest.mark.parametrize("seed", range(2, 6))
def test_many_damaged_files_are_read_or_refused(tmp_path: Path, seed: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    opened, refused = fuzz(tmp_path, 3_000, seed)
    assert opened + refused == 3_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000
