"""Scores as messages: each record says what it is about, and many of them leave the event loop to others."""

from __future__ import annotations

from diptych.v1 import inference_pb2 as pb
from gateway.attempt.types import TokenLogprob
from gateway.cooperative_yield import PORTION, Yielder
from gateway.model.served_model import ServedModel
from gateway.output.token_logprobs import TokenLogprobs
from tests.gateway.loop_turns import turns_beside


async def test_records_of_a_prompt(bundled: ServedModel) -> None:
    ids = bundled.tokenizer.encode("No 😀")
    scores = [TokenLogprob(-0.5 * i, i, ((ids[0], -0.25), (ids[-1], -2.0))) for i in range(1, len(ids))]
    info = pb.PromptInfo()
    await TokenLogprobs(bundled.tokenizer).add_prompt(info, ids, scores, Yielder())
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


async def test_many_records_are_made_in_turns(bundled: ServedModel) -> None:
    alternatives = tuple((i, -1.0) for i in range(20))
    scored = [(i, TokenLogprob(-1.0, 1, alternatives)) for i in range(1000)]
    output = pb.OutputDelta()
    _, turns = await turns_beside(TokenLogprobs(bundled.tokenizer).add(output, scored, Yielder()))
    assert len(output.logprobs) == 1000
    assert turns >= 21 * 1000 // (PORTION + 21)
