"""gpt-oss' outputs through the gateway's side: splitter, detokenizer and parser of calls, token by token."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from diptych.runtime.tokenizer.tokenizer import Tokenizer
from gateway.output.detokenizer import Detokenizer
from gateway.output.output_stream import OutputStream
from gateway.output.reasoning_text import ReasoningText
from gateway.reasoning.formats import format_of
from gateway.reasoning.splitter import Start
from gateway.tools import harmony
from gateway.tools.call_pieces import CallPieces
from gateway.tools.formats import FORMATS
from gateway.tools.tool import Tool
from gateway.tools.unfinished import UnfinishedCalls
from tests.diptych.runtime.tokenizer.small_models import byte_level, write_folder

HARMONY = next(one for one in FORMATS if one.name == "harmony")
TOOLS = (Tool("now"),)
ARGUMENTS = '{"zone": "é"}'
ANALYSIS = ("<|channel|>", "analysis", "<|message|>", "Hm é.", "<|end|>", "<|start|>", "assistant")
PREAMBLE = ("<|channel|>", "commentary", "<|message|>", "So.", "<|end|>", "<|start|>", "assistant")
CALL = ("<|channel|>", "commentary to=functions.now ", "<|constrain|>", "json", "<|message|>", ARGUMENTS)
OTHER = (" to=functions.now", "<|channel|>", "commentary ", "<|constrain|>", "json", "<|message|>", ARGUMENTS)
FINAL = ("<|channel|>", "final", "<|message|>", "Yes é!")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    made = byte_level()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in harmony.MARKERS])
    end = {"eos_token_id": [made.token_to_id("<|call|>"), made.token_to_id("<|return|>")]}
    return Tokenizer.load(write_folder(tmp_path_factory.mktemp("model"), made, generation_config=end))


def ids_of(tokenizer: Tokenizer, pieces: tuple[str, ...]) -> list[int]:
    ids: list[int] = []
    for piece in pieces:
        mark = tokenizer.id_of(piece) if piece in harmony.MARKERS else None
        ids += tokenizer.encode(piece) if mark is None else [mark]
    return ids


def stream(tokenizer: Tokenizer, *, split: bool, pieces: bool) -> OutputStream:
    form = format_of("<|channel|>", tokenizer)
    assert form is not None
    shown = frozenset(one for text in harmony.MARKERS if (one := tokenizer.id_of(text)) is not None)
    splitter = form.splitter(Start.OPEN, constrained=False)
    begin = HARMONY.begin(TOOLS)
    parser = HARMONY.parser_for(begun=False, tools=TOOLS)
    return OutputStream(
        Detokenizer(tokenizer, True, shown),
        None,
        stop_ids=frozenset(tokenizer.eos_token_ids),
        include_stop=False,
        min_tokens=0,
        interval=1,
        want_text=True,
        want_token_ids=True,
        calls=CallPieces(parser, begin) if pieces else parser,
        unfinished=UnfinishedCalls(begin, HARMONY.markers, forced=False),
        reasoning=ReasoningText(splitter, Detokenizer(tokenizer, True), exact=False) if split else None,
    )


def read(output: OutputStream, cuts: list[list[int]], *, cut: bool) -> tuple[str, str, list[tuple[str, str]]]:
    """Return reasoning, text and calls, put together."""
    reasoning = text = ""
    calls: list[tuple[str, str]] = []
    for ids in [*cuts, None]:
        if ids is None:
            output.finish(cut=cut)
        else:
            output.push(ids)
        delta = output.take()
        reasoning, text = reasoning + delta.reasoning, text + delta.text
        for call in delta.tool_calls:
            name, arguments = ("", "") if call.id else calls.pop()
            calls.append((call.name or name, arguments + call.arguments_json))
    return reasoning, text, calls


@pytest.mark.parametrize("pieces", [True, False])
@pytest.mark.parametrize(
    ("written", "end", "expected"),
    [
        ((*ANALYSIS, *FINAL), "<|return|>", ("Hm é.", "Yes é!", [])),
        ((*ANALYSIS, *CALL), "<|call|>", ("Hm é.", "", [("now", ARGUMENTS)])),
        ((*ANALYSIS, *PREAMBLE, *CALL), "<|call|>", ("Hm é.", "So.", [("now", ARGUMENTS)])),
        ((*ANALYSIS, *OTHER), "<|call|>", ("Hm é.", "", [("now", ARGUMENTS)])),
        (OTHER, "<|call|>", ("", "", [("now", ARGUMENTS)])),
        (FINAL, "<|return|>", ("", "Yes é!", [])),
    ],
)
def test_an_output_is_split_and_its_call_read(
    tokenizer: Tokenizer,
    pieces: bool,
    written: tuple[str, ...],
    end: str,
    expected: tuple[str, str, list[tuple[str, str]]],
) -> None:
    ids = ids_of(tokenizer, (*written, end))
    assert read(stream(tokenizer, split=True, pieces=pieces), [[one] for one in ids], cut=False) == expected
    assert read(stream(tokenizer, split=True, pieces=pieces), [ids], cut=False) == expected


@given(cuts=st.lists(st.integers(0, 80), max_size=6), at=st.integers(0, 80), pieces=st.booleans())
def test_an_output_cut_anywhere_shows_no_markup(
    tokenizer: Tokenizer, cuts: list[int], at: int, pieces: bool
) -> None:
    for written in ((*ANALYSIS, *PREAMBLE, *CALL), (*ANALYSIS, *OTHER), (*ANALYSIS, *FINAL)):
        ids = ids_of(tokenizer, written)[:at]
        bounds = [0, *sorted(min(one, len(ids)) for one in cuts), len(ids)]
        output = stream(tokenizer, split=True, pieces=pieces)
        reasoning, text, calls = read(output, [ids[a:b] for a, b in pairwise(bounds)], cut=True)
        assert "Hm é.".startswith(reasoning)
        assert text in ("", "S", "So", "So.") or "Yes é!".startswith(text)
        for name, arguments in calls:
            assert name == "now"
            assert ARGUMENTS.startswith(arguments)
