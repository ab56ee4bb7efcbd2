"""Bytes cut anywhere become the same events."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.measure.formats import FORMATS, Answer, Said

from chabok.measure.failures import ProtocolError, ServerSaidError
from chabok.measure.metrics import measure
from chabok.measure.timeline import Timeline
from chabok.measure.wire import DIALECTS, Reader
from chabok.measure.wire.framing import EVENT_BYTES, EventStream, LineStream


def events(*pieces: bytes) -> list[tuple[bytes, bytes]]:
    found: list[tuple[bytes, bytes]] = []
    stream = EventStream(lambda at, data, name: found.append((data, name)))
    for piece in pieces:
        stream.feed(0.0, piece)
    stream.finish(0.0)
    return found


def test_comments_retry_and_ids_are_no_events() -> None:
    assert events(b": keep-alive\n\nretry: 10\n\nid: 4\n\ndata: x\n\n") == [(b"x", b"")]


def test_every_line_end_that_the_standard_knows_ends_a_line() -> None:
    for end in (b"\n", b"\r\n", b"\r"):
        text = end.join([b"event: a", b"data: 1", b"", b":c", b"data:2", b"data:3", b"", b""])
        assert events(text) == [(b"1", b"a"), (b"2\n3", b"")]
        assert events(*[text[i : i + 1] for i in range(len(text))]) == [(b"1", b"a"), (b"2\n3", b"")]


def test_a_name_does_not_outlive_its_event() -> None:
    assert events(b"event: a\n\ndata: 1\n\n") == [(b"1", b"")]
    assert events(b"event: a\n", b"data: 1\n\n", b"data: 2\n\n") == [(b"1", b"a"), (b"2", b"")]


def test_a_byte_order_mark_is_skipped_and_a_last_event_without_blank_line_is_given() -> None:
    assert events(b"\xef\xbb", b"\xbfdata: 1\n\ndata: [DONE]") == [(b"1", b""), (b"[DONE]", b"")]


def test_an_event_is_given_at_the_instant_of_its_last_byte() -> None:
    found: list[float] = []
    stream = EventStream(lambda at, data, name: found.append(at))
    for at, piece in enumerate([b"data: a", b"b\n", b"\ndata: c\n\n", b"data: d\n\n"]):
        stream.feed(float(at), piece)
    assert found == [2.0, 2.0, 3.0]


def test_a_line_without_end_is_refused_before_it_fills_memory() -> None:
    def feed(kind: type[EventStream] | type[LineStream], piece: bytes) -> None:
        stream = kind(lambda at, data, name: None)
        for _ in range(EVENT_BYTES // len(piece) + 50):
            stream.feed(0.0, piece)

    for kind, piece in (
        (EventStream, b"x" * 65536),
        (LineStream, b"x" * 65536),
        (EventStream, b"data: " + b"x" * 1024 + b"\n"),
    ):
        with pytest.raises(ProtocolError, match="longer than"):
            feed(kind, piece)


LINES = st.sampled_from(
    [b"data: {}", b"data:x", b"data", b"event: e", b": c", b"", b"", b"id: 1", "data: ü€😀".encode()]
)
ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])


@given(st.lists(st.tuples(LINES, ENDS), max_size=30), st.lists(st.integers(1, 12), max_size=60))
def test_how_the_network_cuts_bytes_does_not_change_events(
    lines: list[tuple[bytes, bytes]], sizes: list[int]
) -> None:
    text = b"".join(line + end for line, end in lines)
    pieces, place = [], 0
    for size in sizes:
        pieces.append(text[place : place + size])
        place += size
    assert events(*pieces, text[place:]) == events(text)


PRINTABLE = st.characters(exclude_categories=("C", "Z"), include_characters=" ")
TEXTS = st.lists(st.text(PRINTABLE, min_size=1, max_size=6), min_size=1, max_size=12)


@settings(max_examples=40)
@given(st.sampled_from(sorted(FORMATS)), TEXTS, st.integers(0, 3), st.randoms(use_true_random=False))
def test_metrics_do_not_change_when_events_are_cut_into_other_chunks(
    dialect: str, texts: list[str], reasoning: int, chance: object
) -> None:
    said = [
        Said(
            1 + place, text, "reasoning" if place < reasoning and "completions" not in dialect else "content"
        )
        for place, text in enumerate(texts)
    ]
    script = FORMATS[dialect](Answer(said, {"prompt": 7, "output": len(said) + 2}, 3.0))

    def read(cut: bool) -> Timeline:
        timeline = Timeline(0, 0.0, asked_output=64)
        reader = Reader(DIALECTS[dialect], timeline, 0.0)
        reader.head(0.0, 200, {key.lower(): value for key, value in script.headers.items()})
        at = 0.0
        for step in script.steps:
            at += step.wait_ms / 1000
            place = 0
            while place < len(step.data):
                size = chance.randint(1, 40) if cut else len(step.data)  # type: ignore[attr-defined]
                reader.body(at, step.data[place : place + size])
                place += size
        timeline.done = at
        reader.close()
        return timeline

    whole, cut = read(False), read(True)
    assert whole == cut
    assert whole.ok
    found = measure(cut)
    assert found.token_times[0] == pytest.approx(0.001)
    assert "".join(event.text for event in cut.events if event.kind in ("content", "reasoning")) == "".join(
        texts
    )
    assert found.output_tokens == len(said) + 2


@given(st.binary(max_size=300))
def test_bytes_that_are_no_stream_never_raise_anything_but_a_protocol_error(data: bytes) -> None:
    for dialect in DIALECTS.values():
        reader = Reader(dialect, Timeline(0, 0.0), 0.0)
        reader.head(0.0, 200, {})
        try:
            reader.body(0.0, data)
        except ProtocolError:
            continue
        reader.close()
        assert reader.timeline.failure is not None or reader.timeline.finish


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["choices", "delta", "content", "usage", "error", "message", "type", "text", "done",
                         "response", "timings", "prompt_ms", "tool_calls", "function"]), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(JSON)
def test_json_of_any_shape_never_breaks_the_reader(value: object) -> None:
    for dialect in DIALECTS.values():
        reader = Reader(dialect, Timeline(0, 0.0), 0.0)
        reader.head(0.0, 200, {})
        text = json.dumps(value).encode()
        with suppress(ProtocolError, ServerSaidError):
            reader.body(0.0, text + b"\n" if dialect.lines else b"data: " + text + b"\n\n")
