"""The prefix cache on disk below an engine: restarts, damage, failing disks, and everything at once."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checkpoints.disks import disk
from tests.engine.mock import MockModel, continuation, mock_engine
from tests.fixtures import fixture_path

from chabok.engine.engine import Engine
from chabok.engine.handle import Handle
from chabok.engine.kv import PagePool, next_key, root_key
from chabok.engine.llm import LLM
from chabok.engine.pagefiles import PageFiles
from chabok.engine.pagewriter import Allowance, Kept, Writer
from chabok.engine.prefixes import Prefixes, Rates
from chabok.engine.request import Request, SamplingParams

PROMPT = list(b"You are a helpful assistant who never says a word too much. " * 8)  # 480 tokens: 7 pages


def ask(engine: Engine, prompt: list[int], n: int = 8, salt: str = "") -> tuple[int, int]:
    """Tokens from memory and from disk; the answer is checked."""
    completion = engine.submit(Request(prompt, SamplingParams(max_tokens=n), salt=salt)).result()
    assert completion.tokens == continuation(prompt, n)
    return completion.timings.cached_tokens_memory, completion.timings.cached_tokens_disk


def until(true: Callable[[], bool]) -> None:
    for _ in range(2000):
        if true():
            return
        time.sleep(0.005)
    raise AssertionError("it never came true")


def page_paths(root: Path) -> list[Path]:
    return sorted(root.glob("*/[!.]*"))


def test_a_prompt_seen_once_is_warm_after_a_graceful_restart(tmp_path: Path) -> None:
    first = mock_engine(prefixes=tmp_path)
    assert ask(first, PROMPT) == (0, 0)
    first.close()
    second = mock_engine(prefixes=tmp_path)
    assert ask(second, PROMPT) == (0, 448)
    assert ask(second, PROMPT) == (479, 0)
    assert second.stats.cached_tokens_disk == 448
    second.scheduler.check_integrity()
    second.close()
    assert len(page_paths(tmp_path)) == 7


def test_without_a_folder_nothing_is_kept() -> None:
    engine = mock_engine()
    assert engine.prefixes is None
    ask(engine, PROMPT)
    engine.close()


def test_tenants_share_no_pages_on_disk(tmp_path: Path) -> None:
    first = mock_engine(prefixes=tmp_path)
    ask(first, PROMPT, salt="one")
    first.close()
    second = mock_engine(prefixes=tmp_path)
    assert ask(second, PROMPT, salt="two") == (0, 0)
    assert ask(second, PROMPT, salt="one") == (0, 448)
    second.close()
    assert len({path.name for path in page_paths(tmp_path)}) == 14


def test_pages_used_again_are_written_soon_though_the_engine_is_busy(tmp_path: Path) -> None:
    engine = mock_engine(prefixes=tmp_path, row_s=0.001, context=4096, n_pages=80)
    engine.start()
    other = engine.submit(Request([5] * 10, SamplingParams(max_tokens=4000)))
    engine.submit(Request(PROMPT, SamplingParams(max_tokens=1))).result()
    assert not page_paths(tmp_path)
    engine.submit(Request(PROMPT, SamplingParams(max_tokens=1))).result()
    until(lambda: len(page_paths(tmp_path)) == 7)
    assert not other.done
    other.cancel()
    engine.close()


def test_an_idle_engine_writes_what_was_used_once_and_then_rests(tmp_path: Path) -> None:
    engine = mock_engine(prefixes=tmp_path)
    ask(engine, PROMPT)
    until(lambda: len(page_paths(tmp_path)) == 7)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.05
    engine.close()


def test_pages_whose_memory_is_taken_go_to_disk_and_come_back(tmp_path: Path) -> None:
    engine = mock_engine(context=512, n_pages=9, prefixes=tmp_path)
    ask(engine, PROMPT)
    ask(engine, list(b"something else altogether, to take all pages " * 10))
    until(lambda: len(page_paths(tmp_path)) == 14)
    memory, from_disk = ask(engine, PROMPT)
    assert memory + from_disk == 448
    assert from_disk >= 320
    engine.scheduler.check_integrity()
    engine.close()


def test_a_damaged_page_is_computed_again_and_those_before_it_are_used(tmp_path: Path) -> None:
    first = mock_engine(prefixes=tmp_path)
    ask(first, PROMPT)
    first.close()
    first_pages = mock_engine(prefixes=tmp_path)
    keys = [root_key("mock-1")]
    for i in range(7):
        keys.append(next_key(keys[-1], PROMPT[64 * i : 64 * i + 64]))
    assert first_pages.prefixes is not None
    files = first_pages.prefixes.files
    path = Path(files._path(files._tag(keys[4]).hex()[:32]))  # the fourth page
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    assert ask(first_pages, PROMPT) == (0, 192)
    assert first_pages.prefixes.failed == 4  # what follows a gap is of no use
    first_pages.close()
    assert ask(mock_engine(prefixes=tmp_path), PROMPT) == (0, 448)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 6), st.integers(0, 631), st.integers(1, 255))
def test_a_flipped_byte_never_changes_an_answer(page: int, at: int, bits: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        first = mock_engine(prefixes=Path(folder))
        ask(first, PROMPT)
        first.close()
        path = page_paths(Path(folder))[page]
        raw = bytearray(path.read_bytes())
        raw[at] ^= bits
        path.write_bytes(raw)
        second = mock_engine(prefixes=Path(folder))
        assert ask(second, PROMPT)[1] < 448
        second.close()


def test_what_is_read_for_one_does_not_hold_up_another(tmp_path: Path) -> None:
    first = mock_engine(prefixes=tmp_path)
    ask(first, PROMPT)
    first.close()
    engine = mock_engine(prefixes=tmp_path)
    gate = hold_reads(engine)
    waits = engine.submit(Request(PROMPT, SamplingParams(max_tokens=4)))
    goes = engine.submit(Request(list(b"no waiting here"), SamplingParams(max_tokens=4)))
    assert goes.result().tokens == continuation(list(b"no waiting here"), 4)
    assert not waits.done
    engine.scheduler.check_integrity()
    gate.set()
    assert waits.result().tokens == continuation(PROMPT, 4)
    assert waits.result().timings.cached_tokens_disk == 448
    engine.close()


def hold_reads(engine: Engine) -> threading.Event:
    """Let no read end before the event is set."""
    assert engine.prefixes is not None
    gate, files = threading.Event(), engine.prefixes.files
    read = files.read

    def slow(key: bytes, page: memoryview) -> bool:
        gate.wait(10)
        return read(key, page)

    files.read = slow  # type: ignore[method-assign]
    return gate


@pytest.mark.parametrize("how", ["cancel", "deadline", "close"])
def test_a_request_may_end_while_its_pages_are_read(tmp_path: Path, how: str) -> None:
    first = mock_engine(prefixes=tmp_path)
    ask(first, PROMPT)
    first.close()
    engine = mock_engine(prefixes=tmp_path, context=512, n_pages=9)
    gate = hold_reads(engine)
    deadline = time.perf_counter() + 0.05 if how == "deadline" else None
    handle = engine.submit(Request(PROMPT, SamplingParams(max_tokens=4), deadline=deadline))
    engine.step()
    assert engine.scheduler.active
    if how == "close":
        threading.Timer(0.05, gate.set).start()
        engine.close()
        assert handle.done
        return
    if how == "cancel":
        handle.cancel()
    else:
        time.sleep(0.06)
    engine.step()
    assert handle.result().finish_reason == {"cancel": "cancelled", "deadline": "deadline"}[how]
    engine.scheduler.check_integrity()
    assert engine.scheduler.pool.available == 9 - 7  # a reader may still write into them
    assert engine.has_work
    # One that needs all pages waits until they are back.
    other = engine.submit(Request([9] * 500, SamplingParams(max_tokens=4)))
    for _ in range(3):
        engine.step()
        engine.scheduler.check_integrity()
    assert not other.done
    gate.set()
    assert other.result().tokens == continuation([9] * 500, 4)
    engine.scheduler.check_integrity()
    assert engine.scheduler.pool.available == 9
    engine.close()


@st.composite
def lives(draw: st.DrawFn) -> list[tuple[int, int, int, int, str, int | None]]:
    """Requests of several lives of an engine: (life, family, length, answer, salt, cancelled after)."""
    one = st.tuples(
        st.integers(0, 2),
        st.integers(0, 3),
        st.integers(1, 400),
        st.integers(1, 70),
        st.sampled_from(["", "tenant"]),
        st.none() | st.integers(0, 12),
    )
    return draw(st.lists(one, min_size=1, max_size=14))


def random_lives(
    requests: list[tuple[int, int, int, int, str, int | None]], n_pages: int, seed: int, folder: Path
) -> None:
    rng = np.random.default_rng(seed)
    families = [np.random.default_rng(i).integers(0, 200, 400).tolist() for i in range(4)]
    for life in range(3):
        engine = mock_engine(context=512, n_pages=n_pages, max_batch=5, max_rows=48, prefixes=folder)
        handles: list[tuple[Handle, list[int], int, int | None]] = []
        for number, family, length, answer, salt, end in requests:
            if number == life:
                prompt = families[family][:length]
                if rng.random() < 0.5:
                    prompt = [*prompt, 201]
                handle = engine.submit(Request(prompt, SamplingParams(max_tokens=answer), salt=salt))
                handles.append((handle, prompt, answer, end))
                for _ in range(int(rng.integers(0, 6))):
                    engine.step()
                    engine.scheduler.check_integrity()
        for step in range(20_000):
            if not engine.has_work:
                break
            for handle, _, _, end in handles:
                if end == step:
                    handle.cancel()
            engine.step()
            engine.scheduler.check_integrity()
        for handle, prompt, answer, _ in handles:
            completion = handle.result()
            n = len(completion.tokens) if completion.finish_reason == "cancelled" else answer
            assert completion.tokens == continuation(prompt, min(n, 512 - len(prompt)))
        assert engine.scheduler.pool.available == n_pages
        for path in page_paths(folder):  # somebody else's hands
            luck = rng.random()
            if luck < 0.05:
                path.unlink()
            elif luck < 0.1:
                path.write_bytes(rng.bytes(path.stat().st_size))
        if rng.random() < 0.1:
            shutil.rmtree(folder, ignore_errors=True)  # while it is being written to
        engine.close()


@settings(max_examples=40, deadline=None)
@given(lives(), st.integers(8, 24), st.integers(0, 2**31))
def test_answers_over_several_lives_equal_those_computed_alone(
    requests: list[tuple[int, int, int, int, str, int | None]], n_pages: int, seed: int
) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        random_lives(requests, n_pages, seed, Path(folder) / "cache")


def test_two_engines_on_one_folder_use_each_others_pages(tmp_path: Path) -> None:
    one, other = mock_engine(prefixes=tmp_path), mock_engine(prefixes=tmp_path)
    ask(one, PROMPT)
    until(lambda: len(page_paths(tmp_path)) == 7)
    assert other.prefixes is not None
    other.prefixes._writer._looked -= 10
    ask(other, list(b"asks the writer to look what is new " * 4))
    files = other.prefixes.files
    until(lambda: len(files) >= 7)
    assert ask(other, PROMPT) == (0, 448)
    one.close()
    other.close()


# Disks that fail.


def test_a_full_disk_is_told_once_and_serving_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with disk(tmp_path / "small", 24) as small:
        (small / "ballast").write_bytes(bytes(8192))
        mock = MockModel()
        files = PageFiles(
            mock.fingerprint, mock.page_layout, mock.page_bytes, root=small / "cache", limit_bytes=10**9
        )
        from tests.engine.mock import ByteTokenizer

        engine = Engine(mock, ByteTokenizer(), context=1024, n_pages=64, prefix_files=files)
        for i in range(6):
            ask(engine, [i + 1, *PROMPT])
        prefixes = engine.prefixes
        assert prefixes is not None
        until(lambda: prefixes.dropped >= 10)
        warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(warnings) == 1
        assert "No space left" in caplog.text
        # Room again, and the pause is over.
        (small / "ballast").unlink()
        prefixes._writer._paused_until = 0.0
        written = prefixes.written
        ask(engine, [99, *PROMPT[:100]])
        until(lambda: prefixes.written > written)
        engine.close()


def test_a_folder_that_cannot_be_made_is_told_once_and_serving_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    engine = mock_engine(prefixes=tmp_path / "file" / "cache")
    assert ask(engine, PROMPT) == (0, 0)
    assert ask(engine, PROMPT)[0] == 479
    engine.close()
    assert sum(record.levelno >= logging.WARNING for record in caplog.records) == 1


def test_a_folder_that_is_removed_under_us_is_made_again(tmp_path: Path) -> None:
    engine = mock_engine(prefixes=tmp_path / "cache")
    ask(engine, PROMPT)
    until(lambda: len(page_paths(tmp_path / "cache")) == 7)
    shutil.rmtree(tmp_path / "cache")
    other = [3, *PROMPT]
    ask(engine, other)
    until(lambda: len(page_paths(tmp_path / "cache")) == 7)
    engine.close()
    second = mock_engine(prefixes=tmp_path / "cache")
    assert ask(second, other) == (0, 448)
    second.close()


# The parts.


def test_a_page_that_is_taken_while_it_is_copied_is_not_written(tmp_path: Path) -> None:
    model = MockModel()
    model.new_cache(2)
    pool = PagePool(2)
    page = pool.take()
    assert page is not None
    key = next_key(root_key("mock-1"), [1] * 64)
    pool.keep(page, key)
    kept = Kept(key, page, pool.uses[page], 0)
    files = PageFiles("mock-1", "marks", model.page_bytes, root=tmp_path)
    prefixes = Prefixes(files, model.page, pool)
    buffer = np.empty(model.page_bytes, np.uint8)
    assert prefixes._copy(kept, buffer)

    def taken(index: int) -> np.ndarray:
        pool.release(page)
        pool.clear()
        pool.take()
        return model.page(index)

    prefixes._page = taken
    assert not prefixes._copy(kept, buffer)


def test_reading_that_is_slower_than_computing_is_not_done_but_tried_at_times() -> None:
    rates = Rates()
    assert rates.worth_reading(64)
    rates.read(1.0, 100)  # 10 ms a page
    assert rates.worth_reading(64)
    rates.computed(0.064, 64)  # 64 ms a page
    assert rates.worth_reading(64)
    for _ in range(30):
        rates.computed(0.00064, 64)
    assert sum(rates.worth_reading(64) for _ in range(160)) == 10


def test_what_is_written_is_bounded_and_pages_used_again_come_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("chabok.engine.pagewriter.monotonic", lambda: now[0])
    allowance = Allowance(burst=100, per_s=1)
    assert sum(allowance.take(10, important=False) for _ in range(100)) == 5
    assert sum(allowance.take(10, important=True) for _ in range(100)) == 5
    now[0] = 25.0
    assert sum(allowance.take(10, important=True) for _ in range(100)) == 2
    now[0] = 1e6
    assert sum(allowance.take(10, important=True) for _ in range(100)) == 10


def test_more_pages_than_the_queue_holds_are_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chabok.engine.pagewriter.QUEUED", 3)
    writer = Writer(PageFiles("m", "l", 64, root=tmp_path), lambda kept, buffer: True, lambda: True)
    for i in range(5):
        writer.put([Kept(bytes([i]) * 16, 0, 0, 0)], urgent=True)
    assert writer.dropped == 2


def test_closing_takes_no_longer_than_it_may(tmp_path: Path) -> None:
    engine = mock_engine(prefixes=tmp_path, n_pages=64)
    engine.start()
    prefixes = engine.prefixes
    assert prefixes is not None
    write = prefixes.files.write

    def slow(key: bytes, page: memoryview, used_ns: int) -> bool:
        time.sleep(0.05)
        return write(key, page, used_ns)

    prefixes.files.write = slow  # type: ignore[method-assign]
    for i in range(4):
        engine.submit(Request([i + 1, *PROMPT], SamplingParams(max_tokens=1))).result()
    began = time.perf_counter()
    prefixes.close(timeout_s=0.2)
    assert time.perf_counter() - began < 0.6
    assert prefixes.dropped > 0


# Real kernels.


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_real_model_answers_after_a_restart_as_it_does_without_a_cache(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chabok.checkpoints.paths.prefixes_dir", lambda: tmp_path / "prefixes")
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    prompt = [3 + i % 90 for i in range(200)]
    with LLM(str(fixture_path(name)), pack=False, context=384) as plain:
        want = [plain.generate([*prompt, i], params).tokens for i in range(2)]
    with LLM(str(fixture_path(name)), pack=False, context=384, prefix_disk=True) as llm:
        assert llm.generate([*prompt, 0], params).tokens == want[0]
    for threads in (1, 2):
        with LLM(str(fixture_path(name)), pack=False, context=384, prefix_disk=True, threads=threads) as llm:
            completions = [llm.generate([*prompt, i], params) for i in range(2)]
        assert [one.tokens for one in completions] == want
        assert completions[0].timings.cached_tokens_disk == 192
        assert completions[1].timings.cached_tokens_memory == 200


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_pages_have_the_same_bits_however_they_were_computed(name: str) -> None:
    prompt = [3 + i % 90 for i in range(192)]
    pages = []
    for threads, cut in [(1, 192), (2, 192), (2, 7), (1, 1)]:
        with LLM(str(fixture_path(name)), pack=False, context=384, threads=threads) as llm:
            for n in range(cut, 193, cut):
                llm.generate(prompt[:n], SamplingParams(max_tokens=0))
            llm.generate(prompt, SamplingParams(max_tokens=1))
            pool, key, found = llm.engine.scheduler.pool, root_key(llm.engine.model.fingerprint), []
            for i in range(3):
                key = next_key(key, prompt[64 * i : 64 * i + 64])
                page = pool.find(key)
                assert page is not None
                found.append(llm.engine.model.page(page).tobytes())
            pages.append(found)
    assert all(found == pages[0] for found in pages)


# Kills.

SERVED = """
import sys
from pathlib import Path
from tests.engine.mock import mock_engine
from chabok.engine.request import Request, SamplingParams
engine = mock_engine(prefixes=Path(sys.argv[1]), context=512, n_pages=16)
engine.start()
print(flush=True)
i = 0
while True:
    prompt = list(b"prompt number %d " % (i % 7) * 12)
    engine.submit(Request(prompt, SamplingParams(max_tokens=2))).result()
    i += 1
"""


def kill_engines(folder: Path, n: int) -> None:
    rng = np.random.default_rng(1)
    for _ in range(n):
        child = subprocess.Popen([sys.executable, "-c", SERVED, str(folder)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(rng.uniform(0, 0.3))
        child.kill()
        child.communicate()
        engine = mock_engine(prefixes=folder, context=512, n_pages=64)
        from_disk = 0
        for i in range(7):
            from_disk += ask(engine, list(b"prompt number %d " % i * 12))[1]
        prefixes = engine.prefixes
        assert prefixes is not None
        assert prefixes.failed == 0
        engine.scheduler.check_integrity()
        engine.close()
    assert from_disk


def test_an_engine_killed_at_random_moments_leaves_a_cache_that_is_right(tmp_path: Path) -> None:
    kill_engines(tmp_path / "cache", 3)


@pytest.mark.wide
def test_an_engine_killed_a_hundred_times_leaves_a_cache_that_is_right(tmp_path: Path) -> None:
    kill_engines(tmp_path / "cache", 100)
