"""Output stream: text, ids and billing are the same for every cut of the tokens."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.attempt.types import TokenLogprob
from gateway.model.served_model import ServedModel
from gateway.output.detokenizer import Detokenizer
from gateway.output.output_stream import Delta, OutputStream
from gateway.output.stop_strings import StopStrings

TEXT = "Once upon a time, in Málaga 😀😃, a naïve robot said: stop here! And then it went on."


def stream(
    model: ServedModel,
    stop: tuple[str, ...] = (),
    *,
    include_stop: bool = False,
    min_tokens: int = 0,
    interval: int = 1,
    stop_ids: frozenset[int] = frozenset(),
    want_text: bool = True,
    want_token_ids: bool = True,
    want_scores: bool = False,
) -> OutputStream:
    return OutputStream(
        Detokenizer(model.tokenizer, True),
        StopStrings(stop, include_stop) if stop else None,
        stop_ids=stop_ids,
        include_stop=include_stop,
        min_tokens=min_tokens,
        interval=interval,
        want_text=want_text,
        want_token_ids=want_token_ids,
        want_scores=want_scores,
    )


def run(output: OutputStream, steps: list[list[int]]) -> tuple[Delta, list[Delta]]:
    """Return all pieces as one, and one by one."""
    pieces = []
    for step in steps:
        if output.push(step, [score(i) for i in step]):
            break
        if output.due:
            pieces.append(output.take())
    output.finish()
    pieces.append(output.take())
    whole = Delta(
        "".join(piece.text for piece in pieces),
        [i for piece in pieces for i in piece.token_ids],
        sum(piece.tokens for piece in pieces),
        [scored for piece in pieces for scored in piece.scores],
    )
    return whole, pieces


def score(token_id: int) -> TokenLogprob:
    return TokenLogprob(-0.25, token_id)


def cut(ids: list[int], sizes: list[int]) -> list[list[int]]:
    ends = [0, *(e for e in accumulate(sizes) if e < len(ids)), len(ids)]
    return [ids[a:b] for a, b in pairwise(ends)]


@settings(deadline=None, max_examples=50)
@given(sizes=st.lists(st.integers(1, 5), max_size=60), interval=st.integers(1, 7))
@pytest.mark.parametrize("stop", [(), ("stop here",), ("😃, a", "zzz"), ("never",)])
def test_output_is_independent_of_cuts_and_interval(
    bundled: ServedModel, sizes: list[int], interval: int, stop: tuple[str, ...]
) -> None:
    ids = bundled.tokenizer.encode(TEXT)
    whole, _ = run(stream(bundled, stop, want_scores=True), [[i] for i in ids])
    output = stream(bundled, stop, interval=interval, want_scores=True)
    same, pieces = run(output, cut(ids, sizes))
    assert same == whole
    assert output.billed == same.tokens == len(same.token_ids)
    assert same.scores == [(i, score(i)) for i in same.token_ids]  # nothing beyond a stop string
    assert output.logprob == -0.25 * output.billed
    assert all([i for i, _ in piece.scores] == list(piece.token_ids) for piece in pieces)
    matched = next((s for s in stop if s in TEXT), None)
    assert same.text == (TEXT if matched is None else TEXT[: TEXT.index(matched)])
    if matched is not None:
        shown = bundled.tokenizer.decode(ids[: output.billed], True)
        before = bundled.tokenizer.decode(ids[: output.billed - 1], True)
        assert matched in shown
        assert matched not in before
    assert all("\ufffd" not in piece.text for piece in pieces)


def test_first_and_last_piece_are_due_at_once_and_others_by_interval(bundled: ServedModel) -> None:
    ids = bundled.tokenizer.encode(TEXT)[:10]
    _, pieces = run(stream(bundled, interval=4), [[i] for i in ids])
    assert [piece.tokens for piece in pieces] == [1, 4, 4, 1]


def test_include_stop_shows_the_stop_string(bundled: ServedModel) -> None:
    ids = bundled.tokenizer.encode(TEXT)
    whole, _ = run(stream(bundled, ("stop here",), include_stop=True), [ids])
    assert whole.text == TEXT[: TEXT.index("stop here")] + "stop here"


def test_stop_string_applies_after_min_tokens(bundled: ServedModel) -> None:
    ids = bundled.tokenizer.encode("stop stop stop stop")
    output = stream(bundled, ("stop",), min_tokens=3)
    whole, _ = run(output, [[i] for i in ids])
    assert output.billed >= 3
    assert whole.text.startswith("stop stop")


@pytest.mark.parametrize("include_stop", [False, True])
def test_stop_string_may_begin_before_min_tokens(bundled: ServedModel, include_stop: bool) -> None:
    ids = [bundled.tokenizer.encode(piece)[0] for piece in (" Paris", ".", "\n", "\n", "What")]
    stops = (".\n\n", " Paris")  # the second is complete too early, which must not hide the first
    output = stream(bundled, stops, include_stop=include_stop, min_tokens=3)
    whole, _ = run(output, [[i] for i in ids])
    assert whole.text == (" Paris.\n\n" if include_stop else " Paris")
    assert output.billed == 4
    assert output.stop_match is not None
    assert output.stop_match.text == ".\n\n"


def test_stop_string_complete_before_min_tokens_is_shown(bundled: ServedModel) -> None:
    ids = [bundled.tokenizer.encode(piece)[0] for piece in (" Paris", ".", "\n")]
    whole, _ = run(stream(bundled, (".", "s."), min_tokens=3), [[i] for i in ids])
    assert whole.text == " Paris.\n"


@pytest.mark.parametrize("have", range(1, 4))
def test_restore_within_a_stop_string_that_began_before_min_tokens(bundled: ServedModel, have: int) -> None:
    ids = [bundled.tokenizer.encode(piece)[0] for piece in (" Paris", ".", "\n", "\n", "What")]
    output = stream(bundled, (".\n\n",), min_tokens=3)
    assert output.restore(ids[:have])
    whole, _ = run(output, [[i] for i in ids[have:]])
    assert (whole.text, list(whole.token_ids)) == ("", ids[have:4])
    assert output.over


@pytest.mark.parametrize("include_stop", [False, True])
def test_stop_token_is_billed_and_shown_on_request(bundled: ServedModel, include_stop: bool) -> None:
    ids = bundled.tokenizer.encode("Fine!")
    output = stream(bundled, stop_ids=frozenset(ids[-1:]), include_stop=include_stop)
    whole, _ = run(output, [ids])
    assert whole.text == bundled.tokenizer.decode(ids if include_stop else ids[:-1], True)
    assert list(whole.token_ids) == ids
    assert output.billed == len(ids)
    assert output.stop_match is not None
    assert output.stop_match.token_id == ids[-1]


def test_text_only_output_waits_for_whole_characters(bundled: ServedModel) -> None:
    ids = bundled.tokenizer.encode("😀")
    assert len(ids) > 1
    _, pieces = run(stream(bundled, want_token_ids=False), [[i] for i in ids])
    assert [piece.text for piece in pieces if piece.text] == ["😀"]
    assert sum(piece.tokens for piece in pieces) == len(ids)


def test_ids_only_output_needs_no_detokenizer(bundled: ServedModel) -> None:
    ids = bundled.tokenizer.encode(TEXT)
    whole, _ = run(stream(bundled, want_text=False), [ids])
    assert (whole.text, list(whole.token_ids)) == ("", ids)


def test_scores_are_summed_and_shown_on_request(bundled: ServedModel) -> None:
    ids = bundled.tokenizer.encode(TEXT)
    output = stream(bundled)
    whole, _ = run(output, [ids])
    assert not whole.scores
    assert output.logprob == -0.25 * len(ids)


def test_scores_alone_make_a_piece_due(bundled: ServedModel) -> None:
    ids = bundled.tokenizer.encode(TEXT)
    _, pieces = run(
        stream(bundled, want_text=False, want_token_ids=False, want_scores=True), [[i] for i in ids]
    )
    assert [len(piece.scores) for piece in pieces] == [1] * len(ids) + [0]


@pytest.mark.parametrize("end", [1, 2, 3])
def test_output_that_is_cut_never_ends_in_half_a_character(bundled: ServedModel, end: int) -> None:
    """Bytes that no further byte could complete are the model's own, and shown; so is what it ends with."""
    ids = bundled.tokenizer.encode("ab\U0001f9ff", add_special=False)
    assert len(ids) > 3
    for cut in (True, False):
        for streamed in (True, False):
            output = stream(bundled)
            text = ""
            for token in ids[:-end]:
                output.push([token])
                text += output.take().text if streamed else ""
            output.finish(cut=cut)
            text += output.take().text
            whole = bundled.tokenizer.decode(ids[:-end], True)
            assert text == (whole.rstrip("\ufffd") if cut else whole)
    ended = stream(bundled, stop_ids=frozenset({0}))
    ended.push([*ids[:-1], 0])
    ended.finish(cut=True)
    assert ended.take().text.endswith("\ufffd")
