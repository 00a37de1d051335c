"""Stop strings against a brute-force search of the whole text, for every way of cutting it up."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.output.stop_strings import StopResult, StopStrings

LETTERS = st.text(alphabet="ab", max_size=30)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=6), min_size=1, max_size=4, unique=True)


def brute_force(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """Return the first end at which a stop string is complete, and the longest one there."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def by_length(stops: Sequence[str]) -> list[str]:
    return sorted(stops, key=len, reverse=True)


def run(pieces: Sequence[str], stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    watcher = StopStrings(stops, include)
    shown = ""
    for piece in pieces:
        result = watcher.push(piece)
        shown += result.text_to_emit
        if result.matched is not None:
            assert watcher.flush() == ""
            return shown, result.matched
    return shown + watcher.flush(), None


@given(text=LETTERS, stops=STOPS, include=st.booleans(), data=st.data())
def test_stop_strings_equal_brute_force_for_any_cut(
    text: str, stops: list[str], include: bool, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    expected = brute_force(text, stops, include)
    assert run(pieces, stops, include) == expected
    assert run(list(text), stops, include) == expected


@given(early=LETTERS, text=LETTERS, stops=STOPS, include=st.booleans(), data=st.data())
def test_stop_string_may_begin_but_not_end_in_early_text(
    early: str, text: str, stops: list[str], include: bool, data: st.DataObject
) -> None:
    """Compare with the same search of the whole text, from the end of the early text."""
    watcher = StopStrings(stops, include)
    cut = data.draw(st.integers(0, len(early)))
    results = [watcher.push(early[:cut], early=True), watcher.push(early[cut:], early=True)]
    assert all(result.matched is None for result in results)
    results.append(watcher.push(text))
    shown = "".join(result.text_to_emit for result in results) + watcher.flush()
    whole, ends = early + text, range(len(early) + 1, len(early + text) + 1)
    found = next(((end, s) for end in ends for s in by_length(stops) if whole[:end].endswith(s)), None)
    end, matched = found or (len(whole), None)
    assert results[-1].matched == matched
    assert shown == whole[: end if include or matched is None else end - len(matched)]


@given(text=LETTERS, stops=STOPS)
def test_stop_strings_hold_back_the_minimum(text: str, stops: list[str]) -> None:
    """Hold back exactly the longest end of the text that begins a stop string."""
    watcher = StopStrings(stops, include=False)
    shown = ""
    for char in text:
        result = watcher.push(char)
        if result.matched is not None:
            return
        shown += result.text_to_emit
    beginnings = [stop[:size] for stop in stops for size in range(len(stop)) if text.endswith(stop[:size])]
    assert text[len(shown) :] == max(beginnings, key=len)


@pytest.mark.parametrize(
    ("pieces", "stops", "shown", "matched"),
    [
        (["Hello\nUs", "er: hi"], ["\nUser:"], "Hello", "\nUser:"),
        (["aab", "aabaaab"], ["aabaaa"], "aab", "aabaaa"),  # needs the failure links
        (["xabcx"], ["abcd", "bc"], "xa", "bc"),  # the longer candidate began earlier and failed
        (["xabcd"], ["abcd", "bc"], "xa", "bc"),  # the shorter one is complete first
        (["x", "abc"], ["bc", "abc"], "x", "abc"),  # complete together: the longest
        (["日本", "語。終"], ["本語"], "日", "本語"),
        (["no match"], ["zzz"], "no match", None),
        (["almost zz"], ["zzz"], "almost zz", None),
    ],
)
def test_stop_strings_return_the_expected_text(
    pieces: list[str], stops: list[str], shown: str, matched: str | None
) -> None:
    assert run(pieces, stops, include=False) == (shown, matched)


def test_stop_strings_return_no_text_after_a_match() -> None:
    watcher = StopStrings(["END"], include=True)
    assert watcher.push("oneENDtwo") == StopResult("oneEND", "END")
    assert watcher.push("three") == StopResult("", "END")
    assert watcher.flush() == ""


def test_included_stop_strings_are_not_held_back() -> None:
    watcher = StopStrings(["END"], include=True)
    assert watcher.push("oneEN") == StopResult("oneEN", None)
    assert watcher.push("D!") == StopResult("D", "END")


def test_empty_stop_string_raises() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""], include=False)


def test_self_similar_stop_string_takes_linear_time() -> None:
    """Search a megabyte of near-misses; quadratic matching would exceed the test's timeout."""
    watcher = StopStrings(["a" * 1023 + "b"], include=False)
    shown = sum(len(watcher.push("a" * 1000).text_to_emit) for _ in range(1000))
    assert shown == 1_000_000 - 1023
    assert watcher.push("b").matched is not None


def test_outputs_of_a_request_share_stop_string_tables() -> None:
    stops = [letter * 1000 + "b" for letter in "cdefghijklmnopqr"]
    first, second = StopStrings(stops, include=False), StopStrings(stops, include=False)
    tables = [[automaton._fallback for automaton in watcher._automata] for watcher in (first, second)]
    assert all(one is other for one, other in zip(*tables, strict=True))
    assert first.push(stops[0][:-1]).text_to_emit == ""
    assert second.push("b").text_to_emit == "b"  # where one is in its text is its own
