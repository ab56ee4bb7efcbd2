"""The merge loop that both byte-level BPE and SentencePiece are made of."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush


def merge(symbols: list[bytes], cost: Callable[[bytes, bytes], float | None]) -> list[bytes]:
    """Join neighbours, cheapest pair first and leftmost among equals, until no pair has a cost.

    ``symbols``: the characters of a word or text, each in UTF-8. ``cost(left, right)``: the rank of joining
    the two, lower is sooner, or None where they do not join. O(n log n), so that a megabyte without a space
    is no trap.
    """
    n = len(symbols)
    parts = list(symbols)
    before = list(range(-1, n - 1))
    after = list(range(1, n + 1))
    heap: list[tuple[float, int, int, int]] = []  # cost, left, right, length of the two when it was pushed
    for left in range(n - 1):
        price = cost(parts[left], parts[left + 1])
        if price is not None:
            heap.append((price, left, left + 1, len(parts[left]) + len(parts[left + 1])))
    heapify(heap)
    while heap:
        _, left, right, length = heappop(heap)
        # A part merged away is empty, one that grew is longer: either way the entry is out of date.
        if not parts[left] or not parts[right] or len(parts[left]) + len(parts[right]) != length:
            continue
        joined = parts[left] = parts[left] + parts[right]
        parts[right] = b""
        following = after[left] = after[right]
        if following < n:
            before[following] = left
            price = cost(joined, parts[following])
            if price is not None:
                heappush(heap, (price, left, following, len(joined) + len(parts[following])))
        preceding = before[left]
        if preceding >= 0:
            price = cost(parts[preceding], joined)
            if price is not None:
                heappush(heap, (price, preceding, left, len(parts[preceding]) + len(joined)))
    return [part for part in parts if part]
