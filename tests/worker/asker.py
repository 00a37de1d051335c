"""A gateway's share of one request: attempts, retries after a preemption, cancels; it keeps what it heard."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from decode_worker.gateway_stream import GatewayStream as DecodeStream
from diptych.worker.v1 import decode_pb2, prefill_pb2, work_pb2
from kvtransfer.messages import Key
from prefill_worker.gateway_stream import GatewayStream as PrefillStream
from tests.worker.house import Decode, House, Prefill

NAMESPACE = bytes(32)


def work(key: Key, prompt: tuple[int, ...], max_tokens: int, **changes: Any) -> work_pb2.Work:
    """A greedy request; `delivered` are tokens of earlier attempts, `seconds` a deadline."""
    delivered = changes.pop("delivered", ())
    message = work_pb2.Work(
        id=work_pb2.AttemptId(request_id=key[0], attempt=key[1]),
        token_ids=(*prompt, *delivered),
        prompt_tokens=len(prompt),
        sampling=work_pb2.Sampling(top_p=1.0, repetition_penalty=1.0),
        stopping=work_pb2.Stopping(max_tokens=max_tokens),
        cache_namespace=NAMESPACE,
        cache_read=changes.pop("cache_read", True),
        cache_write=changes.pop("cache_write", True),
        reserve_worst_case=changes.pop("reserve", False),
    )
    seconds = changes.pop("seconds", None)
    if seconds is not None:
        message.time_left.FromNanoseconds(int(seconds * 1e9))
    assert not changes
    return message


@dataclass
class Heard:
    """What the workers said of one attempt."""

    tokens: list[int] = field(default_factory=list)
    last_words: list[str] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Gateway:
    """One stream to each worker, without the network in between."""

    def __init__(self, house: House) -> None:
        self.house = house
        self.heard: dict[Key, Heard] = {}
        self.lost = False
        self._decode_streams = {id(w): DecodeStream("g") for w in house.decodes}
        self._prefill_streams = {id(w): PrefillStream("g") for w in house.prefills}
        self._readers = [
            asyncio.create_task(self._read(stream.messages(), take))
            for streams, take in (
                (self._decode_streams.values(), self._from_decode),
                (self._prefill_streams.values(), self._from_prefill),
            )
            for stream in streams
        ]

    def start(self, decode: Decode, prefill: Prefill, message: work_pb2.Work) -> Heard:
        """Attach and dispatch."""
        heard = self.heard.setdefault((message.id.request_id, message.id.attempt), Heard())
        decode.loop.attach(message, self._decode_streams[id(decode)])
        prefill.loop.dispatch(self._dispatch(decode, message), self._prefill_streams[id(prefill)])
        return heard

    def lose(self) -> None:
        """The streams break: the workers have to cancel what came over them."""
        self.lost = True
        for decode in self.house.decodes:
            decode.loop.gateway_lost(self._decode_streams[id(decode)])
        for prefill in self.house.prefills:
            prefill.loop.gateway_lost(self._prefill_streams[id(prefill)])

    async def close(self) -> None:
        self.lose()
        await asyncio.gather(*self._readers)

    def _dispatch(self, decode: Decode, message: work_pb2.Work) -> prefill_pb2.Dispatch:
        return prefill_pb2.Dispatch(
            work=message, decode_address=decode.address, decode_incarnation=decode.incarnation
        )

    async def _read(self, messages: Any, take: Callable[[Any], None]) -> None:
        async for message in messages:
            take(message)

    def _from_decode(self, message: decode_pb2.DecodeServiceLinkResponse) -> None:
        for tokens in message.step.tokens:
            self.heard[_key(tokens.id)].tokens += tokens.token_ids
        for ended in message.step.ended:
            how = ended.WhichOneof("outcome")
            reason = work_pb2.FailureReason.Name(ended.failure.reason) if how == "failure" else how
            self._last_word(ended.id, f"decode {reason}")

    def _from_prefill(self, message: prefill_pb2.PrefillServiceLinkResponse) -> None:
        ended = message.ended
        if ended.WhichOneof("outcome") == "failure":
            self._last_word(ended.id, f"prefill {work_pb2.FailureReason.Name(ended.failure.reason)}")

    def _last_word(self, attempt: work_pb2.AttemptId, word: str) -> None:
        heard = self.heard[_key(attempt)]
        heard.last_words.append(word)
        heard.ended.set()


def _key(attempt: work_pb2.AttemptId) -> Key:
    return (attempt.request_id, attempt.attempt)
