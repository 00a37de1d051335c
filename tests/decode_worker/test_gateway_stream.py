"""Messages of a decode worker to a gateway: none is larger than the other end takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from decode_worker.gateway_stream import MESSAGE_BYTES, PIECE_TOKENS, GatewayStream
from decode_worker.request import DecodeRequest
from diptych.engine.sampling import Sampled, TokenLogprob
from diptych.worker.v1 import work_pb2
from diptych.worker_process.attempt import Attempt
from kvtransfer.drivers.codec import attempt_id
from tests.diptych.worker_process.scripted_gateway import work

SCORE = TokenLogprob(-1.5, 3, tuple((40_000 + n, -2.5 - n) for n in range(20)))
LENGTH = work_pb2.FINISH_REASON_LENGTH


def request(gateway: GatewayStream, name: str = "r", cached: int = 0) -> DecodeRequest:
    attempt = Attempt.from_work(work((name, 1), (1, 2, 3), 9999), max_context=99_999)
    made: Any = DecodeRequest(attempt, gateway, None, attempt_id(attempt.key))  # type: ignore[arg-type]
    made.times.cached_tokens = cached
    return made


def steps(gateway: GatewayStream, rows: int, count: int) -> None:
    """Send steps as the engine loop does."""
    asking = request(gateway)
    for index in range(count):
        for choice in range(rows):
            gateway.token(asking.wire_id, choice, index, Sampled(5000 + index, SCORE))
        gateway.flush()


def say(
    gateway: GatewayStream,
    asking: DecodeRequest,
    rank: int,
    output: Sequence[int],
    scores: Sequence[TokenLogprob | None],
) -> None:
    gateway.output(asking.key, rank, output, scores, LENGTH, asking.times_now())


async def test_outputs_of_a_large_beam_search_are_complete_in_small_messages() -> None:
    gateway = GatewayStream("g")
    tokens = [tuple(range(rank, 1500 + rank)) for rank in range(4)]
    for rank, output in enumerate(tokens):
        say(gateway, request(gateway, cached=7), rank, output, [SCORE] * len(output))
    messages = []
    heard: dict[int, list[int]] = {rank: [] for rank in range(4)}
    ended: list[int] = []
    async for message in gateway.messages():
        messages.append(message)
        for one in message.step.tokens:
            assert one.index == len(heard[one.choice])
            assert one.HasField("times") == (one.index == 0)
            assert one.cached_tokens == (7 if one.index == 0 else 0)
            assert len(one.scores) == len(one.token_ids) <= PIECE_TOKENS
            assert one.choice not in ended
            heard[one.choice] += one.token_ids
        for end in message.step.ended:
            assert end.finished == LENGTH
            ended.append(end.choice)
        if len(ended) == 4:
            gateway.close()
    assert [tuple(output) for output in heard.values()] == tokens
    assert ended == [0, 1, 2, 3]
    assert max(message.ByteSize() for message in messages) < MESSAGE_BYTES / 16


async def test_tokens_are_sent_between_pieces_of_a_whole_output() -> None:
    gateway = GatewayStream("g")
    say(gateway, request(gateway), 0, range(5 * PIECE_TOKENS), [None] * 5 * PIECE_TOKENS)
    messages = gateway.messages()
    assert (await anext(messages)).step.tokens[0].index == 0
    steps(gateway, rows=1, count=1)
    gateway.heartbeat(work_pb2.Heartbeat(progress=1))
    assert (await anext(messages)).step.tokens[0].token_ids == [5000]
    assert (await anext(messages)).HasField("heartbeat")
    assert [(await anext(messages)).step.tokens[0].index // PIECE_TOKENS for _ in range(4)] == [1, 2, 3, 4]
    gateway.close()


async def test_queued_steps_are_merged_up_to_the_message_size() -> None:
    gateway = GatewayStream("g")
    steps(gateway, rows=256, count=40)  # more than 2 MiB
    gateway.heartbeat(work_pb2.Heartbeat(progress=1))
    messages = []
    async for message in gateway.messages():
        messages.append(message)
        if message.HasField("heartbeat"):
            gateway.close()
    *merged, _ = messages
    assert [one.index for message in merged for one in message.step.tokens] == [
        index for index in range(40) for _ in range(256)
    ]
    assert all(message.ByteSize() < MESSAGE_BYTES + 100 for message in merged)
    assert len(merged) < 5


async def test_few_queued_steps_are_one_message() -> None:
    gateway = GatewayStream("g")
    steps(gateway, rows=2, count=10)
    assert len((await anext(gateway.messages())).step.tokens) == 20
    gateway.close()
