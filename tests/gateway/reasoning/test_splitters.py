"""Reasoning splitters: the same split however an output is cut, and where workers begin a grammar."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from diptych.runtime.grammar.reasoning_span import SpanTracker
from diptych.runtime.tokenizer.tokenizer import Tokenizer
from gateway.reasoning import harmony
from gateway.reasoning.formats import format_of
from gateway.reasoning.splitter import Part, ReasoningFormat, ReasoningSplitter, Segment, Start
from tests.diptych.runtime.tokenizer.small_models import byte_level, write_folder

ADDED = ("</think>", "[THINK]", "[/THINK]", *harmony.MARKS, "<|constrain|>")
FORMATS = {"think": "</think>", "mistral": "[THINK]", "harmony": "<|channel|>"}
WORDS = (" ", "\n", "a", "b", "final", "analysis", "commentary", " to=functions.now", "</", "think>", "<|end")
TAGS = {"think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    made = byte_level()
    made.add_tokens([AddedToken(text, special=text[0] != "<", normalized=False) for text in ADDED[:3]])
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ADDED[3:]])
    return Tokenizer.load(write_folder(tmp_path_factory.mktemp("model"), made))


def form_of(name: str, tokenizer: Tokenizer) -> ReasoningFormat:
    found = format_of(FORMATS[name], tokenizer)
    assert found is not None
    assert found.name == name
    return found


def ids_of(tokenizer: Tokenizer, *pieces: str) -> list[int]:
    """Return the ids of pieces of text, in which a mark is a piece of its own."""
    ids: list[int] = []
    for piece in pieces:
        known = tokenizer.id_of(piece) if piece in (*ADDED, "<think>") else None
        ids += tokenizer.encode(piece) if known is None else [known]
    return ids


def split(splitter: ReasoningSplitter, pieces: Sequence[Sequence[int]]) -> dict[Part, list[int]]:
    found: list[Segment] = []
    for piece in pieces:
        found += splitter.push(piece)
    found += splitter.finish()
    by_part: dict[Part, list[int]] = {part: [] for part in Part}
    for segment in found:
        by_part[segment.part] += segment.token_ids
    return by_part


def texts(tokenizer: Tokenizer, splitter: ReasoningSplitter, ids: Sequence[int]) -> tuple[str, str]:
    found = split(splitter, [[one] for one in ids])
    reasoning, content = (
        tokenizer.decode(found[part], skip_special=False) for part in (Part.REASONING, Part.CONTENT)
    )
    return reasoning, content


def outputs(name: str) -> st.SearchStrategy[list[str]]:
    marks = TAGS.get(name, harmony.MARKS)
    return st.lists(st.sampled_from((*marks, *WORDS)), max_size=24)


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
def test_the_split_does_not_depend_on_the_cuts(name: str, tokenizer: Tokenizer, data: st.DataObject) -> None:
    form = form_of(name, tokenizer)
    ids = ids_of(tokenizer, *data.draw(outputs(name)))
    start = data.draw(st.sampled_from([Start.OPEN, Start.BEFORE]))
    constrained = data.draw(st.booleans())
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    pieces = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    whole, cut = (form.splitter(start, constrained=constrained) for _ in range(2))
    expected = split(whole, [ids])
    assert split(cut, pieces) == expected
    assert cut.reasoning_tokens == whole.reasoning_tokens
    parts = expected[Part.REASONING] + expected[Part.CONTENT]
    assert set(parts) <= {*ids, *ids_of(tokenizer, harmony.START)}
    assert whole.reasoning_tokens >= len(expected[Part.REASONING])


@pytest.mark.parametrize("name", TAGS)
@given(data=st.data())
def test_the_answer_begins_where_workers_begin_a_grammar(
    name: str, tokenizer: Tokenizer, data: st.DataObject
) -> None:
    form = form_of(name, tokenizer)
    ids = ids_of(tokenizer, *data.draw(outputs(name)))
    start = data.draw(st.sampled_from([Start.OPEN, Start.BEFORE]))
    found = split(form.splitter(start, constrained=True), [ids])
    tracker = SpanTracker(form.span(start, forced=False))
    cut = data.draw(st.integers(0, len(ids)))
    held = [*tracker.push(ids[:cut]), *tracker.copy().push(ids[cut:])]
    assert held == found[Part.CONTENT]
    assert tracker.inside or start is Start.BEFORE or cut > 0


def test_workers_begin_a_grammar_after_the_header_of_the_final_message(tokenizer: Tokenizer) -> None:
    form = form_of("harmony", tokenizer)
    reasoning = ("<|channel|>", "analysis", "<|message|>", "the final word", "<|end|>")
    headers = (
        ("<|channel|>", "final", "<|message|>"),
        ("<|channel|>", "final", " ", "<|constrain|>", "json", "<|message|>"),
    )
    for header in headers:
        ids = ids_of(tokenizer, *reasoning, "<|start|>", "assistant", *header)
        answer = ids_of(tokenizer, "{}")
        tracker = SpanTracker(form.span(Start.OPEN, forced=False))
        assert list(tracker.push(ids)) == []
        assert not tracker.inside
        assert tracker.push(answer) == answer
        splitter = form.splitter(Start.OPEN, constrained=True)
        assert texts(tokenizer, splitter, ids + answer) == ("the final word", "{}")
        # Control: one token earlier the grammar does not hold yet.
        short = SpanTracker(form.span(Start.OPEN, forced=False))
        short.push(ids[:-1])
        assert short.inside
    forced = SpanTracker(form.span(Start.OPEN, forced=True))
    ids = ids_of(tokenizer, *reasoning)
    assert list(forced.push(ids)) == []
    assert not forced.inside


@pytest.mark.parametrize(
    ("start", "written", "expected"),
    [
        (Start.OPEN, ("Hm", "</think>", "\n\nYes"), ("Hm", "\n\nYes")),
        (Start.OPEN, ("Hm",), ("Hm", "")),
        (Start.OPEN, ("</think>", "Yes"), ("", "Yes")),
        (Start.BEFORE, ("<think>", "\nHm", "</think>", "Yes"), ("\nHm", "Yes")),
        (Start.BEFORE, ("\n", "<think>", "Hm", "</think>", "Yes"), ("Hm", "Yes")),
        (Start.BEFORE, ("\n", "Yes"), ("", "\nYes")),
        (Start.BEFORE, ("\n",), ("", "\n")),
        (Start.BEFORE, ("Yes", "</think>", "No"), ("", "Yes</think>No")),
        (Start.OPEN, ("Hm", "</think>", "a", "<think>", "b", "</think>"), ("Hm", "a<think>b</think>")),
        # A mark that is only spelled is text.
        (Start.OPEN, ("</th", "ink>", "</think>", "</th", "ink>"), ("</think>", "</think>")),
    ],
)  # fmt: skip
def test_tags_are_split(
    tokenizer: Tokenizer, start: Start, written: tuple[str, ...], expected: tuple[str, str]
) -> None:
    splitter = form_of("think", tokenizer).splitter(start, constrained=False)
    ids = ids_of(tokenizer, *written)
    assert texts(tokenizer, splitter, ids) == expected
    content = len(split(form_of("think", tokenizer).splitter(start, constrained=False), [ids])[Part.CONTENT])
    assert splitter.reasoning_tokens == len(ids) - content


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (("<|channel|>", "analysis", "<|message|>", "Hm", "<|end|>", "<|start|>", "assistant", "<|channel|>",
          "final", "<|message|>", "Yes"), ("Hm", "Yes")),
        (("<|channel|>", "final", "<|message|>", "Yes"), ("", "Yes")),
        (("<|channel|>", "commentary", "<|message|>", "So", "<|end|>", "<|start|>", "assistant"), ("", "So")),
        (("<|channel|>", "analysis", "<|message|>", "Hm"), ("Hm", "")),
        (("<|channel|>", "analysis"), ("", "")),
        ((" to=functions.now", "<|channel|>", "commentary", "<|message|>", "{}"),
         ("", "<|start|> to=functions.now<|channel|>commentary<|message|>{}")),
        (("<|channel|>", "analysis", "<|message|>", "Hm", "<|end|>", "<|start|>", "assistant", "<|channel|>",
          "commentary to=functions.now ", "<|constrain|>", "json", "<|message|>", "{}"),
         ("Hm", "<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}")),
        (("Yes",), ("", "Yes")),
        (("Yes " * 40,), ("", "Yes " * 40)),
    ],
)  # fmt: skip
def test_channels_are_split(
    tokenizer: Tokenizer, written: tuple[str, ...], expected: tuple[str, str]
) -> None:
    splitter = form_of("harmony", tokenizer).splitter(Start.OPEN, constrained=False)
    assert texts(tokenizer, splitter, ids_of(tokenizer, *written)) == expected


def test_a_prompt_says_where_its_output_begins(tokenizer: Tokenizer) -> None:
    think = form_of("think", tokenizer)
    assert think.start("<|im_start|>assistant\n<think>\n") is Start.OPEN
    assert think.start("<|im_start|>assistant\n<think>\n\n</think>\n\n") is Start.CLOSED
    assert think.start("<think>\nHm\n</think>\nYes<|im_end|>\n<|im_start|>assistant\n") is Start.BEFORE
