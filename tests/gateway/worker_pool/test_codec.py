"""The codecs' reading of workers' messages."""

from __future__ import annotations

from diptych.worker.v1 import prefill_pb2, work_pb2
from gateway.attempt.types import TokenLogprob, TokensArrived
from gateway.worker_pool.codec import PrefillCodec
from prefill_worker.gateway_stream import GatewayStream


async def test_prefill_codec_parses_first_tokens_as_early() -> None:
    """Messages as the prefill worker writes them, with the cached tokens and times of the prompt."""
    stream = GatewayStream("g")
    tokens = {2: work_pb2.SampledToken(token_id=7), 3: work_pb2.SampledToken(token_id=8)}
    tokens[3].score.CopyFrom(work_pb2.Score(logprob=-0.5, rank=1))
    times = work_pb2.PhaseTimes(cached_tokens=32)
    times.prefill.FromMilliseconds(20)
    stream.first_tokens(("r", 4), 5, tokens, times)
    stream.close()
    (message,) = [message async for message in stream.messages()]
    events = PrefillCodec("g", 1).parse(message)
    assert isinstance(events, list)
    assert [(event.work_id, event.attempt, event.choice, event.terminal) for event in events] == [
        ("r", 4, 2, False),
        ("r", 4, 3, False),
    ]
    assert [event.event for event in events] == [
        TokensArrived(4, 5, (7,), 2, (), early=True),
        TokensArrived(4, 5, (8,), 3, (TokenLogprob(-0.5, 1, ()),), early=True),
    ]
    assert {event.cached_tokens for event in events} == {32}
    assert {event.phases.prefill for event in events if event.phases is not None} == {0.02}


def test_parse_returns_no_attempt_events_for_an_unknown_message() -> None:
    assert not isinstance(PrefillCodec("g", 1).parse(prefill_pb2.PrefillServiceLinkResponse()), list)
