"""Reasoning of an output stream: texts, counts, stops and calls."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from diptych.runtime.tokenizer.tokenizer import Tokenizer
from gateway.output.detokenizer import Detokenizer
from gateway.output.output_stream import OutputStream
from gateway.output.reasoning_text import ReasoningText
from gateway.output.stop_strings import StopStrings
from gateway.reasoning.formats import format_of
from gateway.reasoning.splitter import Start
from gateway.tools.hermes import HermesParser
from tests.diptych.runtime.tokenizer.small_models import byte_level, write_folder

TEXTS = st.text(st.sampled_from("ab \n😀é"), max_size=12)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    made = byte_level()
    made.add_tokens([AddedToken("</think>", special=False, normalized=False)])
    return Tokenizer.load(write_folder(tmp_path_factory.mktemp("model"), made))


def stream(
    tokenizer: Tokenizer, *, stop: str = "", constrained: bool = False, start: Start = Start.OPEN, **more: Any
) -> OutputStream:
    form = format_of("</think>", tokenizer)
    assert form is not None
    splitter = form.splitter(start, constrained=constrained)
    reasoning = ReasoningText(splitter, Detokenizer(tokenizer, True), exact=constrained)
    defaults: dict[str, Any] = {
        "stop_ids": frozenset(tokenizer.eos_token_ids),
        "include_stop": False,
        "min_tokens": 0,
        "interval": 1,
        "want_text": True,
        "want_token_ids": True,
        "reasoning": reasoning,
    }
    stops = StopStrings([stop], False) if stop else None
    return OutputStream(Detokenizer(tokenizer, True), stops, **(defaults | more))


def ids_of(tokenizer: Tokenizer, thoughts: str, answer: str | None) -> list[int]:
    close = tokenizer.id_of("</think>")
    assert close is not None
    return tokenizer.encode(thoughts) + ([] if answer is None else [close, *tokenizer.encode(answer)])


def read(output: OutputStream, pieces: list[list[int]], *, cut: bool = True) -> list[tuple[str, str]]:
    """Return (reasoning, text) of each piece."""
    found = []
    for piece in pieces:
        if output.push(piece):
            break
        delta = output.take()
        found.append((delta.reasoning, delta.text))
    output.finish(cut=cut)
    delta = output.take()
    return [*found, (delta.reasoning, delta.text)]


@given(thoughts=TEXTS, answer=st.none() | TEXTS, cuts=st.lists(st.integers(0, 40), max_size=6))
def test_texts_do_not_depend_on_the_cuts(
    tokenizer: Tokenizer, thoughts: str, answer: str | None, cuts: list[int]
) -> None:
    ids = ids_of(tokenizer, thoughts, answer)
    edges = [0, *sorted(min(one, len(ids)) for one in cuts), len(ids)]
    pieces = [ids[a:b] for a, b in itertools.pairwise(edges)]
    output = stream(tokenizer)
    found = read(output, pieces, cut=False)
    assert "".join(reasoning for reasoning, _ in found) == thoughts.strip("\n")
    assert "".join(text for _, text in found) == (answer or "").lstrip("\n")
    assert output.billed == len(ids)
    expected = len(tokenizer.encode(thoughts)) + (answer is not None)
    assert output.reasoning_tokens == expected


def test_a_constrained_answer_is_left_as_it_is(tokenizer: Tokenizer) -> None:
    output = stream(tokenizer, constrained=True)
    assert read(output, [ids_of(tokenizer, "\nHm\n", "\n\n{}")])[0] == ("Hm", "\n\n{}")


def test_a_stop_string_is_looked_for_in_the_answer_only(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "a b a", "\n\nb a b")
    output = stream(tokenizer, stop="a")
    found = read(output, [[one] for one in ids])
    assert "".join(reasoning for reasoning, _ in found) == "a b a"
    assert "".join(text for _, text in found) == "b "
    assert output.stop_match is not None
    assert output.stop_match.text == "a"
    # The line breaks between are the format's: a stop at a blank line does not end the answer at once.
    blank = stream(tokenizer, stop="\n\n")
    assert "".join(text for _, text in read(blank, [[one] for one in ids])) == "b a b"
    # Control: without reasoning the first one ends it.
    plain = stream(tokenizer, stop="a", reasoning=None)
    assert "".join(text for _, text in read(plain, [[one] for one in ids])) == ""


def test_calls_are_read_from_the_answer_only(tokenizer: Tokenizer) -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    output = stream(tokenizer, calls=HermesParser())
    output.push(ids_of(tokenizer, call, call))
    output.finish()
    delta = output.take()
    assert delta.reasoning == call
    assert (delta.text, [one.name for one in delta.tool_calls]) == ("", ["now"])


def test_a_restored_output_goes_on_where_it_was(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "a b a b", "\n\nb a b")
    whole = list(read(stream(tokenizer), [[one] for one in ids]))
    for at in range(len(ids)):
        output = stream(tokenizer)
        assert output.restore(ids[:at])
        rest = read(output, [[one] for one in ids[at:]])
        joined = ["".join(part[kind] for part in rest) for kind in (0, 1)]
        before = ["".join(part[kind] for part in whole[:at]) for kind in (0, 1)]
        assert [before[kind] + joined[kind] for kind in (0, 1)] == ["a b a b", "b a b"]
        assert output.reasoning_tokens == len(ids_of(tokenizer, "a b a b", ""))


def test_a_piece_of_reasoning_is_due(tokenizer: Tokenizer) -> None:
    output = stream(tokenizer, want_token_ids=False)
    output.push(tokenizer.encode("a"))
    assert output.due
    assert output.take().reasoning == "a"
    output.push(tokenizer.encode("\n"))
    assert not output.due
