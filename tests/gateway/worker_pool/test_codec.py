"""What the gateway reads in workers' messages."""

from __future__ import annotations

from diptych.worker.v1 import prefill_pb2, work_pb2
from gateway.attempt.types import TokenScore
from gateway.attempt.worker_events import TokensArrived
from gateway.worker_pool.codec import PrefillCodec
from prefill_worker.gateway_stream import GatewayStream


async def test_first_tokens_of_a_prefill_worker() -> None:
    """As it writes them: early, with what the first message to the client says of the prompt."""
    stream = GatewayStream("g")
    tokens = {2: work_pb2.SampledToken(token_id=7), 3: work_pb2.SampledToken(token_id=8)}
    tokens[3].score.CopyFrom(work_pb2.Score(logprob=-0.5, rank=1))
    times = work_pb2.PhaseTimes(cached_tokens=32)
    times.prefill.FromMilliseconds(20)
    stream.first_tokens(("r", 4), 5, tokens, times)
    stream.close()
    (message,) = [message async for message in stream.messages()]
    heard = PrefillCodec("g", 1).read(message)
    assert isinstance(heard, list)
    assert [(news.work_id, news.attempt, news.choice, news.last_word) for news in heard] == [
        ("r", 4, 2, False),
        ("r", 4, 3, False),
    ]
    assert [news.event for news in heard] == [
        TokensArrived(4, 5, (7,), 2, (), early=True),
        TokensArrived(4, 5, (8,), 3, (TokenScore(-0.5, 1, ()),), early=True),
    ]
    assert {news.cached_tokens for news in heard} == {32}
    assert {news.phases.prefill for news in heard if news.phases is not None} == {0.02}


def test_a_message_of_a_kind_that_is_not_known_here_says_nothing_of_attempts() -> None:
    assert not isinstance(PrefillCodec("g", 1).read(prefill_pb2.PrefillServiceLinkResponse()), list)
