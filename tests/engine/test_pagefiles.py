"""Files of pages: what is read is what was written, or nothing."""

import logging
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.checkpoints import killing
from tests.checkpoints.disks import disk, make_read_only

from chabok.engine.pagefiles import HEADER_BYTES, PageFiles, clear
from chabok.errors import ResourceError

PAGE = 500


def files(
    root: Path,
    *,
    model: str = "model",
    layout: str = "layout",
    page_bytes: int = PAGE,
    limit: int = 10**9,
) -> PageFiles:
    one = PageFiles(model, layout, page_bytes, root=root, limit_bytes=limit)
    one.open()
    return one


def key(i: int) -> bytes:
    return i.to_bytes(16, "little")


def content(i: int, n: int = PAGE) -> bytes:
    return bytes((i * 7 + j) % 251 for j in range(n))


def put(one: PageFiles, i: int, at: int | None = None) -> bool:
    return one.write(key(i), memoryview(content(i, one.page_bytes)), time.time_ns() if at is None else at)


def get(one: PageFiles, i: int) -> bytes | None:
    page = bytearray(one.page_bytes)
    return bytes(page) if one.read(key(i), memoryview(page)) else None


def only_file(one: PageFiles) -> Path:
    (path,) = one.folder.iterdir()
    return path


def test_a_page_is_read_as_it_was_written_by_this_process_and_the_next(tmp_path: Path) -> None:
    one = files(tmp_path / "cache")
    assert put(one, 1)
    assert one.has(key(1))
    assert get(one, 1) == content(1)
    following = files(tmp_path / "cache")
    assert following.has(key(1))
    assert not following.has(key(2))
    assert get(following, 1) == content(1)
    assert get(following, 2) is None


def test_folders_and_files_are_private(tmp_path: Path) -> None:
    one = files(tmp_path / "cache")
    put(one, 1)
    assert stat.S_IMODE(one.root.stat().st_mode) == 0o700
    assert stat.S_IMODE(one.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(only_file(one).stat().st_mode) == 0o600
    assert stat.S_IMODE((one.root / "secret").stat().st_mode) == 0o600


def test_a_folder_open_to_others_is_closed_to_them(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o755)
    files(tmp_path / "cache")
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_the_folder_of_another_user_is_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    os.chown(tmp_path / "cache", 12345, 12345)
    with pytest.raises(PermissionError, match="another user"):
        files(tmp_path / "cache")


def test_names_do_not_follow_from_keys_without_the_secret(tmp_path: Path) -> None:
    one, other = files(tmp_path / "one"), files(tmp_path / "other")
    put(one, 1)
    put(other, 1)
    assert only_file(one).name != only_file(other).name
    assert key(1).hex() not in only_file(one).name
    assert key(1) not in only_file(one).read_bytes()


@pytest.mark.parametrize("changes", [{"model": "other"}, {"layout": "other"}, {"page_bytes": PAGE + 1}])
def test_pages_of_another_model_or_layout_are_never_found(tmp_path: Path, changes: dict[str, object]) -> None:
    one = files(tmp_path / "cache")
    put(one, 1)
    other = files(tmp_path / "cache", **changes)  # type: ignore[arg-type]
    assert not other.has(key(1))
    assert get(other, 1) is None
    # Not even when somebody moves the file to where the other would look.
    (other.folder / only_file(one).name).write_bytes(only_file(one).read_bytes())
    assert get(other, 1) is None
    assert get(one, 1) == content(1)


def test_a_file_under_another_ones_name_is_not_trusted(tmp_path: Path) -> None:
    one = files(tmp_path / "cache")
    put(one, 1)
    first = only_file(one)
    put(one, 2)
    (second,) = set(one.folder.iterdir()) - {first}
    os.replace(first, second)
    assert get(one, 2) is None
    assert not second.exists()


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_changed_byte_is_noticed_and_the_file_removed(tmp_path: Path, data: st.DataObject) -> None:
    one = files(tmp_path / "cache")
    put(one, 1)
    path = only_file(one)
    raw = bytearray(path.read_bytes())
    kind = data.draw(st.sampled_from(["flip", "cut", "grow"]))
    if kind == "flip":
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    elif kind == "cut":
        del raw[data.draw(st.integers(0, len(raw) - 1)) :]
    else:
        raw += data.draw(st.binary(min_size=1, max_size=40))
    path.write_bytes(raw)
    assert get(one, 1) is None
    assert not path.exists()
    assert not one.has(key(1))
    assert put(one, 1)
    assert get(one, 1) == content(1)


def test_every_single_flipped_bit_of_the_header_is_noticed(tmp_path: Path) -> None:
    one = files(tmp_path / "cache")
    for bit in range(8 * HEADER_BYTES):
        put(one, 1)
        path = only_file(one)
        raw = bytearray(path.read_bytes())
        raw[bit // 8] ^= 1 << bit % 8
        path.write_bytes(raw)
        assert get(one, 1) is None


def test_links_and_folders_in_the_place_of_a_page_are_not_followed(tmp_path: Path) -> None:
    one = files(tmp_path / "cache")
    put(one, 1)
    path = only_file(one)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert get(one, 1) is None
    path.unlink()
    path.mkdir()
    assert get(one, 1) is None
    one.scan()


def test_damage_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = files(tmp_path / "cache")
    for i in range(3):
        put(one, i)
        only_file(one).write_bytes(b"x")
        assert get(one, i) is None
    assert [record.levelno for record in caplog.records if record.levelno >= logging.WARNING] == [
        logging.WARNING
    ]
    assert "computing it again" in caplog.text


def test_the_least_recently_used_pages_make_room_for_new_ones(tmp_path: Path) -> None:
    size = HEADER_BYTES + PAGE
    one = files(tmp_path / "cache", limit=20 * size)
    for i in range(20):
        put(one, i, at=10**18 + i)
    one.touch(key(0), 10**18 + 100)
    for i in range(20, 30):
        assert put(one, i, at=10**18 + 200 + i)
        assert sum(path.stat().st_size for path in one.folder.iterdir()) <= 20 * size
    assert get(one, 0) == content(0)
    assert get(one, 1) is None
    assert [get(one, i) for i in range(20, 30)] == [content(i) for i in range(20, 30)]


def test_the_limit_is_for_all_models_together(tmp_path: Path) -> None:
    size = HEADER_BYTES + PAGE
    one = files(tmp_path / "cache", limit=10 * size)
    for i in range(9):
        put(one, i, at=10**18 + i)
    other = files(tmp_path / "cache", model="other", limit=10 * size)
    for i in range(8):
        assert put(other, i)
    total = sum(path.stat().st_size for path in (tmp_path / "cache").glob("*/*"))
    assert total <= 10 * size
    assert len([i for i in range(8) if get(other, i)]) == 8


def test_a_page_larger_than_the_limit_is_not_kept(tmp_path: Path) -> None:
    one = files(tmp_path / "cache", limit=PAGE)
    assert not put(one, 1)
    assert not list(one.folder.iterdir())


def test_the_limit_comes_from_the_environment_or_the_free_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHABOK_PREFIX_LIMIT", "3MB")
    assert PageFiles("m", "l", PAGE, root=tmp_path).limit_bytes == 3 * 10**6
    monkeypatch.setenv("CHABOK_PREFIX_LIMIT", "lots")
    with pytest.raises(ResourceError, match="CHABOK_PREFIX_LIMIT"):
        PageFiles("m", "l", PAGE, root=tmp_path)
    monkeypatch.delenv("CHABOK_PREFIX_LIMIT")
    with disk(tmp_path / "small", 1000) as small:
        assert PageFiles("m", "l", PAGE, root=small).limit_bytes <= 256 * 1024


def test_what_a_killed_writer_left_is_swept_once_it_is_old(tmp_path: Path) -> None:
    one = files(tmp_path / "cache")
    old, fresh = (one.folder / f".{letter * 16}.tmp" for letter in "ab")
    for path in (old, fresh):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    put(one, 1)
    assert not old.exists()
    assert fresh.exists()


def test_two_processes_see_each_others_pages(tmp_path: Path) -> None:
    one, other = files(tmp_path / "cache"), files(tmp_path / "cache")
    put(one, 1)
    assert not other.has(key(1))
    other.look()
    assert other.has(key(1))
    assert get(other, 1) == content(1)
    assert put(other, 1)
    clear(tmp_path / "cache")
    assert get(one, 1) is None


def test_clearing_removes_everything_but_the_secret_and_says_how_much(tmp_path: Path) -> None:
    one = files(tmp_path / "cache")
    for i in range(3):
        put(one, i)
    assert clear(tmp_path / "cache") == 3 * (HEADER_BYTES + PAGE)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["secret"]
    assert clear(tmp_path / "cache") == 0
    assert clear(tmp_path / "nowhere") == 0


def test_a_full_disk_is_an_error_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    with disk(tmp_path / "small", 64) as small:
        one = files(small / "cache", page_bytes=10_000)
        with pytest.raises(OSError, match="No space left"):
            any(not put(one, i) for i in range(10))
        assert not list(one.folder.glob(".*"))
        for i in range(10):
            assert get(one, i) in (content(i, 10_000), None)


def test_a_read_only_disk_can_still_be_read(tmp_path: Path) -> None:
    with disk(tmp_path / "small", 64) as small:
        put(files(small / "cache"), 1)
        make_read_only(small)
        one = files(small / "cache")
        assert get(one, 1) == content(1)
        one.touch(key(1), 5)
        with pytest.raises(OSError, match="Read-only"):
            put(one, 2)


def test_a_kill_at_any_step_leaves_whole_pages_only(tmp_path: Path) -> None:
    def work() -> None:
        one = files(tmp_path / "cache")
        for i in range(2):
            put(one, i)

    files(tmp_path / "cache")
    for calls in range(0, 400, 3):
        done = killing.survives(work, calls)
        one = files(tmp_path / "cache")
        for path in one.folder.glob("[!.]*"):
            assert path.stat().st_size == HEADER_BYTES + PAGE
        for i in range(2):
            assert not one.has(key(i)) or get(one, i) == content(i)
            assert not done or get(one, i) == content(i)
        if done:
            return
        clear(tmp_path / "cache")
    raise AssertionError("it never came to an end")


WRITER = """
import sys
from pathlib import Path
from chabok.engine.pagefiles import PageFiles
one = PageFiles("model", "layout", 100_000, root=Path(sys.argv[1]), limit_bytes=3_000_000)
one.open()
print(flush=True)
i = int(sys.argv[2])
while True:
    one.write(i.to_bytes(16, "little"), memoryview(bytes([i % 251]) * 100_000), i)
    i += 1
"""


def kill_writers(root: Path, n: int) -> None:
    """Two processes write to one folder and are killed at random moments; whatever is there is right."""
    rng = __import__("random").Random(3)
    for turn in range(n):
        both = [
            subprocess.Popen(
                [sys.executable, "-c", WRITER, str(root), str(1000 * turn + 500 * j)], stdout=subprocess.PIPE
            )
            for j in range(2)
        ]
        for one in both:
            assert one.stdout is not None
            one.stdout.readline()
        time.sleep(rng.uniform(0, 0.05))
        for one in both:
            one.kill()
            one.communicate()
        reader = files(root, page_bytes=100_000)
        found = 0
        for i in range(1000 * turn, 1000 * turn + 1000):
            if reader.has(key(i)):
                page = bytearray(100_000)
                assert reader.read(key(i), memoryview(page)), "a whole file was found wrong"
                assert page == bytes([i % 251]) * 100_000
                found += 1
        size = sum(path.stat().st_size for path in reader.folder.iterdir())
        assert size <= 2 * 3_000_000
    assert found


def test_two_writers_killed_at_random_moments_leave_only_right_pages(tmp_path: Path) -> None:
    kill_writers(tmp_path / "cache", 3)


@pytest.mark.wide
def test_two_writers_killed_a_hundred_times_leave_only_right_pages(tmp_path: Path) -> None:
    kill_writers(tmp_path / "cache", 100)
