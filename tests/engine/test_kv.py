import pytest
from hypothesis import given
from hypothesis import strategies as st

from chabok.engine.kv import PagePool, next_key, pages_for, root_key


def key(i: int) -> bytes:
    return next_key(root_key("model"), [i] * 64)


def test_low_pages_are_taken_first_so_that_memory_stays_untouched() -> None:
    pool = PagePool(4)
    assert [pool.take() for _ in range(5)] == [0, 1, 2, 3, None]


def test_a_kept_page_is_found_after_its_holder_left() -> None:
    pool = PagePool(2)
    page = pool.take()
    assert page is not None
    pool.keep(page, key(1))
    pool.release(page)
    assert pool.find(key(1)) == page
    assert pool.available == 2
    pool.hold(page)
    assert pool.available == 1
    pool.check_integrity([[page]])


def test_the_page_unused_for_longest_is_evicted_first() -> None:
    pool = PagePool(3)
    pages = [pool.take() for _ in range(3)]
    for i, page in enumerate(pages):
        assert page is not None
        pool.keep(page, key(i))
    for i in (1, 0, 2):
        pool.release(pages[i])  # type: ignore[arg-type]
    pool.hold(pages[1])  # type: ignore[arg-type]
    pool.release(pages[1])  # type: ignore[arg-type]
    assert [pool.take() for _ in range(3)] == [pages[0], pages[2], pages[1]]


def test_a_page_goes_back_only_when_its_last_holder_leaves() -> None:
    pool = PagePool(1)
    page = pool.take()
    assert page is not None
    pool.keep(page, key(1))
    pool.hold(page)
    pool.release(page)
    assert pool.take() is None
    pool.release(page)
    assert pool.take() == page
    assert pool.find(key(1)) is None


def test_the_first_page_of_a_key_stays_the_one_that_is_found() -> None:
    pool = PagePool(2)
    first, second = pool.take(), pool.take()
    assert first is not None
    assert second is not None
    pool.keep(first, key(1))
    pool.keep(second, key(1))
    assert pool.find(key(1)) == first
    pool.release(second)
    pool.check_integrity([[first]])


def test_keys_depend_on_everything_before_them() -> None:
    root = root_key("model")
    one, other = next_key(root, [1] * 64), next_key(root, [2] * 64)
    assert next_key(one, [3] * 64) != next_key(other, [3] * 64)
    assert root_key("model", "tenant") != root_key("model") != root_key("another")


def test_integrity_is_checked_for_real() -> None:
    pool = PagePool(2)
    page = pool.take()
    assert page is not None
    with pytest.raises(AssertionError, match="wrong number"):
        pool.check_integrity([])
    pool._free.append(page)
    with pytest.raises(AssertionError, match="two places"):
        pool.check_integrity([[page]])


def test_pages_for_rounds_up() -> None:
    assert [pages_for(n) for n in (0, 1, 64, 65)] == [0, 1, 1, 2]


@given(st.lists(st.tuples(st.sampled_from(["take", "keep", "hold", "release", "clear"]), st.integers(0, 9))))
def test_any_order_of_operations_leaves_every_page_in_one_place(actions: list[tuple[str, int]]) -> None:
    pool = PagePool(4)
    held: list[int] = []
    for action, i in actions:
        if action == "take":
            page = pool.take()
            assert (page is None) == (len(set(held)) == 4)
            held += [] if page is None else [page]
        elif action == "hold" and pool.find(key(i)) is not None:
            held.append(pool.find(key(i)))  # type: ignore[arg-type]
            pool.hold(held[-1])
        elif action == "keep" and held and pool._key_of[held[i % len(held)]] is None:
            pool.keep(held[i % len(held)], key(i))
        elif action == "release" and held:
            pool.release(held.pop(i % len(held)))
        elif action == "clear":
            pool.clear()
        pool.check_integrity([held])


def test_the_page_with_the_longest_common_beginning_is_found() -> None:
    pool, root = PagePool(32), root_key("model")
    for i, tokens in enumerate(([1] * 64, [1] * 20 + [2] * 44, [3] * 64)):
        page = pool.take()
        assert page == i
        pool.keep(page, key(i), root, tokens)
    assert pool.ends.longest(root, [1] * 20 + [2] * 5) == (1, 25)
    assert pool.ends.longest(root, [1] * 63) == (0, 63)
    assert pool.ends.longest(root, [3, 3, 4, 4, 4]) == (-1, 0)  # too little to copy a page for
    assert pool.ends.longest(key(0), [1] * 63) == (-1, 0)


def test_few_pages_that_are_not_full_are_kept_and_those_that_another_continues_are_not() -> None:
    pool, root = PagePool(32), root_key("model")

    def end(tokens: list[int], after: bytes = root) -> int:
        page = pool.take()
        assert page is not None
        pool.keep_end(page, after, tokens)
        pool.release(page)
        pool.check_integrity()
        return page

    short = end([1] * 10)
    longer = end([1] * 30)
    assert pool.ends.longest(root, [1] * 40) == (longer, 30)
    assert short not in pool.ends
    for i in range(10):
        end([5 + i] * 10, key(i))
    assert pool.ends.longest(root, [1] * 40) == (
        -1,
        0,
    )  # an eighth of the pages at most
    assert pool.available == 32
    pool.clear()
    pool.check_integrity()
    assert pool.ends.longest(key(9), [14] * 10) == (-1, 0)


@given(st.lists(st.tuples(st.sampled_from(["take", "keep", "end", "hold", "clear"]), st.integers(0, 5))))
def test_parts_of_pages_are_found_only_where_they_are(actions: list[tuple[str, int]]) -> None:
    pool, root = PagePool(16), root_key("model")
    held: list[int] = []
    contents: dict[int, list[int]] = {}
    for action, i in actions:
        tokens = [i] * 5 + [7] * (5 + i)
        if action == "take" and (page := pool.take()) is not None:
            held.append(page)
            contents[page] = []
        elif action in ("keep", "end") and held:
            page = held.pop()
            if action == "keep" and pool._key_of[page] is None:
                pool.keep(page, key(i), root, tokens)
            elif action == "end":
                pool.keep_end(page, root, tokens)
            contents[page] = tokens
            pool.release(page)
        elif action == "hold" and (found := pool.find(key(i))) is not None and pool.is_idle(found):
            pool.hold(found)
            pool.release(found)
        elif action == "clear":
            pool.clear()
        page, n = pool.ends.longest(root, tokens)
        assert n == 0 or contents[page][:n] == tokens[:n]
        pool.check_integrity([held])
