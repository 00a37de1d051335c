"""Prompt lookup: the tokens that a text drafts, and their number."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from decode_worker.prompt_lookup import LONGEST_PAUSE, LONGEST_REST, PROMPT_TOKENS, PromptLookup
from decode_worker.sequence import DecodeSequence
from diptych.engine.sampling import SampleRow, SamplingParams


def sequence(prompt: Sequence[int], output: Sequence[int]) -> DecodeSequence:
    written = list(output)
    return DecodeSequence(len(prompt), written, SampleRow(SamplingParams(), prompt, written))


def draft_of(lookup: PromptLookup, text: DecodeSequence, count: int) -> Sequence[int]:
    (draft,) = lookup.draft([text], [count])
    return draft


def test_draft_follows_the_latest_occurrence_of_the_longest_end() -> None:
    lookup = PromptLookup(4)
    #                          3 4 | after 1 2 3:        | after 9 2 3:
    text = sequence([1, 2, 3, 4, 5, 6, 7, 9, 2, 3, 8, 8, 8, 1, 2], [3])
    assert draft_of(lookup, text, 4) == [4, 5, 6, 7]
    assert draft_of(lookup, sequence([5, 6, 2, 3, 7, 2, 3, 8, 0, 2], [3]), 2) == [
        8,
        0,
    ]  # two places: the later


def test_no_draft_without_an_earlier_occurrence() -> None:
    lookup = PromptLookup(4)
    assert list(draft_of(lookup, sequence([1, 2, 3], [4]), 4)) == []
    assert list(draft_of(lookup, sequence([], [4]), 4)) == []


def test_searches_that_find_nothing_become_rarer() -> None:
    """Then its steps, and those of others, are launched ahead again."""
    lookup, text = PromptLookup(4), sequence([1, 2, 3], [4])
    looks = []
    for token in range(100, 600):
        if not lookup.rests(text):
            looks.append(token)
            assert list(draft_of(lookup, text, 4)) == []
        text.output_ids.append(token)
    gaps = [later - earlier for earlier, later in pairwise(looks)]
    assert gaps == sorted(gaps)
    assert (gaps[0], gaps[-1]) == (1, LONGEST_PAUSE)
    text.output_ids += [100, 101]
    while lookup.rests(text):
        text.output_ids.append(text.output_ids[-1] + 1)
    assert list(draft_of(lookup, text, 2)) == [text.output_ids[-1] + 1, text.output_ids[-1] + 2]


def test_only_the_end_of_a_long_prompt_is_indexed() -> None:
    prompt = [7, 8, 9, *range(100, 100 + PROMPT_TOKENS), 7]
    assert list(draft_of(PromptLookup(4), sequence(prompt, [8]), 4)) == []
    assert list(draft_of(PromptLookup(4), sequence(prompt, [8, 300, 301]), 2)) == [302, 303]


def test_a_periodic_text_is_continued_periodically() -> None:
    assert draft_of(PromptLookup(5), sequence([7, 8, 7, 8, 7], [8]), 5) == [7, 8, 7, 8, 7]


def test_drafts_get_shorter_when_wrong_and_longer_when_right() -> None:
    lookup, text = PromptLookup(4), sequence([1, 2] * 20, [1])
    assert draft_of(lookup, text, 4) == [2, 1, 2, 1]
    text.output_ids += [2, 9]  # one of four was right
    assert list(draft_of(lookup, text, 4)) == []
    text.output_ids += [1, 2]
    assert draft_of(lookup, text, 4) == [9]
    text.output_ids += [9]
    assert draft_of(lookup, text, 4) == [1, 2]
    text.output_ids += [1, 2]
    assert draft_of(lookup, text, 4) == [9, 1, 2, 9]


def test_wrong_drafts_make_rests_longer() -> None:
    lookup, text = PromptLookup(4), sequence([1, 2] * 20, [1])
    offered = []
    for token in range(100, 1100):
        if not lookup.rests(text) and draft_of(lookup, text, 4):
            offered.append(len(text.output_ids))
        text.output_ids += [token, 1, 2]  # after 1 and 2 came another token each time
    gaps = [later - earlier for earlier, later in pairwise(offered)]
    assert gaps == sorted(gaps)
    assert gaps[0] < 10
    assert LONGEST_REST <= gaps[-1] < LONGEST_REST + 6


TOKENS = st.integers(0, 3)


@given(st.lists(TOKENS, max_size=30), st.lists(TOKENS, min_size=1, max_size=30), st.integers(1, 9))
def test_a_draft_equals_a_plain_search_or_is_empty(prompt: list[int], output: list[int], count: int) -> None:
    """Read off the whole text: some end of two or more tokens is followed by this elsewhere."""
    draft = list(draft_of(PromptLookup(9), sequence(prompt, output), count))
    assert len(draft) <= count
    text = prompt + output
    there = [text[at - 2 : at] == text[-2:] for at in range(2, len(text))]
    assert bool(draft) == (len(text) > 2 and any(there))
    if draft:
        starts = [at for at, same in zip(range(2, len(text)), there, strict=True) if same]
        whole = text + draft
        assert any(whole[at : at + len(draft)] == draft for at in starts)
