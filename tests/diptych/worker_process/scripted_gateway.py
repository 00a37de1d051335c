"""A gateway's share of one request: attempts, retries after a preemption, cancels; it keeps the messages."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from decode_worker.gateway_stream import GatewayStream as DecodeStream
from diptych.worker.v1 import decode_pb2, prefill_pb2, work_pb2
from kvtransfer.protocol.messages import Key
from prefill_worker.gateway_stream import GatewayStream as PrefillStream
from tests.diptych.worker_process.both_workers import Decode, House, Prefill

NAMESPACE = bytes(32)


def work(key: Key, prompt: tuple[int, ...], max_tokens: int, **changes: Any) -> work_pb2.Work:
    """A greedy request of one choice, if `sampling` and `choices` say nothing else.

    `delivered` are tokens of earlier attempts, `seconds` a deadline.
    """
    delivered = changes.pop("delivered", ())
    message = work_pb2.Work(
        id=work_pb2.AttemptId(request_id=key[0], attempt=key[1]),
        token_ids=(*prompt, *delivered),
        prompt_tokens=len(prompt),
        sampling=work_pb2.Sampling(top_p=1.0, repetition_penalty=1.0, **changes.pop("sampling", {})),
        choices=changes.pop("choices", (0,)),
        prompt_logprobs=changes.pop("prompt_logprobs", None),
        stopping=work_pb2.Stopping(
            max_tokens=max_tokens,
            min_tokens=changes.pop("min_tokens", 0),
            stop_token_ids=changes.pop("stop", ()),
        ),
        cache_namespace=hashlib.sha256(adapter).digest()
        if (adapter := changes.pop("adapter", b""))
        else NAMESPACE,
        adapter=adapter,
        cache_read=changes.pop("cache_read", True),
        cache_write=changes.pop("cache_write", True),
        reserve_worst_case=changes.pop("reserve", False),
        local_prefill=changes.pop("local", work_pb2.LOCAL_PREFILL_UNSPECIFIED),
    )
    seconds = changes.pop("seconds", None)
    if seconds is not None:
        message.time_left.FromNanoseconds(int(seconds * 1e9))
    assert not changes
    return message


@dataclass
class Heard:
    """The messages of workers on one attempt; `ended` once every choice has its terminal message."""

    choices: tuple[int, ...] = (0,)
    outputs: dict[int, list[int]] = field(default_factory=dict)
    early: dict[int, list[int]] = field(default_factory=dict)  # what they begin with, by the prefill worker
    scores: dict[int, list[work_pb2.Score]] = field(default_factory=dict)
    words: dict[int, list[str]] = field(default_factory=dict)
    reasons: dict[int, work_pb2.FinishReason] = field(default_factory=dict)
    over: dict[int, asyncio.Event] = field(default_factory=dict)
    prompt_scores: list[work_pb2.Score] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        for choice in self.choices:
            self.outputs[choice], self.scores[choice], self.words[choice] = [], [], []
            self.early[choice] = []
            self.over[choice] = asyncio.Event()

    @property
    def tokens(self) -> list[int]:
        """Tokens of the only choice."""
        (output,) = self.outputs.values()
        return output

    @property
    def terminal_messages(self) -> list[str]:
        """Terminal messages of all choices."""
        return [word for words in self.words.values() for word in words]

    def agree(self, choice: int) -> None:
        """Check that both workers sent the same tokens; either may be the faster one."""
        both = zip(self.early[choice], self.outputs[choice], strict=False)
        assert all(early == later for early, later in both)

    def end(self, choice: int, word: str) -> None:
        self.words[choice].append(word)
        self.over[choice].set()
        if all(self.words.values()):
            self.ended.set()

    def end_all(self, word: str) -> None:
        for choice in self.choices:
            self.end(choice, word)


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
        heard = self.heard.setdefault(_key(message.id), Heard(tuple(message.choices)))
        decode.loop.requests.attach(message, self._decode_streams[id(decode)])
        prefill.loop.requests.dispatch(self._dispatch(decode, message), self._prefill_streams[id(prefill)])
        return heard

    def start_local(self, decode: Decode, message: work_pb2.Work) -> Heard:
        """Attach only: the decode worker computes the prompt itself, if it may."""
        heard = self.heard.setdefault(_key(message.id), Heard(tuple(message.choices)))
        decode.loop.requests.attach(message, self._decode_streams[id(decode)])
        return heard

    def lose(self) -> None:
        """Break the streams: the workers have to cancel the attempts that came over them."""
        self.lost = True
        for decode in self.house.decodes:
            decode.loop.requests.gateway_lost(self._decode_streams[id(decode)])
        for prefill in self.house.prefills:
            prefill.loop.requests.gateway_lost(self._prefill_streams[id(prefill)])

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

    def _take_scores(self, scores: work_pb2.PromptScores) -> None:
        heard = self.heard[_key(scores.id)]
        assert scores.first_position == len(heard.prompt_scores) + 1
        heard.prompt_scores += scores.scores

    def _from_decode(self, message: decode_pb2.DecodeServiceLinkResponse) -> None:
        if message.WhichOneof("message") == "prompt_scores":
            self._take_scores(message.prompt_scores)
        for tokens in message.step.tokens:
            heard = self.heard[_key(tokens.id)]
            heard.outputs[tokens.choice] += tokens.token_ids
            heard.agree(tokens.choice)
            heard.scores[tokens.choice] += tokens.scores
        for ended in message.step.ended:
            how = ended.WhichOneof("outcome")
            if how == "finished":
                self.heard[_key(ended.id)].reasons[ended.choice] = ended.finished
            reason = work_pb2.FailureReason.Name(ended.failure.reason) if how == "failure" else how
            self.heard[_key(ended.id)].end(ended.choice, f"decode {reason}")

    def _from_prefill(self, message: prefill_pb2.PrefillServiceLinkResponse) -> None:
        if message.WhichOneof("message") == "prompt_scores":
            self._take_scores(message.prompt_scores)
            return
        for tokens in message.first_tokens.tokens:
            heard = self.heard[_key(tokens.id)]
            heard.early[tokens.choice] += tokens.token_ids
            heard.agree(tokens.choice)
        ended = message.ended
        if ended.WhichOneof("outcome") == "failure":
            word = f"prefill {work_pb2.FailureReason.Name(ended.failure.reason)}"
            self.heard[_key(ended.id)].end_all(word)


def _key(attempt: work_pb2.AttemptId) -> Key:
    return (attempt.request_id, attempt.attempt)
