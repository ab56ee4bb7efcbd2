from __future__ import annotations

import errno
import json
import logging
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from tests.checkpoints.disks import disk, make_read_only
from tests.checkpoints.killing import forked, survives, wait

from chabok.checkpoints import packed
from chabok.checkpoints.packed import PackedEntry, PackedFile, PackedStore
from chabok.errors import ResourceError

SIZES = {"embedding": 10_000, "norm": 64, "empty": 0, "head": 4096, "last": 1}


def content(name: str, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, len(name)]).integers(0, 256, SIZES[name], np.uint8)


def entries(seed: int = 0) -> list[PackedEntry]:
    def fill(name: str) -> packed.Callable[[np.ndarray], None]:
        return lambda array: np.copyto(array, content(name, seed))

    return [PackedEntry(name, size, fill(name)) for name, size in SIZES.items()]


def whole(file: PackedFile | None, seed: int = 0) -> bool:
    assert file is not None
    assert list(file.arrays) == list(SIZES)
    return all(np.array_equal(array, content(name, seed)) for name, array in file.arrays.items())


class Watch:
    def __init__(self) -> None:
        self.stages: list[tuple[str, int | None]] = []
        self.done = 0
        self.messages: list[str] = []

    def begin(self, what: str, total_bytes: int | None, unit: str = "bytes") -> None:
        self.stages.append((what, total_bytes))

    def advance(self, n_bytes: int) -> None:
        self.done += n_bytes

    def end(self) -> None: ...

    def say(self, message: str) -> None:
        self.messages.append(message)


@pytest.fixture
def store(tmp_path: Path) -> PackedStore:
    return PackedStore(tmp_path / "packed", limit_bytes=1 << 30)


def test_what_is_packed_is_mapped_back(store: PackedStore) -> None:
    watch = Watch()
    assert store.open("model") is None
    made = store.create("model", entries(), {"layout": "avx2", "rows": [1, 2]}, watch)
    opened = store.open("model")
    assert whole(made)
    assert whole(opened)
    assert opened is not None
    assert opened.meta == {"layout": "avx2", "rows": [1, 2]}
    assert opened.n_bytes == sum(SIZES.values()) == watch.done
    assert watch.stages == [("Preparing weights", sum(SIZES.values()))]
    assert opened.verify() == []
    for array in opened.arrays.values():
        assert not array.flags.writeable or array.size == 0
        assert array.size == 0 or array.ctypes.data % 4096 == 0


def test_memory_holds_the_same(store: PackedStore) -> None:
    file = packed.in_memory(entries(), {"a": 1})
    assert whole(file)
    assert (file.path, file.meta, file.verify()) == (None, {"a": 1}, [])
    assert all(array.ctypes.data % 4096 == 0 for array in file.arrays.values() if array.size)
    assert whole(packed.load(None, "model", entries, {}))
    assert whole(packed.load(store, "model", entries, {}))
    assert whole(packed.load(store, "model", lambda: pytest.fail("packed twice"), {}))


def test_a_second_name_for_an_array_is_refused(store: PackedStore) -> None:
    with pytest.raises(ValueError, match="same name"):
        store.create("model", entries()[:1] * 2, {})
    assert store.open("model") is None


@pytest.mark.parametrize("key", ["", "..", "a/b", ".hidden", "x" * 200])
def test_keys_cannot_leave_the_folder(store: PackedStore, key: str) -> None:
    with pytest.raises(ValueError, match="not a key"):
        store.open(key)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "manifest.json").write_text("{"),
        lambda folder: (folder / "manifest.json").write_bytes(b"\xff\xfe"),
        lambda folder: (folder / "manifest.json").write_text("[]"),
        lambda folder: (folder / "manifest.json").unlink(),
        lambda folder: (folder / "weights.bin").unlink(),
        lambda folder: os.truncate(folder / "weights.bin", 5),
        lambda folder: os.truncate(folder / "weights.bin", 0),
        lambda folder: (folder / "weights.bin").write_bytes(bytes(99_999)),
        lambda folder: change(folder, lambda body: body.update(version=999)),
        lambda folder: change(folder, lambda body: body["arrays"].update(head=[0, 1 << 60, 0])),
        lambda folder: change(folder, lambda body: body["arrays"].update(head=[64, 1, 0]), signed=True),
        lambda folder: change(folder, lambda body: body["arrays"].update(head=[0, 1 << 60, 0]), signed=True),
        lambda folder: change(folder, lambda body: body["arrays"].update(head=None), signed=True),
        lambda folder: change(folder, lambda body: body.update(version=999), signed=True),
    ],
)
def test_a_damaged_form_is_discarded_and_made_again(
    store: PackedStore, damage: packed.Callable[[Path], None]
) -> None:
    store.create("model", entries(), {})
    damage(store.root / "model")
    assert store.open("model") is None
    assert not (store.root / "model").exists()
    assert whole(store.create("model", entries(), {}))


def change(folder: Path, edit: packed.Callable[[dict[str, packed.Any]], None], signed: bool = False) -> None:
    body = json.loads((folder / "manifest.json").read_text())
    edit(body)
    if signed:
        del body["checksum"]
        body["checksum"] = packed._checksum(body)
    (folder / "manifest.json").write_text(json.dumps(body))


def test_verify_finds_flipped_bits(store: PackedStore) -> None:
    store.create("model", entries(), {})
    with (store.root / "model" / "weights.bin").open("r+b") as file:
        file.seek(17)
        byte = file.read(1)[0]
        file.seek(17)
        file.write(bytes([byte ^ 1]))
    # As a disk flips bits: nobody wrote anything.
    (store.root / "model" / "written").write_text(
        str((store.root / "model" / "weights.bin").stat().st_mtime_ns)
    )
    opened = store.open("model")
    assert opened is not None
    assert opened.verify() == ["embedding"]


def test_weights_that_something_wrote_to_are_checked_before_they_are_used(
    store: PackedStore, caplog: pytest.LogCaptureFixture
) -> None:
    weights = store.create("model", entries(), {}).path / "weights.bin"  # type: ignore[operator]
    with weights.open("r+b") as file:
        file.seek(5000)
        file.write(bytes(byte ^ 1 for byte in content("embedding")[5000:5064]))
    assert store.open("model") is None
    assert "array 'embedding' is not what was written); packing again" in caplog.text
    assert whole(store.create("model", entries(), {}))


def test_weights_that_were_only_touched_are_checked_once(
    store: PackedStore, caplog: pytest.LogCaptureFixture
) -> None:
    weights = store.create("model", entries(), {}).path / "weights.bin"  # type: ignore[operator]
    os.utime(weights, (5, 5))
    assert whole(store.open("model"))
    assert "checking them" in caplog.text
    caplog.clear()
    assert whole(store.open("model"))
    assert not caplog.text


def test_the_least_recently_used_make_room(tmp_path: Path) -> None:
    size = packed._layout(entries())[1]
    store = PackedStore(tmp_path, limit_bytes=3 * size)
    for i, key in enumerate("abc"):
        store.create(key, entries(), {})
        os.utime(tmp_path / key / "manifest.json", (i, i))
    mapped = store.open("b")  # keeps its view though removed
    assert store.open("a") is not None
    os.utime(tmp_path / "b" / "manifest.json", (1, 1))
    store.create("d", entries(), {})
    assert list(store.sizes()) == ["c", "a", "d"]
    assert whole(mapped)
    assert sum(store.sizes().values()) <= store.limit_bytes


def test_more_than_the_limit_is_packed_into_memory_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = PackedStore(tmp_path, limit_bytes=1000)
    with pytest.raises(ResourceError, match="CHABOK_PACK_LIMIT"):
        store.create("model", entries(), {})
    with caplog.at_level(logging.WARNING):
        assert whole(packed.load(store, "model", entries, {}))
    assert len(caplog.records) == 1
    assert "memory" in caplog.text


def test_the_limit_comes_from_the_environment_or_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "free_bytes", lambda path: 10**9)
    assert PackedStore(tmp_path).limit_bytes == 5 * 10**8
    monkeypatch.setattr(packed, "free_bytes", lambda path: 10**15)
    assert PackedStore(tmp_path).limit_bytes == 20 * 10**9
    monkeypatch.setenv("CHABOK_PACK_LIMIT", "1.5GB")
    assert PackedStore(tmp_path).limit_bytes == 1_500_000_000
    monkeypatch.setenv("CHABOK_PACK_LIMIT", "lots")
    with pytest.raises(ResourceError, match="CHABOK_PACK_LIMIT='lots'"):
        _ = PackedStore(tmp_path).limit_bytes


def test_a_full_disk_is_told_and_leaves_nothing(store: PackedStore) -> None:
    def full(array: np.ndarray) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ResourceError, match=r"no room left.*CHABOK_CACHE"):
        store.create("model", [*entries(), PackedEntry("z", 1, full)], {})
    assert [path.name for path in store.root.iterdir()] == [".locks"]


def test_a_disk_too_small_packs_into_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with disk(tmp_path / "disk", 16) as folder:
        store = PackedStore(folder / "packed", limit_bytes=1 << 30)
        with pytest.raises(ResourceError, match="No room for"):
            store.create("model", entries(), {})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(packed, "free_bytes", lambda path: 1 << 40)  # filled meanwhile by others
            assert whole(packed.load(store, "model", entries, {}))
        assert "no room left" in caplog.text
        assert store.open("model") is None


def test_a_read_only_cache_is_used_but_not_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with disk(tmp_path / "disk", 1000) as folder:
        store = PackedStore(folder / "packed", limit_bytes=1 << 30)
        store.create("model", entries(), {})
        make_read_only(folder)
        assert whole(store.open("model"))
        with pytest.raises(ResourceError, match=r"cannot be written.*CHABOK_CACHE"):
            store.create("other", entries(), {})
        assert whole(packed.load(store, "other", entries, {}))
        assert len(caplog.records) == 1


@pytest.mark.parametrize("step", [23, pytest.param(5, marks=pytest.mark.wide)])
def test_killed_at_any_step_nothing_half_written_is_used(store: PackedStore, step: int) -> None:
    store.root.mkdir(parents=True)
    finished, calls = False, 0
    while not finished:
        finished = survives(lambda: PackedStore(store.root, 1 << 30).create("model", entries(), {}), calls)
        found = store.open("model")
        assert found is None or whole(found)
        if found is not None:
            store.remove("model")
        calls += step
    assert calls > 300
    assert whole(store.create("model", entries(), {}))
    assert sorted(path.name for path in store.root.iterdir()) == [".locks", "model"]


def test_leavings_of_other_models_are_swept_unless_in_use(store: PackedStore) -> None:
    for name in (".dead.tmp", ".busy.tmp", ".trash-0123"):
        (store.root / name).mkdir(parents=True)
        (store.root / name / "weights.bin").write_bytes(b"half")
    busy = store.root / ".locks" / "busy.lock"
    with packed.locked(busy, lambda: None):
        store.create("model", entries(), {})
        assert sorted(path.name for path in store.root.iterdir()) == [".busy.tmp", ".locks", "model"]


def test_two_processes_pack_once(store: PackedStore, tmp_path: Path) -> None:
    log = tmp_path / "log"

    def slow(array: np.ndarray) -> None:
        with log.open("a") as file:
            file.write("filled\n")
        time.sleep(0.5)
        array[:] = 7

    def pack() -> None:
        watch = Watch()
        file = store.create("model", [PackedEntry("w", 5000, slow)], {}, watch)
        assert file.arrays["w"].sum() == 7 * 5000
        with log.open("a") as out:
            out.write("".join(f"{message}\n" for message in watch.messages))

    children = [forked(pack) for _ in range(3)]
    assert [wait(child) for child in children] == [0, 0, 0]
    lines = log.read_text().splitlines()
    assert lines.count("filled") == 1
    assert sum("waiting" in line for line in lines) == 2


def test_the_lock_of_a_killed_packer_is_free(store: PackedStore, tmp_path: Path) -> None:
    def stuck(array: np.ndarray) -> None:
        (tmp_path / "started").touch()
        time.sleep(60)

    child = forked(lambda: store.create("model", [PackedEntry("w", 5000, stuck)], {}))
    while not (tmp_path / "started").exists():
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    assert wait(child) == -signal.SIGKILL
    assert whole(store.create("model", entries(), {}))


def test_remove_frees_and_finds_by_fingerprint(store: PackedStore) -> None:
    store.create("abc-avx2", entries(), {})
    store.create("abc-avx512", entries(), {})
    store.create("def-avx2", entries(), {})
    assert set(store.sizes_of("abc")) == {"abc-avx2", "abc-avx512"}
    assert store.remove("abc-avx2") > 10_000
    assert store.remove("abc-avx2") == 0
    assert set(store.sizes()) == {"abc-avx512", "def-avx2"}
