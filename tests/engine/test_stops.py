from hypothesis import given
from hypothesis import strategies as st
from tests.engine.mock import ByteTokenizer

from chabok.engine.stops import StopStrings, Text


def pushed(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopStrings(stops)
    shown = []
    for piece in pieces:
        shown.append(matcher.push(piece))
        if matcher.found is not None:
            return "".join(shown), matcher.found
    return "".join(shown) + matcher.finish(), None


def test_a_stop_string_across_pieces_is_found_and_not_shown() -> None:
    assert pushed(["\n\nUser:"], ["Hello", " there\n", "\nUs", "er: hi"]) == ("Hello there", "\n\nUser:")


def test_text_that_only_begins_a_stop_string_is_held_back_then_shown() -> None:
    matcher = StopStrings(["END"])
    assert matcher.push("the E") == "the "
    assert matcher.push("N") == ""
    assert matcher.push("ough") == "ENough"


def test_the_stop_string_that_begins_first_wins() -> None:
    assert pushed(["lo", "el"], ["hello"]) == ("h", "el")


def test_held_text_comes_out_at_the_end() -> None:
    assert pushed(["END"], ["the EN"]) == ("the EN", None)


ABC = st.text("ab\n", min_size=0, max_size=6)


@given(st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3), st.lists(ABC, max_size=12))
def test_pieces_give_what_the_whole_text_would(stops: list[str], pieces: list[str]) -> None:
    whole = "".join(pieces)
    shown, found = pushed(stops, pieces)
    assert (found is None) == (not any(stop in whole for stop in stops))
    assert whole.startswith(shown)
    if found is None:
        assert shown == whole
    else:
        assert whole[len(shown) :].startswith(found)
        assert not any(stop in shown for stop in stops)


def test_text_never_shows_half_a_character() -> None:
    text = Text(ByteTokenizer().stream(), [])
    assert [text.push(byte) for byte in "é".encode()] == ["", "é"]
    assert text.whole() == "é"


def test_a_stop_string_completed_by_the_last_half_character_is_found() -> None:
    text = Text(ByteTokenizer().stream(), ["\ufffd"])
    assert text.push(0xC3) == ""
    assert text.finish() == ""
    assert text.stop == "\ufffd"
