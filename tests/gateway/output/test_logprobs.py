"""Log-probabilities: prompt scores in order, ranking for ``best_of``, records in messages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from diptych.v1 import inference_pb2 as pb
from gateway.attempt.types import TokenLogprob
from gateway.cooperative_yield import PORTION, Yielder
from gateway.model.served_model import ServedModel
from gateway.output.logprobs import LogprobWriter, PromptLogprobs, best_outputs
from tests.gateway.loop_turns import turns_beside


async def test_prompt_logprob_records_have_text_bytes_and_alternatives(bundled: ServedModel) -> None:
    ids = bundled.tokenizer.encode("No 😀")
    scores = [TokenLogprob(-0.5 * i, i, ((ids[0], -0.25), (ids[-1], -2.0))) for i in range(1, len(ids))]
    info = pb.PromptInfo()
    await LogprobWriter(bundled.tokenizer).add_prompt(info, ids, scores, Yielder())
    first, *rest = info.logprobs
    assert [record.token_id for record in info.logprobs] == ids
    assert (first.HasField("logprob"), first.HasField("rank"), len(first.top)) == (False, False, 0)
    assert b"".join(r.utf8 or r.text.encode() for r in info.logprobs) == "No 😀".encode()
    for record, score in zip(rest, scores, strict=True):
        assert (record.logprob, record.rank) == (score.logprob, score.rank)
        assert [(t.token_id, t.logprob, t.rank) for t in record.top] == [
            (ids[0], -0.25, 1),
            (ids[-1], -2.0, 2),
        ]
        assert (record.top[0].text, record.top[0].utf8) == ("No", b"")
        assert (record.top[1].text, record.top[1].utf8) == ("\ufffd", bundled.tokenizer.piece(ids[-1]))


async def test_logprob_writer_yields_between_portions(bundled: ServedModel) -> None:
    alternatives = tuple((i, -1.0) for i in range(20))
    scored = [(i, TokenLogprob(-1.0, 1, alternatives)) for i in range(1000)]
    output = pb.OutputDelta()
    _, turns = await turns_beside(LogprobWriter(bundled.tokenizer).add(output, scored, Yielder()))
    assert len(output.logprobs) == 1000
    assert turns >= 21 * 1000 // (PORTION + 21)


SCORES = [TokenLogprob(-float(i), i) for i in range(1, 10)]  # of positions 1 to 9


@given(cuts=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=8))
def test_prompt_logprobs_drop_repeats_and_keep_order(cuts: list[tuple[int, int]]) -> None:
    scores = PromptLogprobs(10)
    for first, last in cuts:
        have = len(scores.scores)
        assert scores.add(first, SCORES[first - 1 : last]) is (first <= have + 1)
    assert scores.scores == SCORES[: len(scores.scores)]
    scores.add(1, SCORES)
    assert scores.complete
    assert scores.scores == SCORES


def test_prompt_logprobs_refuse_more_than_the_prompt() -> None:
    assert not PromptLogprobs(3).add(1, SCORES[:3])


def test_prompt_logprobs_are_complete_when_none_are_wanted() -> None:
    assert PromptLogprobs(0).complete
    assert PromptLogprobs(1).complete  # of a prompt's first token there is no score


def test_best_outputs_are_sorted_by_logprob_then_index() -> None:
    assert best_outputs([-3.0, -1.0, -2.0, -1.0], 3) == [1, 3, 2]
    assert best_outputs([-3.0, -1.0], 2) == [1, 0]
