"""A gateway's stream into this worker, and the messages to write on it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence

from diptych.runtime.send_queue import SendQueue
from diptych.worker.v1 import prefill_pb2, work_pb2
from diptych.worker_process.logprob_codec import attach_timings
from kvtransfer.drivers.codec import attempt_id
from kvtransfer.protocol.messages import Key


class GatewayStream:
    """Collects this worker's messages on the attempts of one gateway."""

    def __init__(self, gateway_id: str) -> None:
        self.gateway_id = gateway_id
        self.keys: dict[Key, None] = {}  # attempts that live and die with this stream, in order
        self._queue: SendQueue[prefill_pb2.PrefillServiceLinkResponse] = SendQueue()

    def committed(self, key: Key) -> None:
        self._ended(prefill_pb2.PrefillEnded(id=attempt_id(key), committed=prefill_pb2.Committed()))

    def failed(self, key: Key, failure: work_pb2.Failure) -> None:
        self._ended(prefill_pb2.PrefillEnded(id=attempt_id(key), failure=failure))

    def prompt_scores(self, key: Key, first_position: int, scores: Sequence[work_pb2.Score]) -> None:
        """Send the log-probabilities of the prompt's tokens from `first_position` on."""
        message = work_pb2.PromptScores(id=attempt_id(key), first_position=first_position, scores=scores)
        self._queue.put(prefill_pb2.PrefillServiceLinkResponse(prompt_scores=message))

    def first_tokens(
        self, key: Key, index: int, tokens: Mapping[int, work_pb2.SampledToken], times: work_pb2.PhaseTimes
    ) -> None:
        """Send first tokens by choice; `index` is their place in its output, `times` the phases until now."""
        message = prefill_pb2.FirstTokens()
        for choice, token in tokens.items():
            first = message.tokens.add(
                id=attempt_id(key), index=index, token_ids=(token.token_id,), choice=choice
            )
            if token.HasField("score"):
                first.scores.append(token.score)
            attach_timings(first, times)
        self._queue.put(prefill_pb2.PrefillServiceLinkResponse(first_tokens=message))

    def _ended(self, ended: prefill_pb2.PrefillEnded) -> None:
        self._queue.put(prefill_pb2.PrefillServiceLinkResponse(ended=ended))

    def heartbeat(self, beat: work_pb2.Heartbeat) -> None:
        self._queue.put(prefill_pb2.PrefillServiceLinkResponse(heartbeat=beat))

    def flushed(self, request_id: int, blocks: int) -> None:
        """Answer a FlushPrefixCache."""
        flushed = work_pb2.PrefixCacheFlushed(id=request_id, blocks=blocks)
        self._queue.put(prefill_pb2.PrefillServiceLinkResponse(flushed=flushed))

    @property
    def has_pending(self) -> bool:
        """Always False: the end of a prompt is one message."""
        return False

    def adapter_answer(self, answer: work_pb2.AdapterAnswer) -> None:
        """Answer a LoadAdapter or UnloadAdapter."""
        self._queue.put(prefill_pb2.PrefillServiceLinkResponse(adapter_answer=answer))

    def close(self) -> None:
        self._queue.close()

    async def messages(self) -> AsyncIterator[prefill_pb2.PrefillServiceLinkResponse]:
        """Yield the messages to write; ends when the stream is closed."""
        while batch := await self._queue.take():
            for message in batch:
                yield message
